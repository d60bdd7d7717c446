"""Works out what a function of a Python file makes of its configuration, without running it.

Assignments, calls of functions whose file is read, conditions and loops over what shows are
followed. Everything else is an object of which nothing is known but what the file sets in it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from autopar.errors import UsageError
from autopar.printable import printable

from .expressions import DEPTH, TURNS, Expressions
from .files import PythonFile
from .values import Record, Value, is_plain

STEPS = 20_000
"""Most statements of a reading."""


class _ReturnedError(Exception):
    """The end of a function with its value."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


def returned(
    file: PythonFile,
    function: ast.FunctionDef,
    given: Mapping[str, Value],
    closed: tuple[str, ...] = (),
) -> tuple[Value, list[tuple[str, list[Record]]]]:
    """The value that a function returns, and the calls that were not followed with their objects.

    `given`: values of its arguments by name. `closed`: ends of the names of functions that are not
    followed.
    """
    outside = Frame(file=file, depth=0, notes=[], closed=closed, steps=_Steps())
    names = {argument.arg for argument in _arguments(function)}
    own = {name: value for name, value in given.items() if name in names}
    return outside.followed(file, function, (), own), outside.notes


@dataclass(slots=True, kw_only=True)
class _Steps:
    """The number of statements so far."""

    count: int = 0


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _defaults(function: ast.FunctionDef) -> dict[str, ast.expr]:
    given = function.args
    places = [*given.posonlyargs, *given.args]
    with_default = places[len(places) - len(given.defaults) :]
    pairs = [
        *zip(with_default, given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]
    return {argument.arg: default for argument, default in pairs if default is not None}


@dataclass(slots=True, kw_only=True)
class Frame(Expressions):
    """A call of a function: its names, and its statements in turn."""

    steps: _Steps = field(default_factory=_Steps)

    def followed(
        self,
        file: PythonFile,
        function: ast.FunctionDef,
        arguments: Sequence[Value],
        named: Mapping[str, Value],
    ) -> Value:
        """The value of a call of a function of a file."""
        if self.depth >= DEPTH:
            raise UsageError(f"{file.path}, line {function.lineno}: calls are nested too deeply")
        frame = Frame(
            file=file, depth=self.depth + 1, notes=self.notes, closed=self.closed, steps=self.steps
        )
        places = _arguments(function)
        defaults = _defaults(function)
        for argument in places:
            name = argument.arg
            default = defaults.get(name)
            unread = frame.unread(argument, name)
            frame.names[name] = unread if default is None else frame.value(default)
        frame.names |= {a.arg: value for a, value in zip(places, arguments, strict=False)}
        frame.names |= named
        try:
            frame.run(function.body)
        except _ReturnedError as end:
            return end.value
        return None

    def run(self, body: Iterable[ast.stmt]) -> None:
        """Follow statements; a return is raised."""
        for node in body:
            self.steps.count += 1
            if self.steps.count > STEPS:
                raise UsageError(f"{self.file.path}, line {node.lineno}: too much to read")
            self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                self._assignment(node)
            case ast.Expr():
                self.value(node.value)
            case ast.Return():
                raise _ReturnedError(None if node.value is None else self.value(node.value))
            case ast.If():
                self._condition(node)
            case ast.For():
                self._loop(node)
            case ast.Raise():
                where = f"{self.file.path}, line {node.lineno}"
                raise UsageError(printable(f"{where}: {ast.unparse(node)}", lines=False))
            case ast.While() | ast.With() | ast.Try() | ast.Match():
                self._forget(node)

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if isinstance(node, ast.AugAssign):
            now = self.value(cast(ast.expr, node.target))
            self._assign(node.target, self.calculated(node, node.op, now, node.value))
        elif node.value is not None:
            value = self.value(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self._assign(target, value)

    def _condition(self, node: ast.If) -> None:
        told = self.value(node.test)
        if is_plain(told):
            self.run(node.body if told else node.orelse)
            return
        if isinstance(told, Record) and told.is_made:
            self.run(node.body)
            return
        self._forget(node)

    def _loop(self, node: ast.For) -> None:
        values = self.value(node.iter)
        jumps = any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node))
        if jumps or not isinstance(values, (list, tuple)) or len(values) > TURNS:
            self._forget(node)
            return
        for value in values:
            self._assign(node.target, value)
            self.run(node.body)

    def _forget(self, node: ast.stmt) -> None:
        """Drop what is set under a condition that does not show.

        A function that may return there does so, with a value that does not show.
        """
        for inner in ast.walk(node):
            match inner:
                case ast.Assign(targets=targets):
                    for target in targets:
                        self._assign(target, self.unread(inner))
                case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                    self._assign(target, self.unread(inner))
                case ast.Call():
                    named = (a for a in inner.args if isinstance(a, ast.Name | ast.Attribute))
                    self.note(inner, [self.value(one) for one in named])
                case ast.Return():
                    raise _ReturnedError(self.unread(inner))

    def _assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=ast.expr() as base, attr=attribute):
                owner = self._owner(base)
                owner.fields[attribute] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value if isinstance(value, (list, tuple)) else [value] * len(parts)
                for part, one in zip(parts, values, strict=False):
                    self._assign(part, one)
            case ast.Subscript(value=ast.expr() as base, slice=key):
                held = self.value(base)
                at = self.value(key)
                if isinstance(held, dict) and isinstance(at, str | int):
                    held[at] = value

    def _owner(self, node: ast.expr) -> Record:
        """The object that an attribute is set in; what was none becomes one."""
        value = self.value(node)
        if isinstance(value, Record):
            if isinstance(node, ast.Attribute):
                self._owner(node.value).fields[node.attr] = value
            return value
        made = self.object_of(node)
        self._assign(node, made)
        return made
