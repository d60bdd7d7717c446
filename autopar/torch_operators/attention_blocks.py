"""Attention of queries to one block of keys, its gradients, and the sums that join blocks.

    o = exp(s - l) v,   l = log sum exp(s),   s = scale q k' + mask
    ds = p (do v' - sum(do o)),   p = exp(s - l) with l over the keys of all blocks

Half precision is computed in single. Heads of queries share heads of keys in equal groups; a few
rows of queries are worked on at a time, so that the scores of a block never lie in memory as a
whole. Blocks that are seen whole, or along the diagonal, are left to a fused kernel where there is
one. A sink, a score of no key, is a block whose values are zeros and whose l is the score.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import flash

SCORES_AT_ONCE = 2**26
"""The most scores in memory at once (at least one row of queries)."""

Attended = tuple[Tensor, Tensor]
"""The attention to some keys, and the log of the sum of their exponentials: the last dim is 1."""


class Corner(NamedTuple):
    """The numbers of the first query and the first key in the whole sequences.

    `window`: so many of the keys up to its own place are seen by a causal query (0: all).
    """

    row: int
    column: int
    window: int = 0


def sees_all(causal: bool, place: Corner, rows: int, columns: int) -> bool:
    """Whether every query of a block sees all its keys."""
    if not causal:
        return True
    within = not place.window or place.column > place.row + rows - 1 - place.window
    return within and place.row >= place.column + columns - 1


def _hidden(place: Corner, rows: int, columns: int, device: torch.device) -> Tensor:
    """The keys [rows, columns] that lie after their query, or before its window."""
    queries = torch.arange(place.row, place.row + rows, device=device).unsqueeze(1)
    keys = torch.arange(place.column, place.column + columns, device=device)
    after = keys > queries
    return after | (keys <= queries - place.window) if place.window else after


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
    if sees_all(causal, place, query.shape[-2], key.shape[-2]):
        return scores
    hidden = _hidden(place, query.shape[-2], key.shape[-2], query.device)
    return scores.masked_fill(hidden, -torch.inf)


def finite(normal: Tensor) -> Tensor:
    """The logs of sums, zero where a query has seen nothing: its weights come out as zeros."""
    return normal.masked_fill(normal == -torch.inf, 0)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, place: Corner
) -> tuple[bool, int] | None:
    """Whether a fused kernel must be causal, and its window; None if none computes the block."""
    if mask is not None:
        return None
    if sees_all(causal, place, query.shape[-2], key.shape[-2]):
        form = (False, 0)
    elif place.row == place.column:
        form = (True, place.window)
    else:
        return None
    return form if flash.covers(query, key, value, *form) else None


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
    form = _fused(query, key, value, mask, causal, place)
    if form is not None:
        out, normal = flash.forward(query, key, value, *form, scale)
        return _wide(out), normal
    key = _wide(key)
    value = _wide(value)
    outputs: list[Tensor] = []
    normals: list[Tensor] = []
    for rows in _rows(query, key.shape[-2]):
        part = None if mask is None else _mask_part(mask, rows, place, key.shape[-2])
        corner = place._replace(row=place.row + rows.start)
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


def with_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """The attention to some keys and to the sink of each head, of the scores `sinks` [heads]."""
    normal = torch.logaddexp(attended[1], sinks.to(attended[1].dtype).reshape(-1, 1, 1))
    return attended[0] * (attended[1] - normal).exp(), normal


class Ahead(NamedTuple):
    """The gradient of the whole attention, its output, and the log of the sum over all keys."""

    gradient: Tensor
    out: Tensor
    normal: Tensor


def gradient_of_sinks(ahead: Ahead, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [heads] from what all queries have seen."""
    wide = sinks.to(ahead.normal.dtype).reshape(-1, 1, 1)
    weighed = (_wide(ahead.gradient) * ahead.out).sum(-1, keepdim=True)
    return -((wide - ahead.normal).exp() * weighed).sum((0, 2, 3)).to(sinks.dtype)


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
    form = _fused(*inputs, causal, place)
    if form is not None:
        gradient, out = (x.to(query.dtype) for x in ahead[:2])
        # The sum over all blocks in place of the block's own: the weights of the whole attention.
        made = flash.backward((gradient, out, ahead.normal), inputs[:3], *form, scale)
        for target, own in zip((d_query, d_key, d_value), made, strict=True):
            target += own
        return
    key = _wide(key)
    value = _wide(value)
    for rows in _rows(query, key.shape[-2]):
        part = None if mask is None else _mask_part(mask, rows, place, key.shape[-2])
        q = _wide(query[..., rows, :])
        d_out, out, normal = (_wide(x[..., rows, :]) for x in ahead)
        scores = _scores(q, key, part, causal, place._replace(row=place.row + rows.start), scale)
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
