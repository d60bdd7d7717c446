"""Effects of a redistribution's step on memory: forward on the value, backward on its gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopar.sharding.layout import Kind, Placement


@dataclass(frozen=True, slots=True)
class Action:
    """The effect of a single-axis step on a value or a gradient: new memory, and temporaries.

    `gathers`: the new memory holds only data that the ranks already have, so it can be made again.
    """

    made: bool
    scratch: float
    gathers: bool = False


SAME = Action(False, 0.0)


@functools.lru_cache(maxsize=1 << 12)
def actions(before: Placement, after: Placement, size: float, degree: int) -> tuple[Action, Action]:
    """Return the effects of one step on the value and on its gradient, as in the runtime.

    `size`: local bytes of the value before it. A gather along another dim than the first joins the
    pieces in a second copy; a scatter separates them in one.
    """
    split = Kind.SPLIT
    whole = Kind.REPLICATED
    share = Kind.BROADCAST
    partial = Kind.PARTIAL
    dim = before.dim if before.kind is split else after.dim
    first = dim == 0 and before.parts == 1 and after.parts == 1
    large = size * degree if before.kind is split else size
    gather = Action(True, 0.0 if first else large, True)
    scatter = Action(True, 0.0 if first else large)
    new = Action(True, 0.0)
    # A slice of the first dim is a view; one of another dim is made contiguous.
    take = Action(not first, 0.0)
    # (before, after): the effects forward and backward.
    table = {
        (whole, share): (SAME, new),
        (whole, split): (take, gather),
        (whole, partial): (new, SAME),
        (share, whole): (SAME, new),
        (share, split): (take, new),
        (share, partial): (new, new),
        (split, whole): (gather, take),
        (split, share): (gather, scatter),
        (split, split): (Action(True, 2 * size), Action(True, 2 * size)),
        (split, partial): (new, take),
        (partial, whole): (new, SAME),
        (partial, split): (scatter, gather),
        (partial, share): (new, new),
        (partial, partial): (SAME, SAME),
    }
    if degree == 1:
        return SAME, SAME
    return table[before.kind, after.kind]
