"""Every error and warning has an entry in the troubleshooting pages, and none is stale.

A page is a list of definitions.  Each term consists of patterns in backquotes: constant
parts of messages, with "…" between them.  The page ``llama`` has the messages of the
Llama example, the others have those of the library.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import messages
from tests.messages import HOLE, Message

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "troubleshooting"
PAGES = sorted(FOLDER.glob("*.md"))
# The tools that measured the tables; who trains or serves a model does not run them.
TOOLS = ("examples/llama/bench",)
# A shorter pattern would also cover messages that nobody wrote an entry for.
FEWEST_LETTERS = 9


def patterns(page: Path) -> Iterator[str]:
    """The patterns in the terms of a page."""
    for term in re.findall(r"^(.*`)\n: ", page.read_text(), re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", term)


def covers(pattern: str, message: Message) -> bool:
    """Whether a message has the constant parts of a pattern, in its order."""
    parts = [re.escape(part.strip()) for part in pattern.split("…")]
    return re.search(".*".join(parts), message.text) is not None


def messages_of(*folders: str) -> list[Message]:
    """The messages of the Python files in some folders."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    names = (path.relative_to(ROOT).as_posix() for path in files)
    # fbq_jax/kernels is a link to kernels/.
    named = {
        n: ROOT / n for n in names if not n.startswith(("fbq_jax/kernels", *TOOLS))
    }
    return messages.collect(dict(sorted(named.items())))


@pytest.mark.parametrize(
    ("folders", "pages"),
    [
        (("fbq_jax", "kernels"), [page for page in PAGES if page.stem != "llama"]),
        (("examples/llama",), [FOLDER / "llama.md"]),
    ],
    ids=["library", "llama"],
)
def test_every_message_has_an_entry_and_every_entry_a_message(folders, pages):
    found = messages_of(*folders)
    assert len(found) > 100  # The source was read.
    entries = {pattern: page for page in pages for pattern in patterns(page)}

    missing = [str(m) for m in found if not any(covers(p, m) for p in entries)]
    assert not missing, "add entries to docs/troubleshooting/ for " + "\n".join(missing)
    stale = [
        f"{page.name}: {pattern}"
        for pattern, page in entries.items()
        if not any(covers(pattern, message) for message in found)
    ]
    assert not stale, "no message has all parts of " + "\n".join(stale)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_patterns_are_specific(page):
    short = [p for p in patterns(page) if messages.letters(p) < FEWEST_LETTERS]
    assert not short


SOURCE = """
_NEEDS = "this function needs more of everything"

class SomeError(ValueError):
    def __str__(self):
        return f"some error of {self.args} was found"

def raises_by_name(x):
    text = f"the argument {x} is not accepted: " "pass another one"
    raise ValueError(text)

def raises_by_helper(file):
    raise _problem(file)

def _problem(file):
    return OSError(f"{file} cannot be opened by anyone")

def warns_by_argument(cause, text: str):
    warnings.warn(f"a layer: {text}")

def warns():
    warns_by_argument("no message", _NEEDS)

def repeats(error):
    raise ValueError(str(error)) from error

def my_refusal():
    return "it is refused on this machine" if slow else None

def identity(text: str, x):
    return x

def _forward(text: str, x):
    warnings.warn(text)

identity.defvjp(_forward, None)
identity("a gradient of the identity was taken", 1)
"""


def test_messages_are_read_from_source(tmp_path):
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    found = {m.text.replace(HOLE, "…") for m in messages.collect({"source.py": file})}
    assert found == {
        "some error of … was found",
        "the argument … is not accepted: pass another one",
        "… cannot be opened by anyone",
        "this function needs more of everything",
        "it is refused on this machine",
        "a gradient of the identity was taken",
    }


@pytest.mark.parametrize(
    ("pattern", "is_covered"),
    [
        ("takes a number of at least … and less; got", True),
        ("takes a number of at least 3", False),  # It is a value.
        ("and less; got … takes a number", False),  # in another order
    ],
)
def test_a_pattern_covers_messages_with_its_constant_parts(pattern, is_covered):
    text = f"x takes a number of at least {HOLE} and less; got {HOLE}"
    assert covers(pattern, Message("x.py:1", text)) == is_covered
