"""Simulates a pipeline schedule action by action: when each starts and ends, how long stages idle, what they hold.

An action starts when its stage has finished the one before and its input has arrived: a forward pass needs that of the chunk before it,
a backward pass that of the chunk behind it (the last chunk: its own forward pass), a weight gradient its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .pipeline import BACKWARD, FORWARD, WEIGHT, Action, Times, actions, schedule_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An action with its start and end in seconds; a stage that stands still while it sends does so after the end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """All actions of every stage, in order; `seconds`: the end of the last; `idle`: per stage the seconds without work.

    `in_flight`: the most chunk passes that a stage holds activations of at once, by stage and by chunk of the stage.
    """

    stages: tuple[tuple[Timed, ...], ...]
    seconds: float
    idle: tuple[float, ...]
    in_flight: tuple[int, ...]
    in_flight_by_chunk: tuple[tuple[int, ...], ...]


def simulate(name: str, times: Times, micro_batches: int, interleave: int = 1, *, overlap_sends: bool = True) -> PipelineRun:
    """Run the schedule; the chunks of a stage take equal parts of its time."""
    stages = len(times.forward)
    splits = schedule_named(name, stages, micro_batches, interleave).splits
    orders = actions(name, stages, micro_batches, interleave)
    arrived: dict[tuple[str, int, int], float] = {}
    timed: list[list[Timed]] = [[] for _ in orders]
    free = [0.0] * stages
    work = {
        FORWARD: times.forward / interleave,
        BACKWARD: (times.backward - times.weight if splits else times.backward) / interleave,
        WEIGHT: times.weight / interleave,
    }
    last = stages * interleave - 1
    left = sum(map(len, orders))
    while left:
        before = left
        for stage, order in enumerate(orders):
            done = timed[stage]
            while len(done) < len(order):
                action = order[len(done)]
                place = action.chunk * stages + stage
                ready = _ready(action, place, last, arrived)
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + float(work[action.kind][stage])
                done.append(Timed(action=action, start=start, end=end))
                travel = _travel(action, place, last, times)
                arrived[action.kind, action.micro_batch, place] = end + travel
                free[stage] = end if overlap_sends else end + travel
                left -= 1
        assert left < before, f"the schedule {name} waits for itself"
    seconds = max(done[-1].end for done in timed)
    busy = [sum(t.end - t.start for t in done) for done in timed]
    held = [_held(done, splits, interleave) for done in timed]
    return PipelineRun(
        stages=tuple(map(tuple, timed)),
        seconds=seconds,
        idle=tuple(seconds - b for b in busy),
        in_flight=tuple(total for total, _ in held),
        in_flight_by_chunk=tuple(each for _, each in held),
    )


def _ready(action: Action, place: int, last: int, arrived: dict[tuple[str, int, int], float]) -> float | None:
    """When the input of an action is on its stage; None while that is not known."""
    if action.kind == FORWARD:
        return 0.0 if place == 0 else arrived.get((FORWARD, action.micro_batch, place - 1))
    if action.kind == WEIGHT:
        return 0.0  # its backward pass comes earlier in the order of the same stage
    if place == last:
        return arrived.get((FORWARD, action.micro_batch, place))
    return arrived.get((BACKWARD, action.micro_batch, place + 1))


def _travel(action: Action, place: int, last: int, times: Times) -> float:
    """Seconds for which the result of an action is under way to the stage that needs it."""
    stages = len(times.send)
    if action.kind == FORWARD and place < last:
        return float(times.send[place % stages])
    if action.kind == BACKWARD and place > 0:
        return float(times.send[(place - 1) % stages])
    return 0.0


def _held(done: Sequence[Timed], splits: bool, interleave: int) -> tuple[int, tuple[int, ...]]:
    """The peak number of chunk passes between their forward pass and their last use, in all and chunk by chunk."""
    frees = WEIGHT if splits else BACKWARD
    held, peaks, peak = [0] * interleave, [0] * interleave, 0
    for timed in done:
        chunk = timed.action.chunk
        held[chunk] += (timed.action.kind == FORWARD) - (timed.action.kind == frees)
        peaks[chunk] = max(peaks[chunk], held[chunk])
        peak = max(peak, sum(held))
    return peak, tuple(peaks)
