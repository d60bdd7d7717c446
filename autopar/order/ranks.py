"""The order of a rank: the passes of its stage, with messages and with the actions of its units."""

from __future__ import annotations

from .actions import Action, Word
from .execution import Execution
from .passes import expand, one_stage
from .pipeline import pipeline_order


def rank_order(execution: Execution, stage: int, *, train: bool) -> tuple[Action, ...]:
    """All actions of a stage's ranks in one step; without `train` those of the forward passes."""
    schedule = execution.schedule
    trains = train and execution.chunks[0].whole.trains
    if execution.stages == 1:
        return expand(
            {0: execution.chunks[0].whole},
            one_stage(schedule.micro_batches, train=trains, merges=schedule.merges),
            prefetch=schedule.prefetch,
        )
    # Where a stage receives depends on when others send, so all orders are made for one.
    orders = pipeline_order(
        execution.pipeline,
        execution.stages,
        schedule.micro_batches,
        execution.interleave,
        edges=tuple(execution.edges),
        train=trains,
    )
    own = range(stage, len(execution.chunks), execution.stages)
    actions = expand(
        {number: execution.chunks[number].whole for number in own},
        orders[stage],
        prefetch=schedule.prefetch,
    )
    return (
        # Behind all else, when every gradient of the stage is complete.
        (*actions, Action(word=Word.SUM_TIED, chunk=stage))
        if trains and tied_parameters(execution)
        else actions
    )


def update_order(execution: Execution, stage: int) -> tuple[Action, ...]:
    """The updates of a stage's ranks behind a step, if the optimizer updates whole matrices."""
    own = range(stage, len(execution.chunks), execution.stages)
    return tuple(
        Action(word=Word.UPDATE, chunk=number)
        for number in own
        if execution.chunks[number].whole.updates_whole
    )


def tied_parameters(execution: Execution) -> dict[str, tuple[int, ...]]:
    """The trained parameters that several stages hold, and these stages."""
    holders: dict[str, dict[int, None]] = {}
    for number, chunk in enumerate(execution.chunks):
        for name in chunk.stored:
            holders.setdefault(name, {})[number % execution.stages] = None
    gradients = execution.chunks[0].whole.program.assignment.gradients
    return {
        name: tuple(sorted(stages))
        for name, stages in holders.items()
        if len(stages) > 1 and name in gradients
    }
