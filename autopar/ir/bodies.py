"""Bodies: the expression that a pointwise operator computes of its inputs.

    body = (kind, ((argument, value or Ref or body), ...))

A `Ref` is an input of the operator. No value inside is read twice, so that a body is a tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from .graph import Operator, Ref, Value

POINTWISE = "autopar.pointwise"
Body = tuple[str, tuple[tuple[str, Value], ...]]


def is_body(value: object) -> TypeGuard[Body]:
    """Whether an argument is an expression of its own."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], str) and isinstance(value[1], tuple)


def body_of(operator: Operator) -> Body:
    """The body of a pointwise operator."""
    body = operator.attributes["body"]
    assert is_body(body)
    return body


def operands(body: Body) -> list[Value]:
    """The references and bodies among the arguments of the last operator of a body."""
    return [value for _, value in body[1] if isinstance(value, Ref) or is_body(value)]


def leaves(value: Value) -> frozenset[int]:
    """The inputs that an expression reads."""
    if isinstance(value, Ref):
        return frozenset((value.index,))
    return frozenset().union(*map(leaves, operands(value))) if is_body(value) else frozenset()


def parts(body: Body) -> Iterator[Body]:
    """The bodies inside a body, each before what reads it; itself last."""
    for value in operands(body):
        if is_body(value):
            yield from parts(value)
    yield body
