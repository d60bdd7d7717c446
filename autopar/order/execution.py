"""`Execution`: the chunks of a model as they are executed, and as they are priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir import Graph
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.micro_batches import of_micro_batch, split_batch
from autopar.sharding.program import Assignment
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import PLAIN, Schedule
from autopar.sharding.time_split import TimeSplit, micro_batch_options

from .scheduled import Scheduled, scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A value that one chunk hands to another.

    `made`: its layout in the first chunk. `taken`: its layout in the second. `differentiable`:
    whether its gradient comes back.
    """

    name: str
    made: Layout
    taken: Layout
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of the model on one stage.

    `whole`: the program of the whole batch, which the runtime cuts into micro-batches by `split`.
    `micro`: the program of one micro-batch, which is priced. With one micro-batch both are equal
    and `split` is None. `first`: the first rank of its mesh.
    """

    whole: Scheduled
    micro: Scheduled
    split: TimeSplit | None
    first: int = 0

    @property
    def mesh(self) -> Mesh:
        """The devices that it runs on."""
        return self.whole.program.assignment.mesh

    @property
    def stored(self) -> Mapping[str, Layout]:
        """The layouts in which its parameters are stored, by name."""
        return self.whole.program.assignment.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The chunks of a model in its order, and the schedule of the stages that run them.

    Chunk k runs on stage k modulo `stages`, in the order of the schedule `pipeline`.

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
        # Further chunks run on the same ranks again.
        return sum(chunk.mesh.devices for chunk in self.chunks[: self.stages])

    @property
    def whole(self) -> Scheduled:
        """The only chunk's program of the whole batch."""
        # Unpacked, so that several chunks are an error and the first is not taken for all.
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
    """The execution of decisions for a whole batch; `UsageError` if the batch cannot be cut so."""
    whole = scheduled(build_program(analysis.graph, assignment, ends=analysis.ends), schedule)
    m = schedule.micro_batches
    if m == 1:
        return Execution(chunks=(Chunk(whole=whole, micro=whole, split=None),))
    part = split_batch(analysis, m)
    micro = scheduled(
        build_program(part.graph, of_micro_batch(assignment, analysis, part, m)), schedule
    )
    return Execution(chunks=(Chunk(whole=whole, micro=micro, split=micro_batch_options(analysis)),))
