"""Attention of queries to one block of keys, its gradients, and the sums that join blocks.

    o = exp(s - l) v,   l = log sum exp(s),   s = scale q k' + mask
    ds = p (do v' - sum(do o)),   p = exp(s - l) with l over the keys of all blocks

Capped scores are cap tanh(scale q k' / cap), of the slope 1 - tanh².

Half precision is computed in single, but for products on GPUs, which add up in single. Heads of
queries share heads of keys in equal groups; a few rows of queries are worked on at a time, so that
the scores of a block never lie in memory as a whole. Blocks that are seen whole, or along the
diagonal, are left to a fused kernel where there is one. A sink, a score of no key, is a block whose
values are zeros and whose l is the score.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import flash

SCORES_AT_ONCE = 2**26
"""The most scores in memory at once (at least one row of queries)."""
CAUSAL_ROWS = 128
"""The most causal queries at once, if their window is no wider."""

Attended = tuple[Tensor, Tensor]
"""The attention to some keys, and the log of the sum of their exponentials: the last dim is 1."""


class Place(NamedTuple):
    """The numbers of a block's first query and first key, and what queries see.

    `causal`: the keys up to a query's own place; `window`: only so many of them (0: all). `cap`:
    what no score exceeds (0: nothing).
    """

    scale: float
    causal: bool = False
    window: int = 0
    cap: float = 0.0
    row: int = 0
    column: int = 0

    def seen(self, rows: slice, columns: int) -> slice:
        """The keys that any of these queries sees, of so many: at least one."""
        behind = self.row + rows.stop - self.column if self.causal else columns
        last = min(max(behind, 1), columns)
        first = self.row + rows.start - self.window + 1 - self.column if self.window else 0
        return slice(min(max(first, 0), last - 1), last)

    def sees_all(self, rows: int, columns: int) -> bool:
        """Whether every query of a block sees all its keys."""
        if not self.causal:
            return True
        within = not self.window or self.column > self.row + rows - 1 - self.window
        return within and self.row >= self.column + columns - 1


def _hidden(place: Place, rows: int, columns: int, device: torch.device) -> Tensor:
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


def _operand(x: Tensor) -> Tensor:
    """The values as products read them."""
    return x if x.is_cuda else _wide(x)


def _parts(query: Tensor, columns: int, place: Place) -> Iterator[tuple[slice, slice, Place]]:
    """A few queries at a time, the keys that they see, and their place.

    They are as many as the limit of scores allows, and few enough that most hidden scores are left
    out.
    """
    total = query.shape[-2]
    scores_of_row = query.numel() // (total * query.shape[-1]) * columns
    each = max(1, SCORES_AT_ONCE // max(1, scores_of_row))
    if place.causal:
        each = min(each, max(place.window, CAUSAL_ROWS))
    for start in range(0, total, each):
        rows = slice(start, min(start + each, total))
        keys = place.seen(rows, columns)
        yield rows, keys, place._replace(row=place.row + start, column=place.column + keys.start)


def _mask_part(mask: Tensor, rows: slice, place: Place, columns: int) -> Tensor:
    """The mask of these queries and keys; dims of size 1 serve all of it."""
    part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    return part[..., place.column : place.column + columns] if mask.shape[-1] > 1 else part


def _scores(query: Tensor, key: Tensor, part: Tensor | None, place: Place) -> Tensor:
    """Scores [..., heads, rows, columns], minus infinity where a query does not see a key."""
    return _masked(_products(query, key, place), part, place)


def _products(query: Tensor, key: Tensor, place: Place) -> Tensor:
    """Scores before any mask."""
    scale = place.scale / (place.cap or 1.0)
    scores = _wide(_unfold(_fold(query * scale, key.shape[-3]) @ key.mT, query.shape[-3]))
    return scores.tanh_().mul_(place.cap) if place.cap else scores


def _masked(scores: Tensor, part: Tensor | None, place: Place) -> Tensor:
    """Scores with a mask added, minus infinity where a query does not see a key."""
    if part is not None and part.dtype == torch.bool:
        scores = scores.masked_fill(~part, -torch.inf)
    elif part is not None:
        scores = scores + part
    if place.sees_all(*scores.shape[-2:]):
        return scores
    hidden = _hidden(place, scores.shape[-2], scores.shape[-1], scores.device)
    return scores.masked_fill(hidden, -torch.inf)


def finite(normal: Tensor) -> Tensor:
    """The logs of sums, zero where a query has seen nothing: its weights come out as zeros."""
    return normal.masked_fill(normal == -torch.inf, 0)


def fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, place: Place
) -> tuple[float, bool, int] | None:
    """How a fused kernel is called: scale, causal, window; None if none computes the block."""
    if mask is not None or place.cap:
        return None
    if place.sees_all(query.shape[-2], key.shape[-2]):
        form = (place.scale, False, 0)
    elif place.row == place.column:
        form = (place.scale, True, place.window)
    else:
        return None
    return form if flash.covers(query, key, value, *form[1:]) else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, place: Place
) -> Attended:
    """The attention of queries to one block of keys; `mask` holds these queries and all keys."""
    form = fused(query, key, value, mask, place)
    if form is not None:
        return flash.forward(query, key, value, *form)
    key = _operand(key)
    value = _operand(value)
    outputs: list[Tensor] = []
    normals: list[Tensor] = []
    for rows, columns, at in _parts(query, key.shape[-2], place):
        k = key[..., columns, :]
        part = None if mask is None else _mask_part(mask, rows, at, k.shape[-2])
        scores = _scores(_operand(query[..., rows, :]), k, part, at)
        normal = scores.logsumexp(-1, keepdim=True)
        weights = _fold((scores - finite(normal)).exp().to(value.dtype), key.shape[-3])
        outputs.append(_unfold(weights @ value[..., columns, :], scores.shape[-3]))
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
    """The attention to some keys and to the sink of each head, of the scores `sinks` [heads].

    It is written over the first one.
    """
    normal = torch.logaddexp(attended[1], sinks.to(attended[1].dtype).reshape(-1, 1, 1))
    return attended[0].mul_((attended[1] - normal).exp()), normal


class Ahead(NamedTuple):
    """The gradient of the whole attention, its output, and the log of the sum over all keys."""

    gradient: Tensor
    out: Tensor
    normal: Tensor


def gradient_of_sinks(ahead: Ahead, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [heads] from what all queries have seen."""
    wide = sinks.to(ahead.normal.dtype).reshape(-1, 1, 1)
    # In the type of the results: a copy in single precision would be the larger part of the time.
    weighed = (ahead.gradient * ahead.out).sum(-1, keepdim=True, dtype=wide.dtype)
    return -((wide - ahead.normal).exp() * weighed).sum((0, 2, 3)).to(sinks.dtype)


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ahead: Ahead,
    into: tuple[Tensor, Tensor, Tensor, Tensor | None],
    place: Place,
) -> None:
    """Add the gradients of one block to `into`: those of query, key, value and mask."""
    query, key, value, mask = inputs
    d_query, d_key, d_value, d_mask = into
    heads = query.shape[-3]
    groups = key.shape[-3]
    form = fused(*inputs, place)
    if form is not None:
        # The sum over all blocks in place of the block's own: the weights of the whole attention.
        made = flash.backward(ahead, inputs[:3], *form)
        for target, own in zip(into[:3], made, strict=True):
            target += own
        return
    for rows, columns, at in _parts(query, key.shape[-2], place):
        k, v = (_operand(x[..., columns, :]) for x in (key, value))
        part = None if mask is None else _mask_part(mask, rows, at, k.shape[-2])
        q = _operand(query[..., rows, :])
        d_out, out, normal = (_wide(x[..., rows, :]) for x in ahead)
        inner = (d_out * out).sum(-1, keepdim=True)
        d_out = d_out.to(v.dtype)
        products = _products(q, k, at)
        weights = (_masked(products, part, at) - finite(normal)).exp()
        d_weights = _wide(_unfold(_fold(d_out, groups) @ v.mT, heads))
        d_scores = weights * (d_weights - inner)
        if d_mask is not None:
            target = _mask_part(d_mask, rows, at, k.shape[-2])
            target += d_scores.sum_to_size(target.shape)
        if at.cap:
            d_scores = d_scores * (1 - (products / at.cap).square())
        d_scores = _fold((d_scores * place.scale).to(k.dtype), groups)
        weights = _fold(weights.to(v.dtype), groups)
        d_query[..., rows, :] += _unfold(d_scores @ k, heads).sum_to_size(q.shape)
        d_key[..., columns, :] += (d_scores.mT @ _fold(q, groups)).sum_to_size(k.shape)
        d_value[..., columns, :] += (weights.mT @ _fold(d_out, groups)).sum_to_size(v.shape)
