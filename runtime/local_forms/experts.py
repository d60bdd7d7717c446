"""Layers of experts on one rank: with all experts, with some, or with rows that travel to them.

Every form sorts its rows by expert, runs the experts' network on all of them at once, and restores
the order of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.phases import Phases, in_phases
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import Sent, all_gather, parcels_arrive, parcels_leave
from autopar.runtime.ranks.cuts import Cut, shard_of
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.rules.experts import EXPERTS

Network = Sequence[tuple[str, Sequence[tuple[str, Any]], Sequence[Any]]]
"""Calls in order: kind, arguments by name, results; a text like `%w0` or `%3` names a value."""


class _Placed(torch.autograd.Function):
    """Rows at their places among zeros.

    Torch's own operators would keep the rows for the backward pass, which needs their places alone.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


def _placed(rows: Tensor, places: Tensor, count: int) -> Tensor:
    out: Tensor = _Placed.apply(rows, places, count)  # type: ignore[no-untyped-call]
    return out


def run_network(
    network: Network, rows: Tensor, operands: Sequence[Tensor], ends: Tensor, experts: Tensor
) -> Tensor:
    """The experts' network on rows sorted by expert: those of expert e end before row `ends[e]`.

    Rows behind the last end have no expert.
    """
    held = operands[0].shape[0]
    values: dict[str, Tensor] = {
        "%rows": rows,
        "%ends": ends,
        # Rows without an expert read the biases of the last one; their results are dropped below.
        "%experts": experts.clamp(max=held - 1),
    }
    values |= {f"%w{i}": operand for i, operand in enumerate(operands)}
    count = 0
    last = rows
    for kind, arguments, results in network:
        function = function_of(kind)
        inputs: dict[str, Any] = {
            name: values[value] if isinstance(value, str) and value in values else value
            for name, value in arguments
        }
        outputs = function(**arguments_of(function, inputs, (rows,), rows.device))
        for value in outputs if len(results) > 1 else (outputs,):
            values[f"%{count}"] = last = value
            count += 1
    # Grouped products leave zeros in rows without an expert; a bias would fill them.
    biased = any(value == "%experts" for _, arguments, _ in network for _, value in arguments)
    return torch.where((experts < held)[:, None], last, 0.0) if biased else last


def grouped(
    rows: Tensor,
    choice: Tensor,
    operands: Sequence[Tensor],
    network: Network,
    scores: Tensor | None = None,
    *,
    all_held: bool,
) -> Tensor:
    """The results of rows j, of token j // k each, with the experts `choice` [rows].

    A choice is below the number of held experts, or equal to it for an expert that is not held.
    all_held: only rows without any expert have that number. With the rows' `scores` the results
    are those of tokens.
    """
    experts = operands[0].shape[0]
    # Stable, so that rows of one expert keep their order and sums their rounding.
    order = torch.argsort(choice, stable=True)
    ranked = choice[order]
    numbers = torch.arange(experts, device=choice.device)
    ends = torch.searchsorted(ranked, numbers, right=True).to(torch.int32)
    # Reading `ends` waits for the device, so it is done only where rows of other ranks are many.
    if not all_held:
        order = order[: int(ends[-1])]
    per_token = choice.shape[0] // max(rows.shape[0], 1)
    results = run_network(network, rows[order // per_token], operands, ends, choice[order])
    if scores is not None:
        results = results * scores[order, None]
    placed = _placed(results, order, choice.shape[0])
    return placed if scores is None else _added(placed, rows.shape[0])


def _added(rows: Tensor, tokens: int) -> Tensor:
    """The sum of each token's rows, which stand together."""
    return rows.view(tokens, -1, rows.shape[1]).sum(1)


def experts(
    rows: Tensor,
    operands: Sequence[Tensor],
    network: Network,
    chosen: Tensor | None = None,
    ends: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """A layer of experts on one device.

    The rows are tokens with their experts `chosen`, or they are sorted by expert to `ends`.
    """
    if chosen is not None:
        choice = chosen.clamp(max=operands[0].shape[0])
        return grouped(rows, choice, operands, network, scores, all_held=True)
    assert ends is not None
    numbers = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    return run_network(network, rows, operands, ends, numbers)


def _numbers(
    rows: Tensor, count: int, cuts: Cuts, chosen: Tensor | None, ends: Tensor | None
) -> Tensor:
    """The expert of each row of this rank.

    Where the rows are sorted, this rank has some of all `count`, and their places give the expert.
    """
    if chosen is not None:
        return chosen
    assert ends is not None
    places = shard_of(torch.arange(count, device=rows.device), [Cut(*cut) for cut in cuts])
    return torch.searchsorted(ends.contiguous(), places.contiguous(), right=True)


def own_experts(
    rows: Tensor,
    operands: Sequence[Tensor],
    network: Network,
    count: int,
    row_cuts: Cuts,
    total: int,
    expert_cuts: Cuts,
    chosen: Tensor | None = None,
    ends: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """The results of this rank's rows and experts.

    Rows of other experts are zero, so that the ranks' results add up.
    """
    # The numbers are of the whole layer: of its experts and of its rows.
    numbers = _numbers(rows, count, row_cuts, chosen, ends)
    held = shard_of(torch.arange(total, device=rows.device), [Cut(*cut) for cut in expert_cuts])
    # From the number of an expert to its place on this rank; one more for rows without any expert.
    places = torch.full((total + 1,), held.shape[0], device=rows.device)
    places[held] = torch.arange(held.shape[0], device=rows.device)
    choice = places[numbers.clamp(max=total)]
    return grouped(rows, choice, operands, network, scores, all_held=not expert_cuts)


class _Way(NamedTuple):
    """The way of rows to their experts and back.

    `choice`: the expert of each row that comes. `order`: the places of the results among the
    `places` of rows of `tokens`.
    """

    sent: Sent
    choice: Tensor
    order: Tensor
    places: int
    tokens: int


def leave(
    rows: Tensor,
    held: int,
    count: int,
    row_cuts: Cuts,
    group: AxisGroup,
    chosen: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, _Way]:
    """Let this rank's rows set off, each to the rank of its expert, one of the `held` there."""
    total = held * group.size
    numbers = _numbers(rows, count, row_cuts, chosen, ends).clamp(max=total)
    order = torch.argsort(numbers, stable=True)
    reach = torch.searchsorted(numbers[order], torch.arange(total + 1, device=rows.device))
    # How many rows each rank has for each expert: all ranks must know what arrives before it is
    # sent.
    table = all_gather(reach.diff()[None], 0, 1, group).view(group.size, group.size, held)
    me = group.coordinate
    # This waits for the device, since an all-to-all takes its sizes from the host.
    counts = table.tolist()
    # Rows without an expert stay here: their results are zeros.
    outgoing = [sum(counts[me][rank]) for rank in range(group.size)]
    incoming = [sum(counts[rank][me]) for rank in range(group.size)]
    order = order[: sum(outgoing)]
    per_token = numbers.shape[0] // max(rows.shape[0], 1)
    tag, sent = parcels_leave((rows[order // per_token],), outgoing, incoming, group)
    # The rows of each sender arrive sorted by expert.
    arrivals = torch.arange(held, device=rows.device).repeat(group.size)
    choice = arrivals.repeat_interleave(table[:, me].flatten(), output_size=sum(incoming))
    return tag, _Way(sent, choice, order, numbers.shape[0], rows.shape[0])


def work(
    tag: Tensor, way: _Way, operands: Sequence[Tensor], network: Network
) -> tuple[Tensor, _Way]:
    """Compute the rows that have come; the results set off."""
    there = way.sent.way
    (rows,) = parcels_arrive(tag, way.sent)
    results = grouped(rows, way.choice, operands, network, all_held=True)
    tag, sent = parcels_leave((results,), there.incoming, there.outgoing, there.group)
    return tag, way._replace(sent=sent)


def arrive(tag: Tensor, way: _Way, scores: Tensor | None = None) -> Tensor:
    """The results of this rank's rows, or with scores those of its tokens."""
    (results,) = parcels_arrive(tag, way.sent)
    if scores is not None:
        results = results * scores[way.order, None]
    placed = _placed(results, way.order, way.places)
    return placed if scores is None else _added(placed, way.tokens)


TRAVELLING = Phases(leave, work, arrive)
"""Results of this rank's rows, each computed on its expert's rank.

This is the dispatch and combine of GShard (arXiv:2006.16668).
"""


def travelling(**arguments: Any) -> Tensor:
    """The phases of `TRAVELLING` as one operator."""
    return TRAVELLING(**arguments)


def shard_layer(call: LocalCall) -> Mapping[str, Value] | None:
    """The places of a rank's rows and experts; None if the layer's ordinary form is right."""
    row_cuts = _cuts(call, 0)
    expert_cuts = _cuts(call, 2)
    if not expert_cuts and (not row_cuts or "chosen" in call.operator.attributes):
        return None
    return {
        "count": call.inputs[0].shape[0],
        "row_cuts": row_cuts,
        "total": call.inputs[2].shape[0],
        "expert_cuts": expert_cuts,
    }


def travelling_layer(
    call: LocalCall, group: AxisGroup
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """The local form in which rows travel on one axis, and its arguments."""
    return travelling, {
        "group": group,
        "held": call.local_input(2)[0],
        "count": call.inputs[0].shape[0],
        "row_cuts": _cuts(call, 0),
    }


def _cuts(call: LocalCall, index: int) -> tuple[tuple[int, ...], ...]:
    """The cuts of an input's first dim on this rank."""
    return tuple(tuple(cut) for cut in call.cuts(call.decision.inputs[index]) if cut.dim == 0)


in_phases(travelling, TRAVELLING)
register(EXPERTS, function=experts, knows=shard_layer, local=own_experts)
