"""Lists every use that the library makes of private names of other libraries.

``python -m tests.private_names`` prints them.  ``test_architecture`` holds the list, so
that nobody adds one unnoticed.  Private is a name that begins with one underscore and
that the library does not define itself, be it an attribute, a part of an import or a
string, but not a part of an f-string.  Changing the class of an object and reading
Python's frames count, too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "fbq_jax", ROOT / "kernels")

# What named tuples publish.
_PUBLISHED = {"_asdict", "_fields", "_make", "_replace"}
_FRAMES = {"currentframe", "f_back", "f_locals"}
_DOTTED_NAME = re.compile(r"[A-Za-z_][\w.]*")


def private_names() -> list[str]:
    """Each use as ``path: name``, sorted."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for folder in FOLDERS
        for path in folder.rglob("*.py")
    }
    own = _PUBLISHED.union(*map(_defined, trees.values()))
    return sorted(
        f"{path}: {name}" for path, tree in trees.items() for name in uses(tree, own)
    )


def _is_private(name: str) -> bool:
    return bool(re.match("_[A-Za-z]", name))


def _private_part(name: str) -> bool:
    return any(map(_is_private, name.split(".")))


def _defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a module of the library defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (ast.unparse(node.value) == "self")


def uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """The private names of other libraries that a module uses."""
    nodes = list(ast.walk(tree))
    parts = {
        id(part)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from _attribute(node, own)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _private_part(a.name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if _private_part(name) and not name.startswith("fbq_jax."):
                    yield name
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            name = node.value if isinstance(node.value, str) else ""
            is_name = _DOTTED_NAME.fullmatch(name) and _private_part(name)
            if name == "__class__" or (is_name and name not in own):
                yield repr(name)


def _attribute(node: ast.Attribute, own: set[str]) -> Iterator[str]:
    # What a class overrides is defined here, and its base's all the same.
    of_base = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
    private = _is_private(node.attr) and (of_base or node.attr not in own)
    changes_class = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    if private or changes_class or node.attr in _FRAMES:
        yield ast.unparse(node)


if __name__ == "__main__":
    names = private_names()
    print(*names, f"{len(names)} uses", sep="\n")
