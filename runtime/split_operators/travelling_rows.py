"""Split rows that travel between ranks: look-ups of rows, and products of rows sorted by expert.

Row i belongs to expert e where ends[e-1] <= i < ends[e]; rows at and beyond ends[-1] belong to none
and give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.ir import Ref, Value
from autopar.runtime.local_forms.experts import travelling_layer
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import all_gather, exchange_rows
from autopar.runtime.ranks.cuts import Cut, shard_of
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.communication import LOOK_UPS
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.rules.gather_scatter import FILL_IN


def grouped_product(rows: Tensor, weights: Tensor, ends: Sequence[int], kind: str) -> Tensor:
    """The product of [rows, k] by [experts, k, n] by the operator itself: [rows, n].

    All rows belong to one of the experts.
    """
    offsets = torch.tensor(ends, dtype=torch.int32, device=rows.device)
    function = function_of(kind)
    if kind.startswith("aten."):
        out: Tensor = function(self=rows, mat2=weights, offs=offsets)
    else:
        out = function(input=rows, weight=weights, offs=offsets)
    return out


def shard_experts(call: LocalCall) -> Mapping[str, Value] | None:
    """The places of a rank's rows and experts; None if it has all of both."""
    rows = call.decision.inputs[0]
    weights = call.decision.inputs[1]
    own_rows = [cut for cut in call.cuts(rows) if cut.dim == 0]
    own_experts = [cut for cut in call.cuts(weights) if cut.dim == 0]
    # Other shapes of the operator group columns or sums; they are never split by expert.
    by_rows = len(call.inputs[0].shape) == 2 and len(call.inputs[1].shape) == 3
    if not by_rows or not (own_rows or own_experts):
        return None
    return {
        "kind": call.operator.kind,
        "row_cuts": tuple(tuple(cut) for cut in own_rows),
        "expert_cuts": tuple(tuple(cut) for cut in own_experts),
        "rows": call.inputs[0].shape[0],
    }


def local_experts(
    rows: int,
    row_cuts: Sequence[Sequence[int]],
    expert_cuts: Sequence[Sequence[int]],
    kind: str,
    **arguments: Any,
) -> Tensor:
    """The product for this rank's rows and experts.

    Rows of other experts are zero, so that the ranks' results add up.
    """
    value, weights, offsets = (
        argument for argument in arguments.values() if isinstance(argument, Tensor)
    )
    # The ends of the experts among the rows that this rank has, which need not be contiguous.
    own_rows = shard_of(torch.arange(rows), [Cut(*cut) for cut in row_cuts]).contiguous()
    ends = torch.searchsorted(own_rows, offsets.cpu().long())
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    experts = shard_of(torch.arange(len(ends)), [Cut(*cut) for cut in expert_cuts]).tolist()
    mine = torch.cat([torch.arange(int(starts[e]), int(ends[e])) for e in experts]).to(value.device)
    sizes = torch.stack([ends[e] - starts[e] for e in experts]).cumsum(0).tolist()
    out: Tensor = value.new_zeros(value.shape[0], weights.shape[2])
    return out.index_copy(0, mine, grouped_product(value[mine], weights, sizes, kind))


def dispatch(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form with rows split on one axis.

    Rows travel to the places or experts that need them, and results travel back.
    """
    if call.operator.kind in LOOK_UPS:
        return travelling_look_up, {"group": group}
    if call.operator.kind == FILL_IN:
        return travelling_fill, {"group": group, "own": fills_its_own(call) is not None}
    if call.operator.kind == EXPERTS:
        return travelling_layer(call, group)
    attributes = call.operator.attributes.values()
    assert all(isinstance(value, Ref) or value is None for value in attributes)
    return travelling_rows, {
        "group": group,
        "kind": call.operator.kind,
        "rows": call.inputs[0].shape[0],
    }


def travelling_look_up(self: Tensor, indices: Sequence[Tensor | None], group: AxisGroup) -> Tensor:
    """The rows `whole[indices]` for this rank's indices, where each rank has a part of the rows."""
    (index,) = (value for value in indices if value is not None)
    own = self.shape[0]
    # Every rank sees what all ranks look up, so that no second message says how much is sent.
    places = all_gather(index, 0, 1, group)
    places = torch.where(places < 0, places + own * group.size, places).view(group.size, -1)
    holder = places // own
    outgoing = (holder == group.coordinate).sum(1).tolist()
    incoming = torch.bincount(holder[group.coordinate], minlength=group.size).tolist()
    wanted = places[holder == group.coordinate] - group.coordinate * own
    received = exchange_rows(self[wanted], outgoing, incoming, group)
    # Rows arrive by rank: the place of each look-up among them is the inverse of that order.
    return received[torch.argsort(torch.argsort(holder[group.coordinate], stable=True))]


def fills_its_own(call: LocalCall) -> Mapping[str, Value] | None:
    """Whether the places are those of a micro-batch, to which nothing travels (else None)."""
    split = any(o.partners and o.communication is None for o in call.decision.options)
    return {} if split else None


def own_fill(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """As `torch.masked_scatter`, of a micro-batch that has as many places as elements."""
    _require_as_many(int(mask.expand_as(self).sum()), source.numel())
    return self.masked_scatter(mask, source)


def _require_as_many(places: int, elements: int) -> None:
    if places != elements:
        raise RunError(
            f"a micro-batch has {places} places to fill and {elements} elements for them: every "
            "sample needs as many of its own (such as image tokens and features)"
        )


def travelling_fill(
    self: Tensor, mask: Tensor, source: Tensor, group: AxisGroup, own: bool
) -> Tensor:
    """As `torch.masked_scatter`, where each rank has a part of the places and of the elements.

    own: places and elements are those of a micro-batch.
    """
    places = mask.expand_as(self).sum().view(1)
    # Every rank knows how many places all ranks have, and so which elements belong to which.
    ends: list[int] = [0, *all_gather(places, 0, 1, group).cumsum(0).tolist()]
    held = source.numel()
    if own:
        _require_as_many(ends[-1], held * group.size)
    outgoing, incoming = _counts(held, ends, group)
    # The places take the first elements; those behind the last one stay.
    sent = source.reshape(-1)[: sum(outgoing)]
    return self.masked_scatter(mask, exchange_rows(sent, outgoing, incoming, group))


def _counts(held: int, bounds: Sequence[int], group: AxisGroup) -> tuple[list[int], list[int]]:
    """How many rows this rank sends to every rank, and how many it gets from each.

    Ranks hold `held` rows each, in order; rank r takes those from `bounds[r]` to `bounds[r + 1]`.
    """

    def common(holder: int, taker: int) -> int:
        low = max(holder * held, bounds[taker])
        high = min((holder + 1) * held, bounds[taker + 1])
        return max(high - low, 0)

    me = group.coordinate
    ranks = range(group.size)
    return [common(me, rank) for rank in ranks], [common(rank, me) for rank in ranks]


def travelling_rows(rows: int, group: AxisGroup, kind: str, **arguments: Any) -> Tensor:
    """The product of this rank's rows, each computed on its expert's rank.

    This is the dispatch and combine of GShard (arXiv:2006.16668).
    """
    value, weights, offsets = (
        argument for argument in arguments.values() if isinstance(argument, Tensor)
    )
    # Every rank has the ends of all experts, so none must tell another how much it sends.
    ends: list[int] = [0, *offsets.tolist()]
    experts = int(weights.shape[0])
    own = int(value.shape[0])
    bounds = [ends[rank * experts] for rank in range(group.size + 1)]
    outgoing, incoming = _counts(own, bounds, group)
    placed = sum(outgoing)
    received = exchange_rows(value[:placed], outgoing, incoming, group)
    first = group.coordinate * experts
    sizes = [ends[first + e + 1] - ends[first] for e in range(experts)]
    products = grouped_product(received, weights, sizes, kind)
    back = exchange_rows(products, incoming, outgoing, group)
    if placed == own:
        return back
    # Rows behind the last expert's end stayed here: they are zero.
    return torch.cat([back, value.new_zeros(own - placed, weights.shape[2])])


register("dispatch", talks=dispatch)
register(FILL_IN, knows=fills_its_own, local=own_fill)
register(
    "transformers.grouped_mm_fallback.default aten._grouped_mm.default",
    knows=shard_experts,
    local=local_experts,
)
