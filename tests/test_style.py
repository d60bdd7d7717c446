"""The code reads alike everywhere: gates for what the linter cannot see."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.product_code import MODULES, ROOT, tree

SCRIPTS = sorted([*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
FILES = [*MODULES.values(), *SCRIPTS]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
RULE_TABLES = ROOT / "autopar" / "sharding" / "rules"
# Rooms of algorithms, and the least number of comments for every 100 lines of code in them.
COMMENTED = {
    "autopar/order": 4.2,
    "autopar/planning": 4.4,
    "autopar/sharding": 5.0,
    "costmodel": 4.0,
    "runtime": 4.4,
    "search": 6.0,
}
OPENINGS = re.compile(r"(What|Those|Of) ")
_SWITCH = re.compile(r"# fmt: (off|on|skip)")

Finder = Callable[[ast.Module], Iterator[ast.AST]]


def _room(path: Path) -> str:
    """The folder of a file: the first two parts of its path in `autopar`, else the first."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "autopar" and len(parts) > 2 else parts[0]


def _chained_conditions(module: ast.Module) -> Iterator[ast.AST]:
    """Conditional expressions inside a branch of another."""
    for node in ast.walk(module):
        if isinstance(node, ast.IfExp) and ast.IfExp in (type(node.body), type(node.orelse)):
            yield node


def _packed_assignments(module: ast.Module) -> Iterator[ast.AST]:
    """Assignments of several unrelated values at once; a swap or a rotation is none."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or any(
            isinstance(item, ast.Starred) for item in (*target.elts, *node.value.elts)
        ):
            continue
        assigned = {ast.unparse(item) for item in target.elts}
        values = {ast.unparse(item) for item in node.value.elts}
        if assigned.isdisjoint(values):
            yield node


def _openings(module: ast.Module) -> Iterator[ast.AST]:
    """Docstrings that open with a clause in place of a noun or a verb."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and OPENINGS.match(text):
                yield node.body[0]


def _bindings(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The names that are bound by assignments, arguments and definitions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node


def _vague_names(module: ast.Module) -> Iterator[ast.AST]:
    """Bindings of `found`: the name does not say what was found."""
    for name, node in _bindings(module):
        if name == "found":
            yield node


FINDERS: dict[str, Finder] = {
    "chained conditions": _chained_conditions,
    "packed assignments": _packed_assignments,
    "openings": _openings,
    "vague names": _vague_names,
}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_opens_with_a_docstring(module: str) -> None:
    assert ast.get_docstring(tree(MODULES[module]))


@pytest.mark.parametrize("kind", FINDERS)
def test_statements_read_at_once(kind: str) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (*FILES, *TESTS):
        for node in FINDERS[kind](tree(path)):
            line = getattr(node, "lineno", 1)
            places[_room(path)].append(f"{path.relative_to(ROOT)}:{line}")
    assert places == {}


def test_names_say_what_is_saved_and_what_is_done_twice() -> None:
    """No name of the product has `kept`, `again` or `lasting` among its words."""
    vague = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}"
        for path in MODULES.values()
        for name, node in _bindings(tree(path))
        if {"kept", "again", "lasting"} & set(name.lower().split("_"))
    ]
    assert vague == []


def test_the_formatter_is_switched_off_in_tables_of_rules_only() -> None:
    switched = [
        str(path.relative_to(ROOT))
        for path in FILES
        if _SWITCH.search(path.read_text(encoding="utf-8")) and path.parent != RULE_TABLES
    ]
    assert switched == []


def _lines(path: Path) -> tuple[int, int]:
    """Numbers of comments and of lines of code in a file; docstrings are neither."""
    text = path.read_text(encoding="utf-8")
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    comments = 0
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comments += token.type == tokenize.COMMENT
        if token.type not in skipped and token.string:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return comments, len(code)


@pytest.mark.parametrize("room", COMMENTED)
def test_comments_say_why(room: str) -> None:
    """Rooms of algorithms have a comment where a fluent engineer would ask for the reason."""
    counts = [_lines(path) for path in MODULES.values() if path.is_relative_to(ROOT / room)]
    comments = sum(count for count, _ in counts)
    lines = sum(count for _, count in counts)
    share = 100 * comments / lines
    print(f"{room}: {share:.1f} comments for every 100 of {lines} lines of code")
    assert share >= COMMENTED[room]
