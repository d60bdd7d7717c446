"""The ranks of a stage as axes, each with its use in attention and in layers of experts (folding).

Ranks are numbered twice. Outside of experts tensor parallelism is innermost, then context, then
data parallelism. In a layer of experts the split of each expert's inner dim is innermost, then
that of the experts, then replicas. Both numberings are products of sizes, so they have a common
refinement: axes that end wherever one of the two does. Source: NVIDIA/Megatron-LM@d98e8a64,
megatron/core/parallel_state.py (the generators of ranks of decoder and experts).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError

Sized = tuple[str, int]
"""A use of ranks, and their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Ranks of one use.

    `outside`: data, context or tensor. `inside`: their use in a layer of experts, replica, expert
    or inner.
    """

    outside: str
    inside: str
    size: int

    @property
    def name(self) -> str:
        """The name of the axis in a mesh."""
        if self.inside == USUAL[self.outside]:
            return self.outside
        return "expert" if self.outside == "data" else f"{self.outside}_{self.inside}"


USUAL = {"tensor": "inner", "context": "replica", "data": "replica"}
"""The use inside of experts if only data parallel ranks split these."""


@functools.lru_cache(maxsize=4096)
def refined(outside: Sequence[Sized], inside: Sequence[Sized]) -> tuple[Axis, ...]:
    """Return the axes of two numberings of as many ranks, outermost first.

    `outside`, `inside`: uses with their sizes, innermost first.

    >>> axes = refined((("tensor", 2), ("data", 16)), (("expert", 32),))
    >>> [(axis.name, axis.size) for axis in axes]
    [('expert', 16), ('tensor_expert', 2)]
    """
    axes: list[Axis] = []
    # Stacks with the innermost use on top.
    left = [list(outside)[::-1], list(inside)[::-1]]
    while left[0] and left[1]:
        (one, first), (other, second) = (stack.pop() for stack in left)
        size = min(first, second)
        if max(first, second) % size:
            raise UsageError(
                f"{one} parallelism of {first} and a split of experts of {second} ({other}) do not "
                "fold: one must divide the other"
            )
        # What is left of the larger use goes on in the next axis.
        for stack, name, whole in ((left[0], one, first), (left[1], other, second)):
            if whole > size:
                stack.append((name, whole // size))
        # An axis of one rank splits nothing.
        if size > 1:
            axes.append(Axis(outside=one, inside=other, size=size))
    return tuple(axes[::-1])
