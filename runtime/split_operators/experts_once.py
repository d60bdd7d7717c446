"""Layers of experts whose tokens travel once to every place that has experts of them.

The axes of the experts are taken in turn, from the outermost in: a token's row goes once to every
node that wants it, and from there once to every rank of the node. On the way back each rank, and
then each node, adds up what it has made of the row, so that it returns as one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime.local_forms.experts import Network, run_network
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.phases import Phases, in_phases
from autopar.runtime.operators.registry import Local, register
from autopar.runtime.ranks.collectives import Sent, all_gather, parcels_arrive, parcels_leave
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.notation import ONCE


class _Summed(torch.autograd.Function):
    """Sums of the rows of each token; the rows come in blocks with each token at most once.

    Half precision is summed in single. Block by block, so that the order is always the same.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, tokens: Tensor, blocks: Sequence[int], count: int
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = torch.zeros(count, rows.shape[1], dtype=wide, device=rows.device)
        starts = itertools.accumulate(blocks, initial=0)
        for start, size in zip(starts, blocks, strict=False):
            sums.index_add_(0, tokens[start : start + size], rows[start : start + size].to(wide))
        return sums.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradients[0].index_select(0, tokens), None, None, None


def _summed(rows: Tensor, tokens: Tensor, blocks: Sequence[int], count: int) -> Tensor:
    out: Tensor = _Summed.apply(rows, tokens, list(blocks), count)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    """An exchange of rows along an axis.

    `tokens`: of each sent row, among `count`. `outgoing`, `incoming`: rows to and from each place.
    """

    group: AxisGroup
    tokens: Tensor
    count: int
    outgoing: Sequence[int]
    incoming: Sequence[int]

    def sent(self, *values: Tensor) -> tuple[Tensor, Sent]:
        """Rows of the values of all tokens, which set off."""
        values = tuple(value[self.tokens] for value in values)
        return parcels_leave(values, self.outgoing, self.incoming, self.group)

    def returned(self, sums: Tensor) -> tuple[Tensor, Sent]:
        """The sums of this place, which set off home."""
        return parcels_leave((sums,), self.incoming, self.outgoing, self.group)

    def back(self, tag: Tensor, sent: Sent) -> Tensor:
        """The sums of all places, added up by token."""
        (rows,) = parcels_arrive(tag, sent)
        return _summed(rows, self.tokens, self.outgoing, self.count)


def _hop(places: Tensor, group: AxisGroup) -> _Hop:
    """The exchange that brings every row once to each of its `places` [rows, k].

    Places from the number of ranks on are none.
    """
    count = places.shape[0]
    wanted = torch.zeros(count, group.size + 1, dtype=torch.bool, device=places.device)
    wanted = wanted.scatter_(1, places.clamp(max=group.size), True)[:, : group.size]
    # All ranks must know what arrives before it is sent.
    table = all_gather(wanted.sum(0)[None], 0, 1, group).view(group.size, group.size).tolist()
    return _Hop(
        group=group,
        tokens=wanted.T.nonzero()[:, 1],
        count=count,
        outgoing=table[group.coordinate],
        incoming=[row[group.coordinate] for row in table],
    )


class _Way(NamedTuple):
    """The way of rows along the outermost axis and back; `inside`: the experts of a place there."""

    hop: _Hop
    sent: Sent
    inside: int


def leave(
    rows: Tensor, held: int, scores: Tensor, chosen: Tensor, groups: Sequence[AxisGroup]
) -> tuple[Tensor, _Way]:
    """Let this rank's tokens set off along the outermost axis; a rank has `held` experts."""
    inside = held
    for group in groups:
        inside *= group.size
    choice = chosen.view(rows.shape[0], -1).clamp(max=inside)
    weights = scores.view(rows.shape[0], -1)
    inside //= groups[0].size
    hop = _hop(choice // inside, groups[0])
    tag, sent = hop.sent(rows, weights, choice.to(torch.int32))
    return tag, _Way(hop, sent, inside)


def work(
    tag: Tensor,
    way: _Way,
    operands: Sequence[Tensor],
    network: Network,
    groups: Sequence[AxisGroup],
) -> tuple[Tensor, _Way]:
    """Bring the rows along the other axes, compute, and let the sums set off home."""
    inside = way.inside
    hops = []
    rows, weights, choice = _come(tag, way.sent, inside)
    for group in groups[1:]:
        inside //= group.size
        hop = _hop(choice // inside, group)
        hops.append(hop)
        rows, weights, choice = _come(*hop.sent(rows, weights, choice.to(torch.int32)), inside)
    sums = _weighed(rows, choice, weights, operands, network)
    for hop in reversed(hops):
        sums = hop.back(*hop.returned(sums))
    tag, sent = way.hop.returned(sums)
    return tag, way._replace(sent=sent)


def _come(tag: Tensor, sent: Sent, inside: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that have come, their weights, and the numbers of their experts at this place."""
    rows, weights, numbers = parcels_arrive(tag, sent)
    # Numbers of experts among those of this place; elsewhere, `inside`.
    own = numbers.long() - sent.way.group.coordinate * inside
    return rows, weights, torch.where((own >= 0) & (own < inside), own, inside)


def arrive(tag: Tensor, way: _Way) -> Tensor:
    """Sums of the weighed results of this rank's tokens."""
    return way.hop.back(tag, way.sent)


TRAVELLING_ONCE = Phases(leave, work, arrive)
"""Sums of the weighed results of this rank's tokens, from the ranks of their experts."""


def once(**arguments: Any) -> Tensor:
    """The phases of `TRAVELLING_ONCE` as one operator."""
    return TRAVELLING_ONCE(**arguments)


def _weighed(
    rows: Tensor, choice: Tensor, weights: Tensor, operands: Sequence[Tensor], network: Network
) -> Tensor:
    """Each row's sum of weighed results of its experts that are held here."""
    held = int(operands[0].shape[0])
    flat = choice.flatten()
    order = torch.argsort(flat, stable=True)
    numbers = torch.arange(held, device=flat.device)
    ends = torch.searchsorted(flat[order], numbers, right=True).to(torch.int32)
    bounds = [0, *ends.tolist()]
    order = order[: bounds[-1]]
    of_row = order // choice.shape[1]
    results = run_network(network, rows[of_row], operands, ends, flat[order])
    blocks = [end - start for start, end in itertools.pairwise(bounds)]
    return _summed(results * weights.flatten()[order, None], of_row, blocks, rows.shape[0])


def travelling_once(call: LocalCall, *groups: AxisGroup) -> Local:
    """The local form in which rows travel along each axis in turn, and its arguments."""
    return once, {"groups": tuple(groups), "held": call.local_input(2)[0]}


in_phases(once, TRAVELLING_ONCE)
register(ONCE, talks=travelling_once)
