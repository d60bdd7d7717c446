"""Sums and comparisons of values that show; None for the others."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from .values import Record, Value, is_plain

LARGEST = 10**15
"""Numbers beyond are no sizes of a training."""
LONGEST = 10_000
"""Most parts of a list or a text."""
_SUMS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def calculated(kind: ast.operator, left: Value, right: Value) -> Value:
    """The sum (difference, product, ...) of two values."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    lists = isinstance(left, list) and isinstance(right, list) and isinstance(kind, ast.Add)
    repeated = isinstance(left, list) and isinstance(right, int) and isinstance(kind, ast.Mult)
    if type(kind) not in _SUMS or not (numbers or lists or repeated):
        return None
    if repeated and len(left) * right > LONGEST:  # type: ignore[arg-type,operator]
        return None
    try:
        value: Value = _SUMS[type(kind)](left, right)
    except ArithmeticError:
        return None
    return None if isinstance(value, int | float) and abs(value) > LARGEST else value


def compared(kind: ast.cmpop, left: Value, right: Value) -> bool | None:
    """The answer of a comparison."""
    if isinstance(left, Record) and left.is_made and right is None:
        return isinstance(kind, ast.IsNot | ast.NotEq)
    if not (is_plain(left) and is_plain(right)) or type(kind) not in _COMPARISONS:
        return None
    try:
        return bool(_COMPARISONS[type(kind)](left, right))
    except TypeError:
        return None
