"""Attention of queries to one block of keys, its gradients, and the sums that join blocks.

    o = exp(s - l) v,   l = log sum exp(s),   s = scale q k' + mask
    ds = p (do v' - sum(do o)),   p = exp(s - l) with l over the keys of all blocks

Half precision is computed in single. Heads of queries share heads of keys in equal groups; a few
rows of queries are worked on at a time, so that the scores of a block never lie in memory as a
whole. Blocks that are seen whole, or by the causal diagonal, are left to torch's fused kernel where
there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**26
"""The most scores in memory at once (at least one row of queries)."""

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attended = tuple[Tensor, Tensor]
"""The attention to some keys, and the log of the sum of their exponentials: the last dim is 1."""


class Corner(NamedTuple):
    """The numbers of the first query and the first key in the whole sequences."""

    row: int
    column: int


def sees_all(causal: bool, place: Corner, columns: int) -> bool:
    """Whether every query of a block sees all its keys."""
    return not causal or place.row >= place.column + columns - 1


def _hidden(place: Corner, rows: int, columns: int, device: torch.device) -> Tensor:
    """The keys [rows, columns] that lie after their query."""
    queries = torch.arange(place.row, place.row + rows, device=device).unsqueeze(1)
    return torch.arange(place.column, place.column + columns, device=device) > queries


def _fold(x: Tensor, groups: int) -> Tensor:
    """Put rows that share a head of keys together.

    From [..., heads, rows, width] to [..., groups, heads / groups * rows, width].
    """
    return x.reshape(*x.shape[:-3], groups, x.shape[-3] // groups * x.shape[-2], x.shape[-1])


def _unfold(x: Tensor, heads: int) -> Tensor:
    """The reverse of `_fold`."""
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] * x.shape[-2] // heads, x.shape[-1])


def _wide(x: Tensor) -> Tensor:
    """The values in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(query: Tensor, columns: int) -> Iterator[slice]:
    """The queries, a few rows at a time, as many as the limit of scores allows."""
    total = query.shape[-2]
    scores_of_row = query.numel() // (total * query.shape[-1]) * columns
    each = max(1, SCORES_AT_ONCE // max(1, scores_of_row))
    return (slice(start, min(start + each, total)) for start in range(0, total, each))


def _mask_part(mask: Tensor, rows: slice, place: Corner, columns: int) -> Tensor:
    """The mask of these queries and this block; dims of size 1 serve all of it."""
    part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return part[..., place.column : place.column + columns] if mask.shape[-1] > 1 else part


def _scores(
    query: Tensor, key: Tensor, part: Tensor | None, causal: bool, place: Corner, scale: float
) -> Tensor:
    """Scores [..., heads, rows, columns], minus infinity where a query does not see a key."""
    scores = _unfold(_fold(query * scale, key.shape[-3]) @ key.mT, query.shape[-3])
    if part is not None and part.dtype == torch.bool:
        scores = scores.masked_fill(~part, -torch.inf)
    elif part is not None:
        scores = scores + part
    if sees_all(causal, place, key.shape[-2]):
        return scores
    hidden = _hidden(place, query.shape[-2], key.shape[-2], query.device)
    return scores.masked_fill(hidden, -torch.inf)


def finite(normal: Tensor) -> Tensor:
    """The logs of sums, zero where a query has seen nothing: its weights come out as zeros."""
    return normal.masked_fill(normal == -torch.inf, 0)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, place: Corner
) -> bool | None:
    """Whether the fused kernel must be causal; None if it cannot compute the block."""
    # The kernel takes four dims, equal batches, and values as wide as the keys.
    shapes = query.dim() == 4 and query.shape[0] == key.shape[0]
    shapes = shapes and query.shape[-1] == value.shape[-1]
    if mask is not None or not shapes or query.device.type != "cpu":
        return None
    if sees_all(causal, place, key.shape[-2]):
        return False
    # Its causal mask is the diagonal of a square, and folded heads would break the order of rows.
    square = place.row == place.column and query.shape[:3] == key.shape[:3]
    return True if square else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    place: Corner,
    scale: float,
) -> Attended:
    """The attention of queries to one block of keys; `mask` holds these queries and all keys."""
    diagonal = _fused(query, key, value, mask, causal, place)
    if diagonal is not None:
        out, normal = _KERNEL(_fold(query, key.shape[-3]), key, value, 0.0, diagonal, scale=scale)
        return _wide(_unfold(out, query.shape[-3])), normal.reshape(*query.shape[:-1], 1)
    key = _wide(key)
    value = _wide(value)
    outputs: list[Tensor] = []
    normals: list[Tensor] = []
    for rows in _rows(query, key.shape[-2]):
        part = None if mask is None else _mask_part(mask, rows, place, key.shape[-2])
        corner = Corner(place.row + rows.start, place.column)
        scores = _scores(_wide(query[..., rows, :]), key, part, causal, corner, scale)
        normal = scores.logsumexp(-1, keepdim=True)
        weights = (scores - finite(normal)).exp()
        outputs.append(_unfold(_fold(weights, key.shape[-3]) @ value, weights.shape[-3]))
        normals.append(normal)
    return torch.cat(outputs, -2), torch.cat(normals, -2)


def nothing(query: Tensor, key: Tensor, value: Tensor) -> Attended:
    """The attention to no key."""
    wide = torch.promote_types(query.dtype, torch.float32)
    lead = (query[..., 0, 0, 0] + key[..., 0, 0, 0]).shape
    shape = (*lead, *query.shape[-3:-1])
    out = query.new_zeros((*shape, value.shape[-1]), dtype=wide)
    return out, query.new_full((*shape, 1), -torch.inf, dtype=wide)


def merge(first: Attended, second: Attended) -> Attended:
    """The attention to the keys of two blocks, each weighted by its sum of exponentials."""
    # In the log domain, where no sum of exponentials overflows.
    normal = torch.logaddexp(first[1], second[1])
    least = finite(normal)
    return first[0] * (first[1] - least).exp() + second[0] * (second[1] - least).exp(), normal


class Ahead(NamedTuple):
    """The gradient of the whole attention, its output, and the log of the sum over all keys."""

    gradient: Tensor
    out: Tensor
    normal: Tensor


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ahead: Ahead,
    into: tuple[Tensor, Tensor, Tensor, Tensor | None],
    causal: bool,
    place: Corner,
    scale: float,
) -> None:
    """Add the gradients of one block to `into`: those of query, key, value and mask."""
    query, key, value, mask = inputs
    d_query, d_key, d_value, d_mask = into
    heads = query.shape[-3]
    groups = key.shape[-3]
    diagonal = _fused(*inputs, causal, place)
    if diagonal is not None:
        folded = [_fold(x.to(query.dtype), groups) for x in (ahead.gradient, query, ahead.out)]
        # The sum over all blocks in place of the block's own: the weights of the whole attention.
        normal = ahead.normal.reshape(*folded[1].shape[:-1])
        own, own_key, own_value = _KERNEL_BACK(
            folded[0], folded[1], key, value, folded[2], normal, 0.0, diagonal, scale=scale
        )
        d_query += _unfold(own, heads)
        d_key += own_key
        d_value += own_value
        return
    key = _wide(key)
    value = _wide(value)
    for rows in _rows(query, key.shape[-2]):
        part = None if mask is None else _mask_part(mask, rows, place, key.shape[-2])
        q = _wide(query[..., rows, :])
        d_out, out, normal = (_wide(x[..., rows, :]) for x in ahead)
        scores = _scores(q, key, part, causal, Corner(place.row + rows.start, place.column), scale)
        weights = (scores - finite(normal)).exp()
        d_value += (_fold(weights, groups).mT @ _fold(d_out, groups)).sum_to_size(d_value.shape)
        d_weights = _unfold(_fold(d_out, groups) @ value.mT, heads)
        d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True))
        if d_mask is not None:
            target = _mask_part(d_mask, rows, place, key.shape[-2])
            target += d_scores.sum_to_size(target.shape)
        d_scores = _fold(d_scores * scale, groups)
        d_query[..., rows, :] += _unfold(d_scores @ key, heads).sum_to_size(q.shape)
        d_key += (d_scores.mT @ _fold(q, groups)).sum_to_size(d_key.shape)
