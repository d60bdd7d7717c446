"""Names that a model's own code looks up and writes, told by its source and the lines that ran."""

from __future__ import annotations

import ast
import functools
import linecache
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_WRITING = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft")
) | {"remove", "update"}
_SAYING = frozenset(("print", "debug", "info", "log", "warning", "warning_once", "error"))
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript)


@dataclass(slots=True)
class Uses:
    """The names that code uses: of globals, attributes and items, the last of each expression.

    `loads`: names whose values go on into something else than themselves. `writes`: names whose
    values are set or changed. `stored`: by a container, what is only put into it. `steps`: all
    names that something is looked up under. `roots`: the first names of expressions. Each has its
    first place (file:line).
    """

    loads: dict[str, str] = field(default_factory=dict)
    writes: dict[str, str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    place: str = ""
    into: str | None = None
    stored: dict[str, dict[str, str]] = field(default_factory=dict)

    def of_code(self, code: types.CodeType, lines: set[int]) -> None:
        """Add the uses of the lines of a function that ran."""
        file = Path(code.co_filename).name
        tree = _tree(code)
        if tree is None:
            self.place = f"{file}:{code.co_firstlineno}"
            for name in _names(code):
                for table in (self.loads, self.steps, self.roots):
                    table.setdefault(name, self.place)
            return
        first = code.co_firstlineno - 1
        for statement in ast.walk(tree):
            if isinstance(statement, ast.stmt):
                parts = _header(statement)
                end = max((part.end_lineno or 0 for part in parts), default=0)
                if lines.intersection(range(statement.lineno + first, end + first + 1)):
                    self.place = f"{file}:{statement.lineno + first}"
                    self._statement(statement, parts)

    def close(self) -> Uses:
        """Count what is put into containers that are read themselves."""
        while read := self.stored.keys() & self.loads.keys():
            for name in read:
                self.loads = {**self.stored.pop(name), **self.loads}
        return self

    def _statement(self, statement: ast.stmt, parts: Iterable[ast.expr]) -> None:
        own = None
        if isinstance(statement, (ast.AugAssign, ast.Assign, ast.AnnAssign, ast.Delete)):
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            for target in targets:
                for leaf in _targets(target):
                    self.writes.setdefault(leaf, self.place)
            own = _leaf(targets[0]) if len(targets) == 1 else None
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            if _leaf(called) in _SAYING:
                return
            if isinstance(called, ast.Attribute) and called.attr in _WRITING:
                own = self.into = _leaf(called.value)
                self.writes.setdefault(own or "", self.place)
        for part in parts:
            self._reads(part, own)
        self.into = None

    def _reads(self, node: ast.AST, own: str | None) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # What a method is called of is read by it; `get` of a text is an item.
            base = node.func.value
            given = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            if node.func.attr == "get" and given and isinstance(given[0], str):
                self._note(given[0], own)
                self._below(base, own)
            else:
                self._reads(base, own)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.steps.setdefault(node.value, self.place)
        if not isinstance(node, _SIMPLE):
            for child in ast.iter_child_nodes(node):
                self._reads(child, own)
            return
        self._note(_leaf(node), own)
        self._below(node, own)

    def _note(self, leaf: str | None, own: str | None) -> None:
        if leaf is not None:
            self.steps.setdefault(leaf, self.place)
            if leaf != own:
                table = self.stored.setdefault(self.into, {}) if self.into else self.loads
                table.setdefault(leaf, self.place)

    def _below(self, node: ast.AST, own: str | None) -> None:
        """The steps of a chain of attributes and items down to its first name."""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            leaf = _leaf(node)
            if leaf is not None:
                self.steps.setdefault(leaf, self.place)
            if isinstance(node, ast.Subscript) and not _text(node):
                self._reads(node.slice, own)
            node = node.value
        if isinstance(node, ast.Name):
            self.roots.setdefault(node.id, self.place)
        else:
            self._reads(node, own)


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions, lambdas and loops written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_within(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    for inner in codes_within(code):
        yield from (*inner.co_names, *inner.co_freevars)
        yield from (value for value in inner.co_consts if isinstance(value, str))


@functools.lru_cache(maxsize=1024)
def _tree(code: types.CodeType) -> ast.AST | None:
    """The source of a function, if it can be read by itself."""
    ends = (end for inner in codes_within(code) for _, end, _, _ in inner.co_positions())
    last = max((end for end in ends if end), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (SyntaxError, ValueError):
        return None
    one = tree.body[0] if len(tree.body) == 1 else None
    return one if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _header(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement itself, without the statements inside it."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    expressions = []
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.withitem):
            child = child.context_expr
        if isinstance(child, ast.expr):
            expressions.append(child)
    return expressions


def _targets(target: ast.AST | None) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from _targets(part)
    elif target is not None and (leaf := _leaf(target)) is not None:
        yield leaf


def _text(node: ast.Subscript) -> str | None:
    value = node.slice.value if isinstance(node.slice, ast.Constant) else None
    return value if isinstance(value, str) else None


def _leaf(node: ast.AST) -> str | None:
    """The last name of an expression: `c` of `a.b.c`, `a.b["c"]` and `a.b.c[0]`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _text(node) or _leaf(node.value)
    return None
