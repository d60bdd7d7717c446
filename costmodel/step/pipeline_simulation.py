"""The order of a pipeline simulated action by action: start and end of each, idle stages.

An action starts when its stage has finished the one before. A receive ends when its message has
arrived: the message's seconds after its send. Meanwhile the sending stage goes on computing, or
waits (`Times.overlap`). The passes of a pair take turns; they are told one after the other, with
their shares of its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.order.actions import Action, Pair, Word
from autopar.order.playing import RECEIVES, SENDS, Message, Orders, message_of, play
from autopar.order.times import Floats, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An action with its start and end in seconds; a send has those of its message."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """All actions of every stage in order.

    `seconds`: end of the last pass. `idle`: a stage's seconds without one.
    """

    stages: tuple[tuple[Timed, ...], ...]
    seconds: float
    idle: tuple[float, ...]


def simulate(orders: Orders, times: Times, interleave: int = 1) -> PipelineRun:
    """Play the orders, with values from each chunk to the next.

    The chunks of a stage take equal parts of its time.
    """
    work = {
        Word.FORWARD: times.forward / interleave,
        Word.BACKWARD: times.backward / interleave,
        Word.BACKWARD_INPUT: (times.backward - times.weight) / interleave,
        Word.BACKWARD_WEIGHT: times.weight / interleave,
    }
    timed: list[list[Timed]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    arrives: dict[Message, float] = {}
    for stage, action in play(orders):
        start = end = free[stage]
        if not isinstance(action, Action):
            timed[stage] += _merged(action, start, times.pair[stage] / interleave, work, stage)
            free[stage] = timed[stage][-1].end
            continue
        if action.word in SENDS:
            end = arrives[message_of(action)] = start + _travel(action, times)
            # Without overlap the stage itself waits until its message has arrived.
            free[stage] = start if times.overlap else end
        elif action.word in RECEIVES:
            end = free[stage] = max(start, arrives[message_of(action)])
        else:
            end = free[stage] = start + float(work[action.word][stage])
        timed[stage].append(Timed(action=action, start=start, end=end))
    # A message at the very end lengthens nothing, so steps are told by their passes.
    passes = [[t for t in done if t.action.word in work] for done in timed]
    seconds = max(done[-1].end for done in passes)
    idle = tuple(seconds - sum(t.end - t.start for t in done) for done in passes)
    return PipelineRun(stages=tuple(map(tuple, timed)), seconds=seconds, idle=idle)


def _merged(
    pair: Pair, start: float, seconds: float, work: Mapping[Word, Floats], stage: int
) -> list[Timed]:
    """The passes of a pair that takes so many seconds."""
    ahead, back = pair
    alone = [float(work[action.word][stage]) for action in pair]
    middle = start + seconds * (alone[0] / sum(alone) if any(alone) else 0.0)
    return [
        Timed(action=ahead, start=start, end=middle),
        Timed(action=back, start=middle, end=start + seconds),
    ]


def _travel(action: Action, times: Times) -> float:
    """Seconds of a message: of the link behind the earlier one of its two chunks."""
    assert action.peer is not None
    return float(times.send[min(action.chunk, action.peer) % len(times.send)])
