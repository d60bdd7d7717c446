"""Attention with dropout on its weights, a block of queries at a time, forward and backward.

    o = c (m exp(s - l)) v,   l = log sum exp(s),   s = scale q k' + mask,   c = 1 / (1 - rate)
    ds = p (c m do v' - sum(do o)),   p = exp(s - l),   dv = c (m p)' do

`m` marks the kept weights; it is drawn by counter, block by block, and drawn again in the backward pass. So the scores
are never in memory as a whole, and only the inputs, the output and `l` are kept (the method of FlashAttention-2,
arXiv:2307.08691). Half precision is computed in single. Heads of queries share heads of keys in equal groups: the dims
are batch, groups, heads of a group, rows, width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..random_numbers import Source
from ..split_operators.blocks import finite

SCORES_AT_ONCE = 2**19
"""The most scores in memory at once on a CPU, for each of the three or four needed (at least one row of a group)."""
_AT_ONCE_ELSEWHERE = 2**26
_ROWS_OF_CAUSAL = 256  # few enough that most hidden scores are not computed


@dataclass(frozen=True, slots=True)
class Dropping:
    """The random source of scores [*batch, heads, queries, keys] (or without heads), rate, scale and causality."""

    source: Source
    rate: float
    scale: float
    causal: bool

    def stays(self, block: Block, shape: tuple[int, ...]) -> Tensor:
        """The part of `m` for a block of scores of this shape."""
        region, heads = self.source.region, shape[2]
        lead = len(region.ranges) - 3
        if lead == 1:
            region = region.narrow(0, block.batch.start, block.batch.stop)
        else:
            number = block.batch.start
            for dim in reversed(range(max(lead, 0))):
                number, at = divmod(number, len(region.ranges[dim]))
                region = region.narrow(dim, at, at + 1)
        if lead >= 0:
            region = region.narrow(-3, block.groups.start * heads, block.groups.stop * heads)
        region = region.narrow(-2, block.rows.start, block.rows.stop).narrow(-1, 0, block.columns)
        return replace(self.source, region=region).chosen(1 - self.rate).view(shape)

    @property
    def one_batch(self) -> bool:
        """Whether a block holds at most one batch element, as there are several batch dims."""
        return len(self.source.region.ranges) > 4


class Block(NamedTuple):
    """Queries that are worked on together, and how many keys they see at most."""

    batch: slice
    groups: slice
    rows: slice
    columns: int


def _blocks(query: Tensor, keys: int, dropping: Dropping) -> Iterator[Block]:
    batch, groups, heads, rows, _ = query.shape
    most = SCORES_AT_ONCE if query.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    high = min(rows, _ROWS_OF_CAUSAL if dropping.causal else rows, max(1, most // (heads * keys)))
    wide = min(groups, max(1, most // (heads * keys * rows))) if high == rows else 1
    deep = min(batch, max(1, most // (heads * keys * rows * groups))) if wide == groups and not dropping.one_batch else 1
    starts = itertools.product(range(0, batch, deep), range(0, groups, wide), range(0, rows, high))
    for n, g, q in starts:
        stop = min(q + high, rows)
        columns = min(stop, keys) if dropping.causal else keys
        yield Block(slice(n, min(n + deep, batch)), slice(g, min(g + wide, groups)), slice(q, stop), columns)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_queries(x: Tensor, block: Block) -> Tensor:
    """[batch, groups, heads * rows, width], in single precision at least."""
    return _wide(x[block.batch, block.groups, :, block.rows]).flatten(2, 3)


def _of_keys(x: Tensor, block: Block) -> Tensor:
    return _wide(x[block.batch, block.groups, : block.columns])


def _of_mask(mask: Tensor, block: Block) -> Tensor:
    """The mask of a block; dims of size 1 serve all."""
    wanted = (block.batch, block.groups, slice(None), block.rows, slice(block.columns))
    return mask[tuple(slice(None) if size == 1 else part for size, part in zip(mask.shape, wanted, strict=True))]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, block: Block, dropping: Dropping, heads: int) -> Tensor:
    """[batch, groups, heads, rows, columns], minus infinity where a query does not see."""
    scores = ((query * dropping.scale) @ key.mT).view(*query.shape[:2], heads, -1, key.shape[-2])
    if mask is not None:
        part = _of_mask(mask, block)
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -torch.inf)
        else:
            scores.add_(part)
    if dropping.causal:
        rows = torch.arange(block.rows.start, block.rows.stop, device=scores.device)
        scores.masked_fill_(torch.arange(block.columns, device=scores.device) > rows[:, None], -torch.inf)
    return scores


class _Attention(torch.autograd.Function):
    """The inputs in their five (keys and values: four) dims."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropping: Dropping) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        normal = query.new_empty((*query.shape[:-1], 1), dtype=_wide(query[:0]).dtype)
        for block in _blocks(query, key.shape[-2], dropping):
            scores = _scores(_of_queries(query, block), _of_keys(key, block), mask, block, dropping, query.shape[2])
            sums = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(finite(sums)).exp_().mul_(dropping.stays(block, tuple(scores.shape)))
            made = (weights.flatten(2, 3) @ _of_keys(value, block)).mul_(1 / (1 - dropping.rate))
            out[block.batch, block.groups, :, block.rows] = made.view(*weights.shape[:-1], -1)
            normal[block.batch, block.groups, :, block.rows] = sums
        ctx.save_for_backward(query, key, value, mask, out, normal)
        ctx.dropping = dropping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, normal = ctx.saved_tensors
        dropping: Dropping = ctx.dropping
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(x, dtype=normal.dtype) for x in (key, value))
        d_mask = torch.zeros_like(mask, dtype=normal.dtype) if ctx.needs_input_grad[3] else None
        for block in _blocks(query, key.shape[-2], dropping):
            own, ahead, made = (_of_queries(x, block) for x in (query, gradients[0], out))
            keys, values = _of_keys(key, block), _of_keys(value, block)
            weights = _scores(own, keys, mask, block, dropping, query.shape[2])
            weights = weights.sub_(finite(normal[block.batch, block.groups, :, block.rows])).exp_()
            stays = dropping.stays(block, tuple(weights.shape))
            factor = 1 / (1 - dropping.rate)
            d_value[block.batch, block.groups, : block.columns] += ((weights * stays).flatten(2, 3).mT @ ahead).mul_(factor)
            d_scores = (ahead @ values.mT).view(weights.shape).mul_(stays).mul_(factor)
            d_scores = d_scores.sub_((ahead * made).sum(-1).view(*weights.shape[:-1], 1)).mul_(weights)
            if d_mask is not None:
                part = _of_mask(d_mask, block)
                part += d_scores.sum_to_size(part.shape)
            flat = d_scores.flatten(2, 3).mul_(dropping.scale)
            d_query[block.batch, block.groups, :, block.rows] = (flat @ keys).view(*weights.shape[:-1], -1)
            d_key[block.batch, block.groups, : block.columns] += flat.mT @ own
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None if d_mask is None else d_mask.to(mask.dtype), None


def dropped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropping: Dropping) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, with a mask on the weights that is drawn by counter."""
    shape = dropping.source.region.shape
    batch, rows, keys = shape[:-3], shape[-2], shape[-1]
    heads = shape[-3] if len(shape) > 2 else 1
    shared = max(x.shape[-3] if x.dim() > 2 else 1 for x in (key, value))
    query = query.expand(*batch, heads, rows, query.shape[-1]).reshape(-1, shared, heads // shared, rows, query.shape[-1])
    key, value = (x.expand(*batch, shared, keys, x.shape[-1]).reshape(-1, shared, keys, x.shape[-1]) for x in (key, value))
    if mask is not None:
        mask = _five_dims(mask, batch, shared)
    out: Tensor = _Attention.apply(query, key, value, mask, dropping)  # type: ignore[no-untyped-call]
    return out.reshape(*shape[:-1], out.shape[-1])


def _five_dims(mask: Tensor, batch: tuple[int, ...], shared: int) -> Tensor:
    """A mask in the dims of the scores; missing dims become 1."""
    mask = mask[(None,) * max(0, len(batch) + 3 - mask.dim())]
    if len(batch) > 1:
        mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    mask = mask.reshape(-1, *mask.shape[-3:]) if not batch else mask
    heads = (shared, mask.shape[1] // shared) if mask.shape[1] > 1 else (1, 1)
    return mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
