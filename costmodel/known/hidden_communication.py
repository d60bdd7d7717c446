"""Hidden communication in a known configuration: the compute that covers it, and its slowdown."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.costmodel.step.pass_player import Seconds
from autopar.costmodel.step.timeline import SLOWDOWN
from autopar.sharding.layout import Layout
from autopar.sharding.program import Compute


def exposed(communication: float, cover: float, slowdown: float = SLOWDOWN["nccl"]) -> float:
    """Return the seconds that a collective adds to the compute that covers it.

    They are its excess over the compute, and the compute's slowdown.
    """
    return max(0.0, communication - cover) + (slowdown - 1) * min(communication, cover)


def in_pieces(communication: float, cover: float, pieces: int) -> float:
    """Return the exposed seconds if a product and a collective alternate piece by piece.

    Nothing covers the first piece.
    """
    return communication / pieces + exposed(communication * (1 - 1 / pieces), cover)


@dataclass(slots=True)
class Covers:
    """Seconds of the products next to a redistribution of a tensor.

    `ahead`: of its readers in a layout, forward. `back`, `weight`: of the same backward, for their
    inputs and for their weights. `made`: of the product that made it.
    """

    ahead: dict[tuple[str, Layout], float] = field(default_factory=dict)
    back: dict[tuple[str, Layout], float] = field(default_factory=dict)
    weight: dict[tuple[str, Layout], float] = field(default_factory=dict)
    made: dict[str, Seconds] = field(default_factory=dict)

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
