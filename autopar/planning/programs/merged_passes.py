"""Programs whose passes of two micro-batches are merged, so that exchanges of experts hide.

They have the strategies of a program without stages that the search has found. What the merged step
takes, and the activations of one more micro-batch, are played; no table knows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.order.beside import travels
from autopar.planning.model.request import Request
from autopar.planning.stages.staged_program import StagedProgram

from .priced_program import DraftProgram, PricedProgram, thriftier


def exchanges_rows(program: PricedProgram) -> bool:
    """Whether rows travel to experts and back in a program."""
    mesh = program.assignment.mesh.shape
    return program.plan.trains and any(travels(step, mesh) for step in program.program.steps)


def merged_forms(
    programs: Iterable[PricedProgram | StagedProgram], request: Request
) -> Iterator[PricedProgram]:
    """The merged forms of the programs that have exchanges to hide, where they fit the memory."""
    for program in programs:
        if not isinstance(program, PricedProgram) or program.schedule.overlap_experts:
            continue
        schedule = replace(program.schedule, overlap_experts=True)
        if not schedule.merges or not exchanges_rows(program):
            continue
        # Recompute and units of parameters are as in the program itself.
        draft = DraftProgram(
            tables=program.tables, solution=program.solution, plan=program.plan
        ).under(schedule)
        # Layers that are recomputed, or stand first, have none that could hide.
        if not any(segment.working for segment in draft.plan.segments):
            continue
        memory_limit = request.memory_limit_on(program.tables.prices.cluster)
        draft = thriftier(draft, memory_limit)
        if draft.memory.total <= memory_limit:
            yield draft.priced()
