"""Redistributions of values under the products beside them, as the habits of a framework have it.

A message of m seconds under a product of c seconds shows

    max(0, m - c)                      where it is sent at once, beside the product
    m / p + max(0, m (1 - 1 / p) - c)  where it is sent in p pieces, each beside the product of
                                       another, but for the first

and slows the product down for the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.costmodel.frameworks import Habits
from autopar.sharding.layout import Layout
from autopar.sharding.program import Compute, Program, Redistribute

Place = tuple[str, Layout]
"""A tensor in a layout."""
SLOWDOWN: Mapping[str, float] = {"nccl": 1.1256, "gloo": 1.0}
"""Slowdown of computation while a collective of the backend runs.

On A100s as Galvatron's profiler measured it (PKU-DAIR/Hetu-Galvatron@cea12ffb,
galvatron/profile_hardware/hardware_configs/overlap_coefficient.json); for Gloo not measured.
"""


class Seconds(NamedTuple):
    """Seconds of an operator.

    `weight` is the part of `backward` that makes the gradients of parameters.
    """

    forward: float
    backward: float
    weight: float = 0.0


class Seen(NamedTuple):
    """The seconds of messages that computation waits for, and those that run under it."""

    waits: float = 0.0
    under: float = 0.0

    @classmethod
    def of(cls, seconds: float, cover: float = 0.0, pieces: int = 1) -> Seen:
        """Messages of so many seconds, in so many pieces, beside a product."""
        first = seconds / pieces if pieces > 1 else 0.0
        waits = first + max(0.0, seconds - first - cover)
        return cls(waits, seconds - waits)

    def seconds(self, slowdown: float) -> float:
        """The seconds that the messages add to computation."""
        return self.waits + (slowdown - 1) * self.under


class Moved(NamedTuple):
    """A redistribution's messages forward and backward, and those repeated backward."""

    ahead: Seen
    back: Seen
    repeated: Seen


@dataclass(slots=True)
class Covers:
    """Seconds of the products next to a redistribution of a tensor.

    `ahead`: of its readers in a layout, forward. `back`, `weight`: of the same backward, for their
    inputs and for their weights. `made`: of the product that made it.
    """

    habits: Habits
    ahead: dict[Place, float] = field(default_factory=dict)
    back: dict[Place, float] = field(default_factory=dict)
    weight: dict[Place, float] = field(default_factory=dict)
    made: dict[str, Seconds] = field(default_factory=dict)

    @classmethod
    def of(
        cls, program: Program, habits: Habits, seconds: Callable[[Compute], Seconds]
    ) -> Covers | None:
        """The products of a program; None where no habit of the framework asks for them."""
        if not (habits.overlap_tensor or habits.pipelined_tensor or habits.regather):
            return None
        covers = cls(habits)
        for step in program.steps:
            if isinstance(step, Compute):
                covers.add(step, seconds(step))
        return covers

    def add(self, step: Compute, seconds: Seconds) -> None:
        """Count a product."""
        self.made.update(dict.fromkeys(step.operator.outputs, seconds))
        # Collectives run under the products next to them, which have gradients of weights.
        if step.operator.inputs and seconds.weight:
            place = (step.operator.inputs[0], step.decision.inputs[0])
            for totals, value in (
                (self.ahead, seconds.forward),
                (self.back, seconds.backward - seconds.weight),
                (self.weight, seconds.weight),
            ):
                totals[place] = totals.get(place, 0.0) + value

    def moved(self, step: Redistribute, ahead: float, back: float, ranks: int) -> Moved:
        """Return the seen parts of a redistribution over so many ranks that takes these seconds."""
        habits = self.habits
        place = (step.tensor, step.chain[-1])
        inputs = self.back.get(place, 0.0)
        hides = habits.overlap_tensor or habits.pipelined_tensor
        # Where a gather's result is not kept, the backward pass repeats the gather.
        repeats = habits.regather and back > 0
        repeated = Seen.of(ahead if repeats else 0.0, inputs if hides else 0.0)
        if habits.pipelined_tensor and ranks > 1:
            made = self.made.get(step.tensor, Seconds(0.0, 0.0))
            forward = self.ahead.get(place, 0.0) or made.forward
            return Moved(
                Seen.of(ahead, forward, ranks),
                Seen.of(back, inputs or made.backward - made.weight, ranks),
                repeated,
            )
        weights = self.weight.get(place, 0.0) if habits.overlap_tensor else 0.0
        return Moved(Seen.of(ahead), Seen.of(back, weights), repeated)


def certain_share(habits: Habits) -> float:
    """The share of a bound at whole prices of messages that holds where products cover them.

    A step takes no less than its computation X, nor than the bound B without what covers messages,
    which is a share w of X: weight gradients a third, products of both passes two thirds.

        step >= max(X, B - w X) >= B / (1 + w)
    """
    if habits.pipelined_tensor:
        return 3 / 5
    return 3 / 4 if habits.overlap_tensor else 1.0
