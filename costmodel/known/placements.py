"""The known schemes' placements for a transformer's operators, by kind of axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.sharding.direct_assignment import Pin
from autopar.sharding.layout import P, Placement, R, S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An operator's output placements under the known schemes, by kind of axis.

    A scalar's are those of its first input. `data`, `context`: on an axis of that kind. `tensor`:
    on a tensor-parallel axis, as Megatron splits it; `sequence`: the same with sequence
    parallelism. `expert`: on an axis that splits the experts, and elsewhere the batch (None: as
    `data`). `weight`: placements of the operator's last weights on such an axis and on a
    tensor-parallel one, where the outputs leave them open.
    """

    data: Placement
    context: Placement
    tensor: Placement
    sequence: Placement
    expert: Placement | None = None
    weight: Mapping[str, Placement] | None = None

    def on(self, kind: str) -> Pin:
        """The pin on an axis of a kind: data, context, tensor, sequence or expert."""
        placement = getattr(self, kind) or self.data
        return (placement, self.weight[kind]) if self.weight and kind in self.weight else placement


ROWS = Wanted(data=S(0), context=S(1), tensor=R, sequence=S(1))
INNER = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
SUM = Wanted(data=S(0), context=S(1), tensor=P, sequence=P)
WHOLE = Wanted(data=S(0), context=S(1), tensor=R, sequence=R)
HEADS = Wanted(data=S(0), context=S(2), tensor=S(1), sequence=S(1))
SCALAR = Wanted(data=P, context=P, tensor=R, sequence=R)
GROUPS = Wanted(data=S(0), context=S(3), tensor=S(1), sequence=S(1))
GROUPED = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
CHUNKS = Wanted(data=S(0), context=S(1), tensor=S(3), sequence=S(3))
CHUNKED = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
"""Groups of state-space heads behind the sequence, behind the rows of its chunks, and before these.
"""
TOKENS = Wanted(data=S(0), context=S(0), tensor=R, sequence=R)
"""Rows of tokens on their way to experts, whose inner dim is split over tensor-parallel ranks."""
EXPERT_ROWS = Wanted(
    data=S(0),
    context=S(0),
    tensor=P,
    sequence=P,
    weight={"tensor": S(1), "sequence": S(1), "expert": S(0)},
)
WHOLE_EXPERTS = replace(EXPERT_ROWS, weight={"tensor": S(0), "sequence": S(0), "expert": S(0)})
"""Rows of experts, if tensor-parallel ranks split the experts among them instead of each expert."""
ROUTED = Wanted(data=S(0), context=S(1), tensor=P, sequence=P)
SUMMED = replace(ROUTED, weight={"tensor": P, "sequence": P})
"""The sum of a token's results, which are partial before and after it."""
