"""Every error and warning has an entry in the troubleshooting pages, and none is stale.

A page is a list of definitions.  Each term consists of patterns in backquotes: constant
parts of messages, with "…" between them.  The page ``llama`` has the messages of the
Llama example, the others have those of the library.

Messages are the sentences in ``raise`` statements, in calls of functions that raise or
warn by their names, and in functions that tell why an op's kernel cannot run.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "troubleshooting"
PAGES = sorted(FOLDER.glob("*.md"))
# fbq_jax/kernels is a link to kernels/.
OTHERS = ("fbq_jax/kernels",)
# A shorter pattern would also cover messages that nobody wrote an entry for.
FEWEST_LETTERS = 9
# Shorter text is a part of a message.
SENTENCE = 22
HOLE = "\0"  # a value in a message
RAISES = re.compile("error|warn|refus|problem", re.IGNORECASE)


class Text(NamedTuple):
    """Text in a source file."""

    place: str
    text: str
    is_message: bool


def letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def constant_text(node: ast.AST) -> str:
    """The text of an expression, with a hole for what is not constant."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(map(constant_text, values))
        case ast.BinOp(left, ast.Add(), right):
            return constant_text(left) + constant_text(right)
    return HOLE


class _Constants(ast.NodeTransformer):
    """Puts the strings that a module names into its texts."""

    def __init__(self, tree: ast.Module) -> None:
        self.values = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and constant_text(node.value) != HOLE
        }

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        return self.values.get(ast.unparse(node.value), node)


def parse(source: str) -> ast.AST:
    tree = ast.parse(source)
    return _Constants(tree).visit(tree)


def called(node: ast.AST) -> str:
    """The last part of the name that is called, if it is a call."""
    return ast.unparse(node.func).rpartition(".")[2] if type(node) is ast.Call else ""


def says(node: ast.AST) -> bool:
    """Whether the texts inside a node are those of errors or warnings."""
    if isinstance(node, ast.FunctionDef):
        return node.name.endswith("refusal")
    return isinstance(node, ast.Raise) or RAISES.search(called(node)) is not None


def texts(node: ast.AST, place: str, inside: bool = False) -> Iterator[Text]:
    """All texts in a syntax tree, without docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        text = constant_text(child)
        if text.strip(HOLE):
            line = re.sub(r"\s+", " ", text)
            is_message = inside and letters(line) >= SENTENCE and line.count(" ") > 2
            yield Text(f"{place}:{child.lineno}", line, is_message)
        else:
            yield from texts(child, place, inside or says(child))


def patterns(page: Path) -> Iterator[str]:
    """The patterns in the terms of a page."""
    for term in re.findall(r"^(.*`)\n: ", page.read_text(), re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", term)


def parts(pattern: str) -> list[str]:
    return [part.strip() for part in pattern.split("…") if part.strip()]


@pytest.mark.parametrize(
    ("folders", "pages"),
    [
        (("fbq_jax", "kernels"), [page for page in PAGES if page.stem != "llama"]),
        (("examples/llama",), [FOLDER / "llama.md"]),
    ],
    ids=["library", "llama"],
)
def test_every_message_has_an_entry_and_every_entry_a_message(folders, pages):
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    found = [
        text
        for name, path in sorted(names.items())
        if not name.startswith(OTHERS)
        for text in texts(parse(path.read_text()), name)
    ]
    messages = [text for text in found if text.is_message]
    assert len(messages) > 50  # The source was read.
    entries = {pattern: page for page in pages for pattern in patterns(page)}
    known = [p for e in entries for p in parts(e) if letters(p) >= FEWEST_LETTERS]
    missing = [
        f"{place}: {text.replace(HOLE, '…')}"
        for place, text, _ in messages
        if not any(part in text for part in known)
    ]
    assert not missing, "add entries to docs/troubleshooting/ for " + "\n".join(missing)
    stale = [
        f"{page.name}: {pattern}"
        for pattern, page in entries.items()
        if not all(any(part in text for _, text, _ in found) for part in parts(pattern))
    ]
    assert not stale, "no message has all parts of " + "\n".join(stale)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_patterns_are_specific(page):
    short = [p for p in patterns(page) if letters(p) < FEWEST_LETTERS]
    assert not short
