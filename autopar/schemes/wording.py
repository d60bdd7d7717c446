"""Names of schemes in a plan's product, and their descriptions in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plan_parts import SchedulePlan

PRODUCT = " x "
UNUSED = "replicated"
_PARALLEL = "heads, feed-forward and vocabulary are split over {}"
WORDS = {
    "data": "the batch is split over {}",
    "sequence": "the sequence is split over {}, attention's keys are gathered",
    "ulysses": "the sequence is split over {}, and the heads inside attention",
    "context": "the sequence is split over {}, inside attention too",
    "megatron": f"{_PARALLEL}, activations between are whole",
    "megatron-sp": f"{_PARALLEL}, and the rows between them",
    "hidden": "the hidden dim of the weights is split over {}",
    "columns": "weights are split over {} along their outputs",
    "tensor": "weights are split over {}",
    "expert": "experts are split over {}, everything else splits the batch there",
    "spatial": "images are split in space over {}",
    UNUSED: "every operator is repeated on all of {}",
    "2d": "rows and columns of every product are split over {}",
    "2.5d": "the batch is split over grids of rows and columns, {} in all",
    "3d": "rows, hidden and inner dim of every product are split over {}",
}
STORED = {
    1: "parameters are stored split and gathered once a step",
    2: "parameters are stored split and gathered once a step, gradients are added up as shards",
    3: "parameters are stored split and gathered for every pass",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of a plan's name: a scheme over `size` devices.

    `zero`: the ZeRO stage of its parameters (0: none).
    """

    scheme: str
    size: int
    zero: int = 0

    @property
    def alone(self) -> str:
        """The name of a plan with this factor alone."""
        if not self.zero:
            return self.scheme
        return f"zero{self.zero}" if self.scheme == "data" else str(self)

    def __str__(self) -> str:
        return f"{self.scheme} {self.size}" + (f" (zero{self.zero})" if self.zero else "")


def sentence_of(factors: Sequence[Factor], schedule: SchedulePlan) -> str:
    """The description of a plan in words."""
    text = "; ".join(_words(factor, schedule) for factor in factors) or "nothing is split"
    return text[0].upper() + text[1:] + "."


def _words(factor: Factor, schedule: SchedulePlan) -> str:
    over = f"{factor.size} devices"
    if factor.scheme.startswith("pipeline-"):
        parts = (
            "the whole batch at once"
            if schedule.micro_batches == 1
            else f"{schedule.micro_batches} micro-batches"
        )
        return f"{factor.size} stages of consecutive operators run {parts} ({schedule.pipeline})"
    if factor.scheme.startswith("expert+"):
        words = (
            f"experts are split over {over}, the rest is {factor.scheme.removeprefix('expert+')} "
            "there"
        )
    else:
        words = WORDS.get(factor.scheme, f"{factor.scheme} over {{}}").format(over)
    return words + (f" ({STORED[factor.zero]})" if factor.zero else "")
