"""`LocalProgram`: the program of one rank, for the whole batch or one micro-batch, in segments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from autopar.sharding.layout import Layout, Placement
from autopar.sharding.time_split import TimeSplit

Place = tuple[str, Layout]
"""A tensor in a layout; that of a micro-batch begins with the placement on the axis of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """One of `count` micro-batches: its coordinate on the axis of time, and the model's split."""

    split: TimeSplit
    count: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSegment:
    """A segment: `module(*values, *parameters, *sources)` gives the values at `outputs` as a tuple.

    values: results of earlier segments. parameters: used values, from the units. sources: inputs
    and constants (and values computed from them once a step), whole, or cut for the micro-batch by
    their placement on the axis of time. differentiable: for each value and parameter, then for each
    output, whether a gradient may flow there. recomputed: the segment runs once more in the
    backward pass.
    """

    module: fx.GraphModule
    values: tuple[Place, ...]
    parameters: tuple[Place, ...]
    sources: tuple[tuple[str, Placement | None], ...]
    outputs: tuple[Place, ...]
    differentiable: tuple[bool, ...]
    recomputed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """The program of one rank.

    outputs: every output of the graph that this rank computes with its layout (that of all
    micro-batches joined), in order, the loss last if it is none of them. output_places: their
    places. updates: constants that a run changes, with the places of their new values. handed:
    values that other stages read. loss: the loss's place among the outputs.
    """

    segments: tuple[LocalSegment, ...]
    outputs: tuple[tuple[str, Layout], ...]
    output_places: tuple[Place, ...]
    updates: tuple[tuple[str, Place], ...]
    handed: tuple[Place, ...]
    loss: int | None

    @property
    def sources(self) -> tuple[tuple[str, Placement | None], ...]:
        """Inputs, constants and values computed from them that any segment reads."""
        return tuple(
            dict.fromkeys(source for segment in self.segments for source in segment.sources)
        )


def identifier(name: str) -> str:
    """A readable Python identifier out of a tensor's or operator's name."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if text and not text[0].isdigit() else f"v_{text}"
