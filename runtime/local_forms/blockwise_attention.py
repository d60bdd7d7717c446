"""Attention with dropout on its weights, a block of queries at a time, forward and backward.

    o = c (m exp(s - l)) v,   l = log sum exp(s),   s = scale q k' + mask,   c = 1 / (1 - rate)
    ds = p (c m do v' - sum(do o)),   p = exp(s - l),   dv = c (m p)' do

`m` marks the weights that stay; it is drawn by counter, block by block, and drawn again in the
backward pass. So the scores are never in memory as a whole, and only the inputs, the output and `l`
are saved (the method of FlashAttention-2, arXiv:2307.08691). Half precision is computed in single.
Heads of queries share heads of keys in equal groups: the dims are batch, groups, heads of a group,
rows, width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.random_numbers.distributions import Source
from autopar.torch_operators.attention_blocks import finite

SCORES_AT_ONCE = 2**19
"""The most scores of a block on a CPU (or one row of a group); three or four such are in memory."""
_AT_ONCE_ELSEWHERE = 2**26
# Few enough rows that most hidden scores of causal attention are not computed.
_ROWS_OF_CAUSAL = 256


@dataclass(frozen=True, slots=True)
class Dropping:
    """The dropout of an attention, with the scale of the scores and whether they are causal.

    The source's dims are [*batch, heads, queries, keys], or those without heads.
    """

    source: Source
    rate: float
    scale: float
    causal: bool

    def stays(self, block: Block, shape: tuple[int, ...]) -> Tensor:
        """The part of `m` for a block of scores of this shape."""
        region = self.source.region
        heads = shape[2]
        lead = len(region.ranges) - 3
        # Several batch dims were flattened to one: the block's number is taken apart again.
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
        """Whether a block holds at most one batch element, because there are several batch dims."""
        return len(self.source.region.ranges) > 4


class Block(NamedTuple):
    """Queries that are worked on together, and how many keys they see at most."""

    batch: slice
    groups: slice
    rows: slice
    columns: int


def _blocks(query: Tensor, keys: int, dropping: Dropping) -> Iterator[Block]:
    """Blocks of queries whose scores stay below the limit: rows first, then groups, then batch."""
    batch, groups, heads, rows, _ = query.shape
    most = SCORES_AT_ONCE if query.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    high = min(rows, max(1, most // (heads * keys)))
    if dropping.causal:
        high = min(high, _ROWS_OF_CAUSAL)
    # A block has several groups only with all their rows, several samples only with all groups.
    wide = 1
    if high == rows:
        wide = min(groups, max(1, most // (heads * keys * rows)))
    deep = 1
    if wide == groups and not dropping.one_batch:
        deep = min(batch, max(1, most // (heads * keys * rows * groups)))
    starts = itertools.product(range(0, batch, deep), range(0, groups, wide), range(0, rows, high))
    for n, g, q in starts:
        stop = min(q + high, rows)
        columns = min(stop, keys) if dropping.causal else keys
        samples = slice(n, min(n + deep, batch))
        yield Block(samples, slice(g, min(g + wide, groups)), slice(q, stop), columns)


def _wide(x: Tensor) -> Tensor:
    """The values in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_queries(x: Tensor, block: Block) -> Tensor:
    """The queries of a block as [batch, groups, heads * rows, width], in single precision."""
    return _wide(x[block.batch, block.groups, :, block.rows]).flatten(2, 3)


def _of_keys(x: Tensor, block: Block) -> Tensor:
    """The keys or values that a block sees, in single precision at least."""
    return _wide(x[block.batch, block.groups, : block.columns])


def _of_mask(mask: Tensor, block: Block) -> Tensor:
    """The mask of a block; dims of size 1 serve all of it."""
    wanted = (block.batch, block.groups, slice(None), block.rows, slice(block.columns))
    parts = zip(mask.shape, wanted, strict=True)
    return mask[tuple(slice(None) if size == 1 else part for size, part in parts)]


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, block: Block, dropping: Dropping, heads: int
) -> Tensor:
    """Scores [batch, groups, heads, rows, columns], minus infinity where a key is hidden."""
    scores = ((query * dropping.scale) @ key.mT).view(*query.shape[:2], heads, -1, key.shape[-2])
    if mask is not None:
        part = _of_mask(mask, block)
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -torch.inf)
        else:
            scores.add_(part)
    if dropping.causal:
        rows = torch.arange(block.rows.start, block.rows.stop, device=scores.device)
        columns = torch.arange(block.columns, device=scores.device)
        scores.masked_fill_(columns > rows[:, None], -torch.inf)
    return scores


class _Attention(torch.autograd.Function):
    """Attention over queries of five dims, and keys and values of four."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropping: Dropping
    ) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        normal = query.new_empty((*query.shape[:-1], 1), dtype=_wide(query[:0]).dtype)
        for block in _blocks(query, key.shape[-2], dropping):
            queries = _of_queries(query, block)
            keys = _of_keys(key, block)
            scores = _scores(queries, keys, mask, block, dropping, query.shape[2])
            sums = scores.logsumexp(-1, keepdim=True)
            stays = dropping.stays(block, tuple(scores.shape))
            # In place: the scores become the weights, and one block of memory serves both.
            weights = scores.sub_(finite(sums)).exp_().mul_(stays)
            rows = (weights.flatten(2, 3) @ _of_keys(value, block)).mul_(1 / (1 - dropping.rate))
            out[block.batch, block.groups, :, block.rows] = rows.view(*weights.shape[:-1], -1)
            normal[block.batch, block.groups, :, block.rows] = sums
        # The scores are computed again from these; the mask is drawn again.
        ctx.save_for_backward(query, key, value, mask, out, normal)
        ctx.dropping = dropping
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, normal = ctx.saved_tensors
        dropping: Dropping = ctx.dropping
        d_query = torch.empty_like(query)
        # Keys get addends from every block: they are summed in single precision.
        d_key, d_value = (torch.zeros_like(x, dtype=normal.dtype) for x in (key, value))
        d_mask = torch.zeros_like(mask, dtype=normal.dtype) if ctx.needs_input_grad[3] else None
        for block in _blocks(query, key.shape[-2], dropping):
            own, ahead, result = (_of_queries(x, block) for x in (query, gradients[0], out))
            keys = _of_keys(key, block)
            values = _of_keys(value, block)
            weights = _scores(own, keys, mask, block, dropping, query.shape[2])
            weights = weights.sub_(finite(normal[block.batch, block.groups, :, block.rows])).exp_()
            stays = dropping.stays(block, tuple(weights.shape))
            factor = 1 / (1 - dropping.rate)
            d_values = ((weights * stays).flatten(2, 3).mT @ ahead).mul_(factor)
            d_value[block.batch, block.groups, : block.columns] += d_values
            d_scores = (ahead @ values.mT).view(weights.shape).mul_(stays).mul_(factor)
            row_sums = (ahead * result).sum(-1).view(*weights.shape[:-1], 1)
            d_scores = d_scores.sub_(row_sums).mul_(weights)
            if d_mask is not None:
                part = _of_mask(d_mask, block)
                part += d_scores.sum_to_size(part.shape)
            flat = d_scores.flatten(2, 3).mul_(dropping.scale)
            d_rows = (flat @ keys).view(*weights.shape[:-1], -1)
            d_query[block.batch, block.groups, :, block.rows] = d_rows
            d_key[block.batch, block.groups, : block.columns] += flat.mT @ own
        return (
            d_query,
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            None if d_mask is None else d_mask.to(mask.dtype),
            None,
        )


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropping: Dropping
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, with weights dropped by counter."""
    shape = dropping.source.region.shape
    batch = shape[:-3]
    rows = shape[-2]
    keys = shape[-1]
    heads = shape[-3] if len(shape) > 2 else 1
    shared = max(x.shape[-3] if x.dim() > 2 else 1 for x in (key, value))
    query = query.expand(*batch, heads, rows, query.shape[-1])
    query = query.reshape(-1, shared, heads // shared, rows, query.shape[-1])
    key, value = (
        x.expand(*batch, shared, keys, x.shape[-1]).reshape(-1, shared, keys, x.shape[-1])
        for x in (key, value)
    )
    if mask is not None:
        mask = _five_dims(mask, batch, shared)
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, dropping
    )
    return out.reshape(*shape[:-1], out.shape[-1])


def _five_dims(mask: Tensor, batch: tuple[int, ...], shared: int) -> Tensor:
    """A mask in the dims of the scores; missing dims become 1."""
    mask = mask[(None,) * max(0, len(batch) + 3 - mask.dim())]
    if len(batch) > 1:
        mask = mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    mask = mask.reshape(-1, *mask.shape[-3:]) if not batch else mask
    heads = (shared, mask.shape[1] // shared) if mask.shape[1] > 1 else (1, 1)
    return mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
