"""`Execution`: how a step is executed, and as it is priced."""

from __future__ import annotations

from dataclasses import dataclass

from ..sharding.analysis import Analysis
from ..sharding.micro_batches import of_micro_batch, split_batch
from ..sharding.program import Assignment, build_program
from ..sharding.schedule import PLAIN, Schedule
from ..sharding.time_split import TimeSplit, micro_batch_options
from .scheduled import Scheduled, scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a step is executed: the program of the `whole` batch, which runs cut as `split` says, and as it is priced, of one micro-batch.

    With one micro-batch they are one, and there is no `split`.
    """

    whole: Scheduled
    micro: Scheduled
    split: TimeSplit | None


def execution(assignment: Assignment, analysis: Analysis, schedule: Schedule = PLAIN) -> Execution:
    """The decisions for a whole batch under a schedule; `UsageError` where the batch cannot be cut so."""
    whole = scheduled(build_program(analysis.graph, assignment), schedule)
    m = schedule.micro_batches
    if m == 1:
        return Execution(whole=whole, micro=whole, split=None)
    part = split_batch(analysis, m)
    micro = scheduled(build_program(part.graph, of_micro_batch(assignment, analysis, part, m)), schedule)
    return Execution(whole=whole, micro=micro, split=micro_batch_options(analysis))
