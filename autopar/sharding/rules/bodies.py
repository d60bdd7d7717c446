"""The rule of pointwise operators with a body, composed of those of its parts."""

from __future__ import annotations

from autopar.ir import Ref, Value
from autopar.ir.bodies import POINTWISE, body_of, is_body, leaves, operands

from .elementwise import pointwise
from .registry import RULES, Call, register

Inputs = frozenset[int]


def _linear(call: Call) -> tuple[tuple[int, ...], ...]:
    """The sets of inputs in which all of a body is jointly linear."""
    carriers = _carriers(body_of(call.operator))
    return tuple(tuple(sorted(group)) for group in sorted(carriers, key=sorted))


def _carriers(value: Value) -> set[Inputs]:
    """The sets of inputs in which an expression is jointly linear.

    An operator passes a partial sum on if it is linear in those of its operands that carry it, and
    no other one of them reads the same input.
    """
    if isinstance(value, Ref):
        return {frozenset((value.index,))}
    assert is_body(value)
    read = operands(value)
    made: set[Inputs] = set()
    # A number in the place of a tensor carries nothing.
    for group in (group for group in RULES[value[0]].linear if max(group) < len(read)):
        joint: set[Inputs] = {frozenset()}
        for place in group:
            joint = {one | more for one in joint for more in _carriers(read[place])}
        for carriers in joint:
            # What an operand reads of the carriers has to be what it is linear in.
            if all(
                carriers & leaves(one) in (_carriers(one) if place in group else {frozenset()})
                for place, one in enumerate(read)
            ):
                made.add(carriers)
    return made


register(POINTWISE, pointwise, linear_of=_linear)
