"""The messages of a program's errors and warnings, read from its source.

A message is text with a hole for each value that the source does not tell.  It is found
through names, constants, helper functions that make errors, and functions that raise or
warn with an argument of theirs, alone or after other text.  Not found is text that a
value carries, such as that of another error.
"""

import ast
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HOLE = "\0"

# Text with fewer letters is a part of a message, or repeats that of another error.
_FEWEST_LETTERS = 12
_MOST_VARIANTS = 32

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Assignment = ast.Assign | ast.AnnAssign | ast.NamedExpr


class Message(NamedTuple):
    """The text of an error or a warning.

    Attributes:
      place: the file and the line, ``"core/dot_general.py:56"``.
      text: the text, with ``HOLE`` for each value.
    """

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text.replace(HOLE, '…')}"


def letters(text: str) -> int:
    """The number of letters in a text."""
    return sum(map(str.isalpha, text))


def collect(files: Mapping[str, Path]) -> list[Message]:
    """All messages of some files.

    Args:
      files: the files, by the names that places give them.
    """
    readers = [_Reader(_Module.read(path, name)) for name, path in files.items()]
    found: dict[Message, None] = {}

    def read(select: Callable[[ast.AST], Sequence[ast.expr]]) -> None:
        for reader in readers:
            for node in ast.walk(reader.module.tree):
                for expression in select(node):
                    found.update(dict.fromkeys(reader.messages(expression)))

    read(_texts_of)
    followed: set[_Parameter] = set()
    while new := set().union(*(reader.reached for reader in readers)) - followed:
        followed |= new

        def passed(
            node: ast.AST, new: Iterable[_Parameter] = new
        ) -> Sequence[ast.expr]:
            if not isinstance(node, ast.Call):
                return []
            name = _name_of(node.func)
            arguments = [p.argument(node) for p in new if p.function == name]
            return [argument for argument in arguments if argument is not None]

        read(passed)
    return list(found)


def _texts_of(node: ast.AST) -> Sequence[ast.expr]:
    """The expressions that a node makes the text of an error or a warning."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [node.exc, *node.exc.args]
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        warns = called in ("warnings.warn", "parser.error")
        return (
            node.args[:1] if warns or (called == "print" and _is_warning(node)) else []
        )
    if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
        methods = [n for n in node.body if isinstance(n, _Function)]
        return [x for m in methods if m.name == "__str__" for x in _returned(m)]
    # Why an op's kernel cannot run, as text.
    if isinstance(node, _Function) and node.name.endswith("refusal"):
        return _returned(node)
    return []


def _is_warning(call: ast.Call) -> bool:
    text = ast.unparse(call.args[0]) if call.args else ""
    return text.lstrip("f").startswith(("'warning: ", '"warning: '))


def _returned(function: _Function) -> list[ast.expr]:
    returns = (node for node in ast.walk(function) if isinstance(node, ast.Return))
    return [node.value for node in returns if node.value]


def _name_of(function: ast.AST) -> str:
    """The last part of the name that is called."""
    return ast.unparse(function).rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class _Module:
    """The syntax tree of a file, with the node around each node."""

    name: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]

    @classmethod
    def read(cls, path: Path, name: str) -> "_Module":
        tree = ast.parse(path.read_text())
        nodes = ast.walk(tree)
        parents = {child: n for n in nodes for child in ast.iter_child_nodes(n)}
        return cls(name, tree, parents)

    def scopes(self, node: ast.AST) -> Iterator[_Function | ast.Module]:
        """The functions around a node, innermost first, then the module."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, _Function | ast.Module):
                yield node

    def function(self, name: str) -> _Function | None:
        """A function that the module defines."""
        functions = (n for n in ast.walk(self.tree) if isinstance(n, _Function))
        return next((n for n in functions if n.name == name), None)

    def assigned(self, name: str, scope: _Function | ast.Module) -> list[ast.expr]:
        """The values that a name gets in a scope, without the scopes inside."""
        return [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, _Assignment) and node.value
            for target in (
                node.targets if isinstance(node, ast.Assign) else [node.target]
            )
            if isinstance(target, ast.Name) and target.id == name
            if next(self.scopes(node)) is scope
        ]

    def functions_called_as(self, name: str) -> list[str]:
        """A function, and the one whose custom VJP it is the forward pass of.

        JAX calls both with the same arguments.
        """
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        defined = [
            ast.unparse(call.func).partition(".")[0]
            for call in calls
            if _name_of(call.func) == "defvjp" and _name_of(call.args[0]) == name
        ]
        return [name, *defined]


class _Parameter(NamedTuple):
    """A parameter of a function."""

    function: str
    name: str
    place: int

    def argument(self, call: ast.Call) -> ast.expr | None:
        """What a call of the function passes."""
        for keyword in call.keywords:
            if keyword.arg == self.name:
                return keyword.value
        return call.args[self.place] if self.place < len(call.args) else None


def _text_parameters(function: _Function) -> dict[str, int]:
    """The parameters of type str, and their places in a call."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if arguments and arguments[0].arg in ("self", "cls"):
        del arguments[0]
    return {
        argument.arg: index
        for index, argument in enumerate(arguments)
        if argument.annotation and ast.unparse(argument.annotation) == "str"
    }


@dataclasses.dataclass
class _Reader:
    """Reads the texts of a module's expressions.

    Attributes:
      module: the module.
      reached: the parameters that became a text or the end of one.
    """

    module: _Module
    reached: set[_Parameter] = dataclasses.field(default_factory=set)

    def messages(self, expression: ast.expr) -> Iterator[Message]:
        """The messages that an expression can be, without mere parts of some."""
        for text in self._texts(expression):
            line = re.sub(r"\s+", " ", text)
            if letters(line) >= _FEWEST_LETTERS and " " in line.strip():
                yield Message(f"{self.module.name}:{expression.lineno}", line)

    def _texts(self, node: ast.expr, depth: int = 4) -> list[str]:
        """The texts that an expression can have; a hole for what is not known."""
        match node:
            case ast.Constant(str(text)):
                return [text]
            case ast.FormattedValue(value):
                return self._texts(value, depth)
            case ast.JoinedStr(values):
                return self._joined(values, depth)
            case ast.BinOp(left, ast.Add(), right):
                return self._joined([left, right], depth)
            case ast.IfExp(_, body, orelse):
                return self._texts(body, depth) + self._texts(orelse, depth)
            case ast.Name() if depth:
                return self._named(node, depth - 1)
            case ast.Call(ast.Name(function)) if depth:
                return self._made_by(function, depth - 1) or [HOLE]
        return [HOLE]

    def _joined(self, parts: Sequence[ast.expr], depth: int) -> list[str]:
        reached = self.reached.copy()
        first = [self._texts(part, depth) for part in parts[:-1]]
        self.reached = reached  # A parameter in the middle is a value, not a message.
        variants = itertools.product(*first, self._texts(parts[-1], depth))
        joined = map("".join, itertools.islice(variants, _MOST_VARIANTS))
        return list(dict.fromkeys(joined))

    def _named(self, node: ast.Name, depth: int) -> list[str]:
        for scope in self.module.scopes(node):
            if values := self.module.assigned(node.id, scope):
                return [text for value in values for text in self._texts(value, depth)]
            if isinstance(scope, _Function) and node.id in _text_parameters(scope):
                index = _text_parameters(scope)[node.id]
                self.reached |= {
                    _Parameter(function, node.id, index)
                    for function in self.module.functions_called_as(scope.name)
                }
                break
        return [HOLE]

    def _made_by(self, name: str, depth: int) -> list[str]:
        """The texts that a function of the module returns, or of errors it returns."""
        function = self.module.function(name)
        found = []
        for value in _returned(function) if function else []:
            arguments = value.args if isinstance(value, ast.Call) else []
            for expression in (value, *arguments):
                found += self._texts(expression, depth)
        return found
