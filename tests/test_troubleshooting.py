"""What the troubleshooting page quotes of the library's messages is in the source.

An entry is a definition, and begins with constant parts of messages in backquotes, with
"…" between them.  The section of messages of other programs quotes theirs.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/troubleshooting/index.md"
FOLDERS = ("fbq_jax", "examples/llama")
# Entries of these sections quote the library and the example.
SECTION = re.compile(r"^## Messages of the .*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
FEWEST_LETTERS = 9  # A shorter part would be found anywhere.
HOLE = "\0"  # a value in a message


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


def texts(node: ast.AST) -> Iterator[str]:
    """All texts in a syntax tree."""
    for child in ast.iter_child_nodes(node):
        text = constant_text(child)
        if text.strip(HOLE):
            yield re.sub(r"\s+", " ", text)
        else:
            yield from texts(child)


def quotes() -> list[str]:
    """The messages that begin the entries of the library's sections."""
    page = "".join(SECTION.findall(PAGE.read_text()))
    starts = re.findall(r"^: ((?:`[^`]+`(?:, )?)+)\.\s", page, re.MULTILINE)
    assert len(starts) == len(re.findall(r"^: ", page, re.MULTILINE))
    return [quote for start in starts for quote in re.findall(r"`([^`]+)`", start)]


def test_quoted_messages_are_in_the_source():
    sources = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = [text for file in sources for text in texts(ast.parse(file.read_text()))]
    parts = [part.strip() for quote in quotes() for part in quote.split("…")]
    parts = [part for part in parts if sum(map(str.isalpha, part)) >= FEWEST_LETTERS]
    assert len(parts) >= len(quotes()) > 0
    assert not [part for part in parts if not any(part in text for text in found)]
