"""Tables in Markdown."""

from collections.abc import Iterable


def table(head: Iterable[str], rows: list[list[str]]) -> str:
    """Returns a table, with short rows filled up; empty if there are no rows."""
    if not rows:
        return ""
    head = list(head)
    rows = [row + [""] * (len(head) - len(row)) for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
