"""The programs of the chunks of a plan with pipeline stages, and the values between them.

A chunk holds the operators from its first one to the first one of the next chunk. Values without
parameters (masks, tables of positions) are computed by each chunk for itself if its mesh is the
same. Every other value comes from the chunk that makes it: between equal meshes in its layout
there, rank by rank; between unequal ones whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir import Operator, Role
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.mesh import Mesh
from autopar.sharding.micro_batches import of_micro_batch, split_batch
from autopar.sharding.program import Assignment
from autopar.sharding.program_builder import build_program
from autopar.sharding.rules import without_parameters
from autopar.sharding.schedule import Schedule
from autopar.sharding.time_split import TimeSplit, micro_batch_options

from .execution import Chunk, Execution, Handed
from .plan_on_mesh import Decided, PlanOnMesh
from .scheduled import Scheduled, scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """The cut of a plan into chunks.

    `firsts`: the first operators of the chunks. `meshes`: one for each chunk.
    """

    firsts: Sequence[str]
    meshes: Sequence[Mesh]
    pipeline: str
    interleave: int
    schedule: Schedule


def staged_execution(analysis: Analysis, decided: Decided, cut: Pipelined) -> Execution:
    """The execution of a plan with stages; `PlanError` if its cuts do not follow one another."""
    return _Cutting(analysis, decided, cut).run()


class _Cutting:
    """Deals the operators out to the chunks."""

    def __init__(self, analysis: Analysis, decided: Decided, cut: Pipelined) -> None:
        self.analysis = analysis
        self.decided = decided
        self.cut = cut
        self.graph = analysis.graph
        place = {op.name: number for number, op in enumerate(self.graph.operators)}
        # A plan from a file may be of another model, so its cuts are checked before they are used.
        missing = [name for name in cut.firsts if name not in place]
        if missing:
            raise PlanError(
                f"the plan cuts the model at {missing[0]!r}, which is no operator of it"
            )
        starts = [0, *(place[name] for name in cut.firsts[1:]), len(place)]
        if any(stop <= start for start, stop in itertools.pairwise(starts)):
            raise PlanError("the plan's stages do not follow one another in the model")
        if len(cut.firsts) % cut.interleave:
            raise PlanError(
                f"the plan has {len(cut.firsts)} chunks of the model, which do not make stages of "
                f"{cut.interleave} each"
            )
        self.stages = len(cut.firsts) // cut.interleave
        self.chunk_of: dict[str, int] = {}
        for chunk, (start, stop) in enumerate(itertools.pairwise(starts)):
            self.chunk_of.update((op.name, chunk) for op in self.graph.operators[start:stop])
        self.maker = {name: op for op in self.graph.operators for name in op.outputs}
        self.own = {op.name for op in without_parameters(self.graph)}
        self.read = {name for op in self.graph.operators for name in op.inputs}
        self.on_the_way = self._on_the_way()

    def run(self) -> Execution:
        operators = [self._operators(chunk) for chunk in range(len(self.cut.firsts))]
        arrivals = [dict(self._arrivals(chunk, ops)) for chunk, ops in enumerate(operators)]
        edges: dict[tuple[int, int], list[Handed]] = {}
        for chunk, arrived in enumerate(arrivals):
            for name, layout in arrived.items():
                source = self.chunk_of[self.maker[name].name]
                flows = name in self.on_the_way
                edges.setdefault((source, chunk), []).append(
                    Handed(name=name, made=self._made(name), taken=layout, differentiable=flows)
                )
        handed = [
            {value.name for (a, _), values in edges.items() if a == chunk for value in values}
            for chunk in range(len(operators))
        ]
        # Chunks of one stage share its ranks, so the stages count, not the chunks.
        firsts = [
            sum(mesh.devices for mesh in self.cut.meshes[:stage]) for stage in range(self.stages)
        ]
        chunks = tuple(
            self._chunk(
                chunk,
                ops,
                arrivals[chunk],
                handed[chunk] & self.on_the_way,
                firsts[chunk % self.stages],
            )
            for chunk, ops in enumerate(operators)
        )
        return Execution(
            chunks=chunks,
            stages=self.stages,
            pipeline=self.cut.pipeline,
            interleave=self.cut.interleave,
            edges={edge: tuple(values) for edge, values in sorted(edges.items())},
        )

    def _on_the_way(self) -> set[str]:
        """The values through which the loss's gradient passes."""
        reached = {self.graph.loss} if self.graph.loss else set()
        for op in reversed(self.graph.operators):
            if not reached.isdisjoint(op.outputs):
                reached.update(name for name in op.inputs if name in self.analysis.gradients)
        return {name for name in reached if name is not None}

    # --- a chunk's contents ---

    def _mesh(self, operator: str) -> Mesh:
        return self.cut.meshes[self.chunk_of[operator]]

    def _remade(self, operator: Operator, chunk: int) -> bool:
        """Whether a chunk recomputes the result of another chunk's operator, not receives it."""
        if operator.name in self.analysis.cold:
            return True
        return (
            operator.name in self.own
            and self._mesh(operator.name).shape == self.cut.meshes[chunk].shape
        )

    def _operators(self, chunk: int) -> list[Operator]:
        """The operators that a chunk runs, in the order of the model."""
        leaving = {*self.analysis.outputs}
        wanted: set[str] = set()
        for op in reversed(self.graph.operators):
            # From the end, so that an operator's readers are decided before it.
            here = self.chunk_of[op.name] == chunk
            if here and (
                op.name not in self.own or not leaving.isdisjoint(op.outputs) or self._handed_on(op)
            ):
                needed = True
            else:
                needed = not wanted.isdisjoint(op.outputs) and (here or self._remade(op, chunk))
            if needed:
                wanted.update(op.inputs)
                # Tensors and operators share this set; the prefix keeps their names apart.
                wanted.add(f"operator {op.name}")
        return [op for op in self.graph.operators if f"operator {op.name}" in wanted]

    def _handed_on(self, operator: Operator) -> bool:
        """Whether a value without parameters must be sent to some other chunk."""
        others = {
            self.chunk_of[op.name]
            for op in self.graph.operators
            if not set(op.inputs).isdisjoint(operator.outputs)
        }
        return any(
            not self._remade(operator, other) for other in others - {self.chunk_of[operator.name]}
        )

    def _arrivals(self, chunk: int, operators: Sequence[Operator]) -> Iterator[tuple[str, Layout]]:
        """Values from other chunks, and the layouts in which they arrive."""
        made = {name for op in operators for name in op.outputs}
        for name in dict.fromkeys(name for op in operators for name in op.inputs):
            if name not in made and self.graph.tensors[name].role is Role.ACTIVATION:
                # Unequal meshes have no layout in common but that of the whole value.
                same = self._mesh(self.maker[name].name).shape == self.cut.meshes[chunk].shape
                yield (
                    name,
                    self._made(name) if same else replicated(len(self.cut.meshes[chunk].axes)),
                )

    def _made(self, name: str) -> Layout:
        """A value's layout in the chunk that makes it."""
        op = self.maker[name]
        if op.name in self.analysis.cold:
            # A plan decides nothing about cold operators, which work on whole values.
            return replicated(len(self._mesh(op.name).axes))
        return self.decided.decide(op.name, self._mesh(op.name)).outputs[op.outputs.index(name)]

    # --- its program ---

    def _chunk(
        self,
        chunk: int,
        operators: list[Operator],
        arrivals: dict[str, Layout],
        ends: set[str],
        first: int,
    ) -> Chunk:
        assignment = self._assignment(chunk, operators, arrivals)
        schedule = replace(self.cut.schedule, recompute=self._recompute(operators))
        whole = scheduled(
            build_program(
                self.graph, assignment, operators=operators, arrivals=arrivals, ends=ends
            ),
            schedule,
        )
        micro, split = self._micro(whole, operators, arrivals, ends)
        return Chunk(whole=whole, micro=micro, split=split, first=first)

    def _recompute(self, operators: Sequence[Operator]) -> tuple[tuple[str, ...], ...]:
        """The recomputed stretches, each restricted to a chunk's operators."""
        here = {op.name for op in operators}
        stretches = (
            tuple(name for name in stretch if name in here)
            for stretch in self.cut.schedule.recompute
        )
        return tuple(stretch for stretch in stretches if stretch)

    def _micro(
        self,
        whole: Scheduled,
        operators: list[Operator],
        arrivals: dict[str, Layout],
        ends: set[str],
    ) -> tuple[Scheduled, TimeSplit | None]:
        """The program of one micro-batch."""
        count = self.cut.schedule.micro_batches
        if count == 1:
            return whole, None
        part = split_batch(self.analysis, count)
        # Arrivals pass for outputs here, so that they are brought to a micro-batch like these.
        come = replace(
            whole.program.assignment, outputs={**whole.program.assignment.outputs, **arrivals}
        )
        local = of_micro_batch(come, self.analysis, part, count)
        here = {name: local.outputs[name] for name in arrivals}
        without_arrivals = replace(
            local,
            outputs={
                name: layout for name, layout in local.outputs.items() if name not in arrivals
            },
        )
        own = [op for op in part.graph.operators if op.name in {op.name for op in operators}]
        program = build_program(
            part.graph, without_arrivals, operators=own, arrivals=here, ends=ends
        )
        return scheduled(program, whole.schedule), micro_batch_options(self.analysis)

    def _assignment(
        self, chunk: int, operators: Sequence[Operator], arrivals: Mapping[str, Layout]
    ) -> Assignment:
        graph = self.graph
        plan = PlanOnMesh(analysis=self.analysis, decided=self.decided, mesh=self.cut.meshes[chunk])
        decisions = plan.decisions(operators)
        read = {name for op in operators for name in op.inputs}
        leaving = [
            name
            for name in self.decided.outputs
            if name in self.analysis.outputs and self._leaves(name, chunk)
        ]
        outputs = {name: plan.fitting(name, self.decided.outputs[name]) for name in leaving}
        storage = {
            tensor.name: plan.fitting(tensor.name, self.decided.storage[tensor.name])
            for tensor in graph.parameters
            if tensor.name in read
            or tensor.name in outputs
            # A parameter that nothing reads has to be stored somewhere all the same.
            or (chunk == 0 and tensor.name not in self.read)
        }
        chains = plan.chains(operators, decisions, storage | dict(arrivals), outputs)
        return Assignment(
            mesh=plan.mesh,
            decisions=decisions,
            storage=storage,
            outputs=outputs,
            chains=chains,
            gradients=self.analysis.gradients,
            host=frozenset(name for name in self.decided.host if name in storage),
            matrices=frozenset(name for name in self.decided.matrices if name in storage),
        )

    def _leaves(self, name: str, chunk: int) -> bool:
        """Whether an output of the model leaves this chunk: the chunk of its maker, or the last."""
        last = len(self.cut.firsts) - 1
        return (self.chunk_of[self.maker[name].name] if name in self.maker else last) == chunk
