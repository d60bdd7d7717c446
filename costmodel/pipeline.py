"""Pipeline schedules as data: what every stage runs in which order, its simulation, and how many micro-batches it keeps in flight.

A pipeline of p stages runs m micro-batches a step; each stage may hold v model chunks (chunk 0 of all stages comes first in the model).
Every stage runs its actions in a fixed order, each as soon as its input is there:

gpipe          all forward passes, then all backward passes                                     (Huang et al., arXiv:1811.06965)
1f1b           p - 1 - s forward passes on stage s, then forward and backward in turns           (PipeDream-flush; Narayanan et al.,
interleaved    as 1f1b with 2 (p - 1 - s) + (v - 1) p chunk passes first, in groups of p           arXiv:2104.04473, section 2.2)
zero_bubble    as 1f1b; the weight gradient of micro-batch k is made s backward passes later    (ZB-H1; Qi et al., arXiv:2401.10241)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError, unknown

from .pipeline_forms import gpipe_seconds, interleaved_seconds, one_f_one_b_seconds, zero_bubble_seconds

Floats = NDArray[np.float64]
FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One pass of a micro-batch through a model chunk: `kind` is forward, backward, or weight where the weight gradient comes later."""

    kind: str
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`order(stage, stages, micro_batches, interleave)`: a stage's actions. `alive`: its micro-batches in flight, in passes of a chunk.

    `splits`: whether weight gradients are actions of their own. `chunks`: whether a stage holds several model chunks.
    """

    order: Callable[[int, int, int, int], list[Action]]
    alive: Callable[[int, int, int, int], int]
    splits: bool = False
    chunks: bool = False


def _passes(kind: str, first: int, last: int) -> list[Action]:
    return [Action(kind=kind, micro_batch=k) for k in range(first, last)]


def _gpipe(stage: int, stages: int, micro_batches: int, interleave: int) -> list[Action]:
    return _passes(FORWARD, 0, micro_batches) + _passes(BACKWARD, 0, micro_batches)


def _alternate(warm: int, forward: Sequence[Action], backward: Sequence[Action]) -> list[Action]:
    """`warm` forward passes, then one forward and one backward pass in turns, then the backward passes that are left."""
    turns = [action for pair in zip(forward[warm:], backward, strict=False) for action in pair]
    return [*forward[:warm], *turns, *backward[len(forward) - warm :]]


def _one_f_one_b(stage: int, stages: int, micro_batches: int, interleave: int) -> list[Action]:
    warm = min(stages - 1 - stage, micro_batches)
    return _alternate(warm, _passes(FORWARD, 0, micro_batches), _passes(BACKWARD, 0, micro_batches))


def _zero_bubble(stage: int, stages: int, micro_batches: int, interleave: int) -> list[Action]:
    order = []
    for action in _one_f_one_b(stage, stages, micro_batches, interleave):
        order.append(action)
        if action.kind == BACKWARD and action.micro_batch >= stage:
            order.append(Action(kind=WEIGHT, micro_batch=action.micro_batch - stage))
    return order + _passes(WEIGHT, max(micro_batches - stage, 0), micro_batches)


def _interleaved_warm(stage: int, stages: int, micro_batches: int, interleave: int) -> int:
    return min(2 * (stages - 1 - stage) + (interleave - 1) * stages, micro_batches * interleave)


def _interleaved(stage: int, stages: int, micro_batches: int, interleave: int) -> list[Action]:
    """Groups of p micro-batches pass through chunk 0, then chunk 1, ...; backward the chunks come in reverse."""
    forward, backward = [], []
    for k in range(micro_batches * interleave):
        group, inside = divmod(k, stages * interleave)
        chunk, member = divmod(inside, stages)
        forward.append(Action(kind=FORWARD, micro_batch=group * stages + member, chunk=chunk))
        backward.append(Action(kind=BACKWARD, micro_batch=group * stages + member, chunk=interleave - 1 - chunk))
    return _alternate(_interleaved_warm(stage, stages, micro_batches, interleave), forward, backward)


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(order=_gpipe, alive=lambda s, p, m, v: m),
    "1f1b": Schedule(order=_one_f_one_b, alive=lambda s, p, m, v: min(m, p - s)),
    "interleaved": Schedule(order=_interleaved, alive=lambda s, p, m, v: min(_interleaved_warm(s, p, m, v) + 1, m * v), chunks=True),
    "zero_bubble": Schedule(order=_zero_bubble, alive=lambda s, p, m, v: min(m, p), splits=True),
}


def schedule_named(name: str, stages: int, micro_batches: int, interleave: int) -> Schedule:
    """The schedule called `name`, if it exists for these numbers."""
    if name not in SCHEDULES:
        raise UsageError(unknown("pipeline schedule", name, SCHEDULES))
    found = SCHEDULES[name]
    if min(stages, micro_batches, interleave) < 1:
        raise UsageError(f"{stages} stages, {micro_batches} micro-batches and {interleave} chunks a stage: each must be at least 1")
    if interleave > 1 and not found.chunks:
        raise UsageError(f"the pipeline schedule {name!r} has one model chunk a stage, not {interleave}: use 'interleaved'")
    if found.chunks and micro_batches % stages:
        raise UsageError(f"{micro_batches} micro-batches are no multiple of {stages} stages, which the interleaved schedule needs")
    return found


def actions(name: str, stages: int, micro_batches: int, interleave: int = 1) -> list[list[Action]]:
    """What every stage runs, in order."""
    found = schedule_named(name, stages, micro_batches, interleave)
    return [found.order(stage, stages, micro_batches, interleave) for stage in range(stages)]


def in_flight(name: str, stage: int, stages: int, micro_batches: int, interleave: int = 1) -> float:
    """The most micro-batches whose activations `stage` holds at once, in units of one micro-batch through all of its chunks.

    gpipe m; 1f1b min(m, p - s); zero_bubble min(m, p); interleaved (2 (p - 1 - s) + (v - 1) p + 1) / v, which is p (1 + (p - 1) / (p v)) on
    the first stage.

    >>> in_flight("1f1b", 0, 8, 64), in_flight("interleaved", 0, 8, 64, 2)
    (8.0, 11.5)
    """
    found = schedule_named(name, stages, micro_batches, interleave)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} of {stages} stages; they are numbered from 0")
    return found.alive(stage, stages, micro_batches, interleave) / interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one micro-batch: per stage `forward`, `backward` (all of it) and `weight` (the part that makes weight gradients).

    `send`: from each stage to the next one and back; that of the last stage leads to the first, for the next chunk.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    send: Floats

    @classmethod
    def of(
        cls, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float] | float = 0.0, send: Sequence[float] | float = 0.0
    ) -> Times:
        """Check the figures; one number for `weight` or `send` serves all stages."""
        stages = len(forward)
        found = [
            np.broadcast_to(np.asarray(x, dtype=np.float64), (stages,))
            for x in (forward, backward, weight, send)
            if np.size(x) in (1, stages)
        ]
        if not stages or len(found) < 4 or min(float(x.min()) for x in found) < 0 or (found[2] > found[1]).any():
            raise UsageError("a pipeline needs times of at least 0 for each stage, with a weight part no longer than the backward pass")
        return cls(forward=found[0], backward=found[1], weight=found[2], send=found[3])


def pipeline_seconds(
    name: str,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | float,
    send: Sequence[float] | float,
    micro_batches: int,
    interleave: int = 1,
    *,
    overlap_sends: bool = True,
) -> float:
    """Seconds of a step of the pipeline, by closed form (`pipeline_forms`); the arguments are those of `Times`, per stage.

    `overlap_sends`: a stage goes on computing while it sends; otherwise it stands still until its message has arrived.

    >>> pipeline_seconds("1f1b", [1.0] * 4, [2.0] * 4, 0.0, 0.0, 8)
    33.0
    """
    times = Times.of(forward, backward, weight, send)
    stages = len(times.forward)
    schedule_named(name, stages, micro_batches, interleave)
    if stages == 1:
        return float(micro_batches * (times.forward[0] + times.backward[0]))
    ahead, back, both = _with_sends(times, interleave, overlap=overlap_sends)
    match name:
        case "gpipe":
            return gpipe_seconds(ahead, back, both, micro_batches)
        case "1f1b":
            return one_f_one_b_seconds(ahead, back, both, micro_batches)
        case "interleaved":
            return interleaved_seconds(times.forward, times.backward, times.send, micro_batches, interleave, (ahead, back))
        case _:
            return zero_bubble_seconds(ahead, back - times.weight, times.weight, both, micro_batches)


def _with_sends(times: Times, interleave: int, *, overlap: bool) -> tuple[Floats, Floats, Floats]:
    """Forward and backward seconds of every stage and the sends behind it: sends that are not hidden count as the sender's work."""
    if overlap:
        return times.forward, times.backward, times.send
    ahead = np.full(len(times.send), interleave)
    ahead[-1] -= 1
    return times.forward + times.send * ahead, times.backward + np.roll(times.send, 1) * ahead[::-1], np.zeros(len(times.send))
