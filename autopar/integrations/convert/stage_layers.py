"""The layers of a plan's stages: targets cut a model between layers, plans at any operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.plan import Plan
from autopar.sharding.layer_numbers import layer_of

from .axis_work import is_product


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """The layers that each chunk holds, in the order of the model.

    A layer belongs to the chunk of most of its products. `cut`: layers of which the plan has a part
    on another chunk.
    """

    chunks: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether all chunks hold the same number."""
        return len({len(layers) for layers in self.chunks}) == 1

    def moved(self) -> list[str]:
        """A sentence on layers that the plan cuts."""
        if not self.cut:
            return []
        named = ", ".join(map(str, self.cut))
        return [
            f"the plan cuts stages inside layer{'s' if len(self.cut) > 1 else ''} {named}: the "
            "target has such a layer whole, on the stage of most of its products"
        ]


def stage_layers(plan: Plan) -> StageLayers | None:
    """The layers by chunk; None without stages, or where operators' names number no layers."""
    if not plan.stages:
        return None
    firsts = {stage.first for stage in plan.stages[1:]}
    held: dict[int, Counter[int]] = {}
    chunk = 0
    for name, operator in plan.operators.items():
        chunk += name in firsts
        layer = layer_of(name)
        # A norm that is computed by the stage before makes no cut inside a layer.
        if layer is not None and is_product(operator):
            held.setdefault(layer, Counter())[chunk] += 1
    chunks = tuple(
        tuple(layer for layer, counts in held.items() if counts.most_common(1)[0][0] == number)
        for number in range(len(plan.stages))
    )
    if sorted(held) != list(range(len(held))) or not all(chunks):
        return None
    return StageLayers(
        chunks=chunks, cut=tuple(layer for layer, counts in held.items() if len(counts) > 1)
    )
