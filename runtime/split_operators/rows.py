"""Split rows that travel between ranks: look-ups of rows, and grouped products of rows sorted by expert.

Row i belongs to expert e where ends[e-1] <= i < ends[e]; rows at and beyond ends[-1] belong to none and give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Ref, Value
from autopar.sharding.communication import LOOK_UPS
from autopar.sharding.rules.experts import EXPERTS

from ..collectives import AxisGroup, Cut, all_gather, exchange_rows, shard_of
from ..functions import function_of
from ..local_call import LocalCall
from ..local_forms.experts import travelling_layer
from ..local_forms.registry import register


def grouped_product(rows: Tensor, weights: Tensor, ends: Sequence[int], kind: str) -> Tensor:
    """[rows, k] by [experts, k, n] → [rows, n]: the operator itself, on rows that all belong to one of the experts."""
    offsets = torch.tensor(ends, dtype=torch.int32, device=rows.device)
    function = function_of(kind)
    if kind.startswith("aten."):
        out: Tensor = function(self=rows, mat2=weights, offs=offsets)
    else:
        out = function(input=rows, weight=weights, offs=offsets)
    return out


def shard_experts(call: LocalCall) -> Mapping[str, Value] | None:
    """The places of a rank's rows and experts; None if it has all of both."""
    rows, weights = call.decision.inputs[0], call.decision.inputs[1]
    own_rows = [cut for cut in call.cuts(rows) if cut.dim == 0]
    own_experts = [cut for cut in call.cuts(weights) if cut.dim == 0]
    if len(call.inputs[1].shape) != 3 or len(call.inputs[0].shape) != 2 or not (own_rows or own_experts):
        return None
    return {
        "kind": call.operator.kind,
        "row_cuts": tuple(tuple(cut) for cut in own_rows),
        "expert_cuts": tuple(tuple(cut) for cut in own_experts),
        "rows": call.inputs[0].shape[0],
    }


def local_experts(
    rows: int, row_cuts: Sequence[Sequence[int]], expert_cuts: Sequence[Sequence[int]], kind: str, **arguments: Any
) -> Tensor:
    """The product for this rank's rows and experts; rows of other experts are zero, so the ranks' results add up."""
    value, weights, offsets = (argument for argument in arguments.values() if isinstance(argument, Tensor))
    own_rows = shard_of(torch.arange(rows), [Cut(*cut) for cut in row_cuts]).contiguous()
    ends = torch.searchsorted(own_rows, offsets.cpu().long())
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    experts = shard_of(torch.arange(len(ends)), [Cut(*cut) for cut in expert_cuts]).tolist()
    mine = torch.cat([torch.arange(int(starts[e]), int(ends[e])) for e in experts]).to(value.device)
    sizes = torch.stack([ends[e] - starts[e] for e in experts]).cumsum(0).tolist()
    out: Tensor = value.new_zeros(value.shape[0], weights.shape[2])
    return out.index_copy(0, mine, grouped_product(value[mine], weights, sizes, kind))


def dispatch(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form with rows split on one axis: rows travel to the places or experts that need them, results back."""
    if call.operator.kind in LOOK_UPS:
        return travelling_look_up, {"group": group}
    if call.operator.kind == EXPERTS:
        return travelling_layer(call, group)
    assert all(isinstance(value, Ref) or value is None for value in call.operator.attributes.values())
    return travelling_rows, {"group": group, "kind": call.operator.kind, "rows": call.inputs[0].shape[0]}


def travelling_look_up(self: Tensor, indices: Sequence[Tensor | None], group: AxisGroup) -> Tensor:
    """`whole[indices]` for this rank's part of the indices, where every rank holds a part of the rows."""
    (index,) = (value for value in indices if value is not None)
    own = self.shape[0]
    asked = all_gather(index, 0, 1, group)
    asked = torch.where(asked < 0, asked + own * group.size, asked).view(group.size, -1)
    holder = asked // own
    outgoing = (holder == group.coordinate).sum(1).tolist()
    incoming = torch.bincount(holder[group.coordinate], minlength=group.size).tolist()
    wanted = asked[holder == group.coordinate] - group.coordinate * own
    received = exchange_rows(self[wanted], outgoing, incoming, group)
    return received[torch.argsort(torch.argsort(holder[group.coordinate], stable=True))]


def travelling_rows(rows: int, group: AxisGroup, kind: str, **arguments: Any) -> Tensor:
    """The product of this rank's rows, each from its expert's rank (dispatch, combine: GShard, arXiv:2006.16668)."""
    value, weights, offsets = (argument for argument in arguments.values() if isinstance(argument, Tensor))
    ends: list[int] = [0, *offsets.tolist()]
    experts, own = int(weights.shape[0]), int(value.shape[0])
    bounds = [ends[rank * experts] for rank in range(group.size + 1)]

    def common(holder: int, expert_rank: int) -> int:
        low, high = max(holder * own, bounds[expert_rank]), min((holder + 1) * own, bounds[expert_rank + 1])
        return max(high - low, 0)

    me = group.coordinate
    outgoing = [common(me, rank) for rank in range(group.size)]
    incoming = [common(rank, me) for rank in range(group.size)]
    placed = sum(outgoing)
    received = exchange_rows(value[:placed], outgoing, incoming, group)
    sizes = [ends[me * experts + e + 1] - bounds[me] for e in range(experts)]
    made = grouped_product(received, weights, sizes, kind)
    back = exchange_rows(made, incoming, outgoing, group)
    return torch.cat([back, value.new_zeros(own - placed, weights.shape[2])]) if placed < own else back


register("dispatch", talks=dispatch)
register("transformers.grouped_mm_fallback.default aten._grouped_mm.default", knows=shard_experts, local=local_experts)
