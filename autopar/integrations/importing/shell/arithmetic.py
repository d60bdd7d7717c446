"""Sums, products and comparisons of whole numbers, as a shell counts them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

LARGEST = 2**63
"""The numbers of a shell have 64 bits."""
_OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def counted(text: str) -> int | None:
    """The value of a sum, product or comparison of whole numbers; None for anything else.

    >>> counted("8 * (2 + 1)"), counted("2 > 1"), counted("n + 1")
    (24, 1, None)
    """
    try:
        number = _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return number if abs(number) < LARGEST else None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _operated(type(node.op), _value(node.left), _value(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
        return _operated(type(node.ops[0]), _value(node.left), _value(node.comparators[0]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError


def _operated(kind: type[ast.AST], left: int, right: int) -> int:
    if max(abs(left), abs(right)) >= LARGEST:
        raise ValueError
    return int(_OPERATIONS[kind](left, right))
