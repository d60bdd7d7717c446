"""The values of expressions in a Python file, without running it."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .built_in import BUILT_IN, built_in
from .files import PythonFile
from .sums import calculated, compared
from .values import Record, Unread, Value, is_plain

DEPTH = 40
"""Most calls inside each other."""
TURNS = 1_000
"""Most turns of a loop."""


@dataclass(slots=True, kw_only=True)
class Expressions:
    """The names of a call, and the values of expressions that use them.

    `notes`: calls whose functions are not read, as sentences, with the objects that they are given.
    `closed`: ends of the names of functions that are not followed, since their arguments say
    enough.
    """

    file: PythonFile
    depth: int
    notes: list[tuple[str, list[Record]]]
    closed: tuple[str, ...]
    names: dict[str, Value] = field(default_factory=dict)

    @abstractmethod
    def followed(
        self,
        file: PythonFile,
        function: ast.FunctionDef,
        arguments: Sequence[Value],
        named: Mapping[str, Value],
    ) -> Value:
        """The value of a call of a function of a file."""

    def value(self, node: ast.expr) -> Value:
        """The value of an expression."""
        read = _READERS.get(type(node))
        return self.unread(node) if read is None else read(self, node)

    def unread(self, node: ast.AST, text: str | None = None) -> Unread:
        """The value of a node that does not show."""
        shown = ast.unparse(node) if text is None else text
        return Unread(text=shown[:80], line=getattr(node, "lineno", 1), path=str(self.file.path))

    def object_of(self, node: ast.expr) -> Record:
        """The object that a field is, of which nothing is set."""
        name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)[:80]
        return Record(made=name, line=node.lineno, path=str(self.file.path))

    def _constant(self, node: ast.Constant) -> Value:
        value = node.value
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return self.unread(node)

    def _list(self, node: ast.List) -> Value:
        return self._parts(node.elts)

    def _tuple(self, node: ast.Tuple) -> Value:
        return tuple(self._parts(node.elts))

    def _sum(self, node: ast.BinOp) -> Value:
        return self.calculated(node, node.op, self.value(node.left), node.right)

    def _sign(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not) and is_plain(value):
            return not value
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return self.unread(node)

    def _comparison(self, node: ast.Compare) -> Value:
        answer = None
        if len(node.ops) == 1:
            right = self.value(node.comparators[0])
            answer = compared(node.ops[0], self.value(node.left), right)
        return self.unread(node) if answer is None else answer

    def _choice(self, node: ast.IfExp) -> Value:
        told = self.value(node.test)
        if not is_plain(told):
            return self.unread(node)
        return self.value(node.body if told else node.orelse)

    def _parts(self, nodes: Sequence[ast.expr]) -> list[Value]:
        made: list[Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.value(node.value)
                made += value if isinstance(value, (list, tuple)) else [self.unread(node)]
            else:
                made.append(self.value(node))
        return made

    def _dict(self, node: ast.Dict) -> Value:
        made: dict[Value, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.value(key)
            if key is None or not is_plain(name) or isinstance(name, list | dict):
                continue
            made[name] = self.value(value)
        return made

    def _comprehended(self, node: ast.DictComp) -> Value:
        turn = node.generators[0]
        values = self.value(turn.iter)
        plain = len(node.generators) == 1 and not turn.ifs and isinstance(turn.target, ast.Name)
        if not plain or not isinstance(values, list) or len(values) > TURNS:
            return self.unread(node)
        made: dict[Value, Value] = {}
        for one in values:
            self.names[ast.unparse(turn.target)] = one
            name = self.value(node.key)
            if not isinstance(name, str):
                return self.unread(node)
            made[name] = self.value(node.value)
        return made

    def _named(self, node: ast.Name) -> Value:
        if node.id in self.names:
            return self.names[node.id]
        file = self.file
        name = node.id
        for _ in range(DEPTH):
            if name in file.constants:
                if self.depth >= DEPTH:
                    return self.unread(node)
                there = replace(self, file=file, depth=self.depth + 1, names={})
                return there.value(file.constants[name])
            elsewhere = file.elsewhere(name)
            if elsewhere is None:
                break
            file, name = elsewhere
        return self.unread(node)

    def _attribute(self, node: ast.Attribute) -> Value:
        owner = self.value(node.value)
        if not isinstance(owner, Record):
            return self.unread(node)
        if node.attr not in owner.fields:
            return self.object_of(node)
        return owner.fields[node.attr]

    def _item(self, node: ast.Subscript) -> Value:
        held = self.value(node.value)
        key = self.value(node.slice)
        if is_plain(key) and not isinstance(key, list | dict):
            if isinstance(held, dict) and key in held:
                return held[key]
            if (
                isinstance(held, list | tuple)
                and isinstance(key, int)
                and -len(held) <= key < len(held)
            ):
                return held[key]
        return self.unread(node)

    def _joined(self, node: ast.BoolOp) -> Value:
        ends = isinstance(node.op, ast.Or)
        value: Value = None
        for part in node.values:
            value = self.value(part)
            if isinstance(value, Record) and value.is_made:
                value = True
            if not is_plain(value):
                return self.unread(node)
            if bool(value) is ends:
                return value
        return value

    def calculated(
        self, node: ast.AST, operator: ast.operator, left: Value, right: ast.expr
    ) -> Value:
        value = calculated(operator, left, self.value(right))
        return self.unread(node) if value is None else value

    def note(self, node: ast.Call, arguments: Iterable[Value]) -> None:
        """Remember a call that may set fields, since its function is not read."""
        name = ast.unparse(node.func)
        given = [value for value in arguments if isinstance(value, Record)]
        if name in BUILT_IN:
            return
        if given and isinstance(node.func, ast.Name) and not name.lstrip("_")[:1].isupper():
            said = f"{self.file.path.name}, line {node.lineno}: {name}(...)"
            self.notes.append((said, given))

    def _function(self, name: str) -> tuple[PythonFile, ast.FunctionDef] | None:
        """A function by its name here, and the file that has it."""
        file = self.file
        for _ in range(DEPTH):
            if name in file.functions:
                return file, file.functions[name]
            there = file.elsewhere(name)
            if there is None:
                return None
            file, name = there
        return None

    def _call(self, node: ast.Call) -> Value:
        arguments = self._parts(node.args)
        named, hides = self._keywords(node)
        called = self._called(node, arguments, named)
        if called:
            return called[0]
        self.note(node, [*arguments, *named.values()])
        made = ast.unparse(node.func)[:120]
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            made = node.func.attr
        return Record(
            made=made,
            line=node.lineno,
            path=str(self.file.path),
            fields=named,
            arguments=tuple(arguments),
            hides=hides,
        )

    def _keywords(self, node: ast.Call) -> tuple[dict[str, Value], bool]:
        """The named arguments, and whether there are others that do not show."""
        named: dict[str, Value] = {}
        hides = False
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
                named |= {str(key): one for key, one in value.items()}
            else:
                hides = True
        return named, hides

    def _called(
        self, node: ast.Call, arguments: list[Value], named: Mapping[str, Value]
    ) -> list[Value]:
        """The value of a function or a method that is known; empty for another."""
        if isinstance(node.func, ast.Attribute):
            held = self.value(node.func.value)
            if node.func.attr == "get" and isinstance(held, dict) and is_plain(arguments):
                return [held.get(arguments[0], *arguments[1:2])] if arguments else []
            return [held.lower()] if node.func.attr == "lower" and isinstance(held, str) else []
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in BUILT_IN and name not in self.file.functions:
            return [built_in(name, arguments, named, self.unread(node))]
        there = None if self.closed and name.endswith(self.closed) else self._function(name)
        return [] if there is None else [self.followed(*there, arguments, named)]


_READERS: Mapping[type[ast.expr], Callable[[Expressions, Any], Value]] = {
    ast.Constant: Expressions._constant,
    ast.Name: Expressions._named,
    ast.Attribute: Expressions._attribute,
    ast.Call: Expressions._call,
    ast.List: Expressions._list,
    ast.Tuple: Expressions._tuple,
    ast.Dict: Expressions._dict,
    ast.DictComp: Expressions._comprehended,
    ast.BinOp: Expressions._sum,
    ast.UnaryOp: Expressions._sign,
    ast.BoolOp: Expressions._joined,
    ast.Compare: Expressions._comparison,
    ast.IfExp: Expressions._choice,
    ast.Subscript: Expressions._item,
}
