"""What the known schemes make of the operators of a transformer, by the kind of axis: rows, inner dims, heads, experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.sharding.layout import P, Placement, R, S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What each kind of axis makes of an operator's outputs (of its first input, where it gives a scalar): the pin of every known scheme.

    `tensor`: on a tensor-parallel axis as Megatron splits it; `sequence`: the same with sequence parallelism. `expert`: on an axis that
    splits the experts and, elsewhere, the batch (None: as `data`).
    """

    data: Placement
    context: Placement
    tensor: Placement
    sequence: Placement
    expert: Placement | None = None


ROWS = Wanted(data=S(0), context=S(1), tensor=R, sequence=S(1))
INNER = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
SUM = Wanted(data=S(0), context=S(1), tensor=P, sequence=P)
WHOLE = Wanted(data=S(0), context=S(1), tensor=R, sequence=R)
WHOLE_SEQUENCE = Wanted(data=S(0), context=R, tensor=R, sequence=R)
DEALT = Wanted(data=S(1), context=R, tensor=R, sequence=R, expert=S(1))
EXPERT = Wanted(data=S(1), context=R, tensor=R, sequence=R, expert=S(0))
EXPERT_SUM = replace(EXPERT, tensor=P, sequence=P)
EXPERT_INNER = Wanted(data=S(1), context=R, tensor=S(2), sequence=S(2), expert=S(0))
HEADS = Wanted(data=S(0), context=S(2), tensor=S(1), sequence=S(1))
