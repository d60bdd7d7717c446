"""The known schemes' placements for a transformer's operators, by kind of axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.sharding.direct_assignment import Pin
from autopar.sharding.layout import P, Placement, R, S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An operator's output placements under the known schemes, by kind of axis.

    A scalar's are those of its first input. `data`, `context`: on an axis of that kind. `tensor`:
    on a tensor-parallel axis, as Megatron splits it; `sequence`: the same with sequence
    parallelism. `inside`: pins that differ by the axis's use in a layer of experts, under both.
    """

    data: Placement
    context: Placement
    tensor: Placement
    sequence: Placement
    inside: Mapping[tuple[str, str], Pin] = field(default_factory=dict)

    def on(self, kind: str, inside: str) -> Pin:
        """The pin on an axis of a kind (data, context, tensor or sequence) by its use `inside`."""
        pin: Pin = self.inside.get((kind, inside), getattr(self, kind))
        return pin


ROWS = Wanted(data=S(0), context=S(1), tensor=R, sequence=S(1))
INNER = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
SUM = Wanted(data=S(0), context=S(1), tensor=P, sequence=P)
WHOLE = Wanted(data=S(0), context=S(1), tensor=R, sequence=R)
HEADS = Wanted(data=S(0), context=S(2), tensor=S(1), sequence=S(1))
SCALAR = Wanted(data=P, context=P, tensor=R, sequence=R)
GROUPS = Wanted(data=S(0), context=S(3), tensor=S(1), sequence=S(1))
GROUPED = Wanted(data=S(0), context=S(1), tensor=S(2), sequence=S(2))
"""Groups of state-space heads behind the sequence."""


def tokens(sequences: int) -> Wanted:
    """Rows of the tokens of `sequences` on their way to experts.

    All ranks that split the inner dim of experts need all rows. Other tensor-parallel ranks keep
    their share of each sequence.
    """
    share = S(0, sequences)
    return Wanted(
        data=S(0),
        context=share,
        tensor=R,
        sequence=R,
        inside={("sequence", "expert"): share, ("sequence", "replica"): share},
    )


def expert_rows(sequences: int) -> Wanted:
    """Rows of a rank's own experts: the outputs, and the last weights [experts, inner, hidden].

    Their number is that of the rank's own tokens, since as many come from other ranks as leave.
    """
    share = S(0, sequences)
    return Wanted(
        data=S(0),
        context=share,
        tensor=P,
        sequence=P,
        inside={
            ("tensor", "inner"): (P, S(1)),
            ("sequence", "inner"): (P, S(1)),
            ("sequence", "expert"): share,
            ("sequence", "replica"): share,
        },
    )
