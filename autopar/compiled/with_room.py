"""The compiled walk over arrays that it cannot extend itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ._compiled import walk as walk_as_far
from .in_python import Memories, Places, Script

EACH = 8
"""Memories that a step makes at the most, mostly; where it makes more, room is given anew."""


def walk(
    script: Script, places: Places, memories: Memories, steps: Sequence[int], way: int
) -> None:
    """Walk `steps` as the reference does."""
    order = array("q", steps)
    done = 0
    room = EACH * (len(order) + EACH)
    while done < len(order):
        counts = array("q", (len(memories.size), len(memories.moments), len(memories.temporary)))
        empty = bytes(room * order.itemsize)
        for numbers in memories:
            numbers.frombytes(empty)
        done = walk_as_far(script, places, memories, counts, order, done, way)
        made, ticks, temporaries = counts
        for numbers in memories[:7]:
            del numbers[made:]
        del memories.moments[ticks:]
        del memories.temporary_at[temporaries:]
        del memories.temporary[temporaries:]
        room *= 2
