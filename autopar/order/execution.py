"""`Execution`: the chunks of a model as they are executed, and as they are priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Graph
from ..sharding.analysis import Analysis
from ..sharding.layout import Layout
from ..sharding.mesh import Mesh
from ..sharding.micro_batches import of_micro_batch, split_batch
from ..sharding.program import Assignment, build_program
from ..sharding.schedule import PLAIN, Schedule
from ..sharding.time_split import TimeSplit, micro_batch_options
from .scheduled import Scheduled, scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A value that one chunk hands to another.

    `made`: its layout in the first chunk. `taken`: its layout in the second. `differentiable`: whether its gradient
    comes back.
    """

    name: str
    made: Layout
    taken: Layout
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of the model on one stage.

    `whole`: the program of the whole batch, which the runtime cuts into micro-batches by `split`. `micro`: the program
    of one micro-batch, which is priced. With one micro-batch both are equal and `split` is None. `first`: the first
    rank of its mesh.
    """

    whole: Scheduled
    micro: Scheduled
    split: TimeSplit | None
    first: int = 0

    @property
    def mesh(self) -> Mesh:
        """The devices that it runs on."""
        return self.whole.program.assignment.mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """All chunks in the order of the model; chunk k runs on stage k modulo `stages`, in the order of `pipeline`.

    `edges`: the values that a chunk hands to a later one, by the pair of chunks.
    """

    chunks: tuple[Chunk, ...]
    stages: int = 1
    pipeline: str = "1f1b"
    interleave: int = 1
    edges: Mapping[tuple[int, int], tuple[Handed, ...]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The model."""
        return self.chunks[0].whole.program.graph

    @property
    def schedule(self) -> Schedule:
        """The part of the schedule inside a stage, equal for all chunks."""
        return self.chunks[0].whole.schedule

    @property
    def devices(self) -> int:
        """Ranks that it runs on."""
        return sum(chunk.mesh.devices for chunk in self.chunks[: self.stages])

    @property
    def whole(self) -> Scheduled:
        """The only chunk's program of the whole batch."""
        (chunk,) = self.chunks
        return chunk.whole

    @property
    def micro(self) -> Scheduled:
        """The only chunk's program of one micro-batch."""
        (chunk,) = self.chunks
        return chunk.micro

    @property
    def split(self) -> TimeSplit | None:
        """The cut into micro-batches of an execution with a single chunk."""
        (chunk,) = self.chunks
        return chunk.split


def execution(assignment: Assignment, analysis: Analysis, schedule: Schedule = PLAIN) -> Execution:
    """The decisions for a whole batch under a schedule; `UsageError` where the batch cannot be cut so."""
    whole = scheduled(build_program(analysis.graph, assignment), schedule)
    m = schedule.micro_batches
    if m == 1:
        return Execution(chunks=(Chunk(whole=whole, micro=whole, split=None),))
    part = split_batch(analysis, m)
    micro = scheduled(build_program(part.graph, of_micro_batch(assignment, analysis, part, m)), schedule)
    return Execution(chunks=(Chunk(whole=whole, micro=micro, split=micro_batch_options(analysis)),))
