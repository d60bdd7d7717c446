"""Bytes that a pointwise operator with a body moves where its parts run one by one.

forward     every part reads its operands and writes its result
backward    all but the last run again; for the gradient of each operand that of the result is
            read with one value, and it is written
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Ref
from autopar.ir.bodies import Body, operands, parts

Floats = NDArray[np.float64]

PASSING = frozenset({"add", "sub", "rsub", "neg"})
"""Parts whose gradients are that of their result."""


class Eager(NamedTuple):
    """Bytes and kernels of a direction."""

    nbytes: Floats
    kernels: int


def eager(body: Body, ins: Sequence[Floats], out: Floats) -> tuple[Eager, Eager]:
    """The kernels of a body in each direction, by the bytes of its inputs and of its result."""
    forward = np.zeros_like(out)
    remade = backward = forward
    kernels = gradients = 0
    for part in parts(body):
        remade = forward
        read = operands(part)
        sizes = [ins[one.index] if isinstance(one, Ref) else out for one in read]
        forward = forward + sum(sizes, out)
        kernels += 1
        if part[0].split(".")[1] not in PASSING:
            gradients += len(read)
            backward = backward + len(read) * out + 2 * sum(sizes, np.zeros_like(out))
    return Eager(forward, kernels), Eager(backward + remade, gradients + kernels - 1)
