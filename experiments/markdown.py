"""Tables in Markdown, and the places for them on a page."""

import re
from collections.abc import Callable, Iterable


def table(head: Iterable[str], rows: list[list[str]]) -> str:
    """Returns a table, with short rows filled up; empty if there are no rows."""
    if not rows:
        return ""
    head = list(head)
    rows = [row + [""] * (len(head) - len(row)) for row in rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_PLACE = re.compile(r"<!-- ([\w/-]+) -->\n.*?<!-- end -->", re.DOTALL)


def places(text: str) -> list[str]:
    """Returns the names of the places on a page."""
    return _PLACE.findall(text)


def fill(text: str, content: Callable[[str], str]) -> str:
    """Returns a page with its places filled, each `<!-- name -->` to `<!-- end -->`.

    Args:
        text: The page.
        content: Returns what belongs in the place of a name.
    """
    return _PLACE.sub(
        lambda place: f"<!-- {place[1]} -->\n\n{content(place[1])}\n\n<!-- end -->",
        text,
    )
