"""Attention, rotary embeddings and the key-value cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np

from autopar.errors import ModelError
from autopar.frontends.onnx.values import dtype_name

from .symbols import Symbol, cat, promoted, stack, where
from .trace import Asked


def by_heads(x: Symbol, count: int | None) -> Symbol:
    """The heads in a dim of their own: (batch, heads, length, width)."""
    if x.rank == 4:
        return x
    if not count:
        raise ModelError("attention over three dims needs q_num_heads and kv_num_heads")
    return x.reshape(*x.shape[:2], count, x.shape[2] // count).transpose(1, 2)


def _allowed(
    q: Symbol,
    kv: int,
    *,
    offset: Symbol | int,
    causal: bool,
    left: int,
    right: int,
    seen: Symbol | None,
) -> Symbol | None:
    """The keys that a query may see by position; None if it may see all."""
    columns = q.constant(np.arange(kv))
    # Keys of a cache stand before the first query, each sample with as many as it has.
    own = q.constant(np.arange(q.shape[2])[:, None] + (offset if isinstance(offset, int) else 0))
    if isinstance(offset, Symbol):
        own = own + offset.to("int64").reshape(-1, 1, 1, 1)
    rules = []
    if causal:
        rules.append(columns <= own)
    if left >= 0:
        rules.append(columns >= own - left)
    if right >= 0:
        rules.append(columns <= own + right)
    if seen is not None:
        rules.append(columns < seen.to("int64").reshape(-1, 1, 1, 1))
    return reduce(Symbol.__and__, rules) if rules else None


def _mask(mask: Symbol | None, allowed: Symbol | None, kv: int, dtype: str) -> Symbol | None:
    """One mask of the scores from the given mask and the allowed positions.

    It is of booleans where nothing is added to the scores.
    """
    if mask is not None:
        short = kv - mask.shape[-1]
        if short > 0:
            # A short mask says nothing of the last keys: ONNX hides them.
            if mask.dtype == "bool":
                mask = mask.to("uint8").pad((0,), (short,)).to("bool")
            else:
                mask = mask.pad((0,), (short,), -math.inf)
        if mask.dtype == "bool":
            allowed = mask if allowed is None else mask & allowed
            mask = None
    if mask is None:
        return allowed
    return mask.to(dtype) if allowed is None else where(allowed, mask.to(dtype), -math.inf)


def _scores(q: Symbol, k: Symbol, scale: float, groups: int) -> Symbol:
    """The scaled products of queries and keys, each key repeated for its group of heads."""
    k = k.repeat_interleave(groups, 1) if groups > 1 else k
    # Both factors are scaled before the product, as ONNX defines it: half precision would overflow.
    root = math.sqrt(scale)
    return (q * root) @ (k * root).t


def _explicit(
    q: Symbol,
    k: Symbol,
    v: Symbol,
    mask: Symbol | None,
    *,
    scale: float,
    softcap: float,
    precision: str | None,
    mode: int,
) -> tuple[Symbol, Symbol]:
    """The textbook computation, which also gives the scores of `mode`.

    mode: 0 the scaled products, 1 after the soft cap, 2 with the mask, 3 the weights.
    """
    # Grouped queries: each head of keys serves as many heads of queries.
    groups = q.shape[1] // k.shape[1]
    products = _scores(q, k, scale, groups)
    capped = products if softcap <= 0 else (products / softcap).map("tanh") * softcap
    if mask is None:
        scores = capped
    else:
        hides = mask.dtype == "bool"
        scores = where(mask, capped, -math.inf) if hides else capped + mask
    exponents = scores.to(precision or scores.dtype)
    if mask is None:
        weights = exponents.along("softmax.int", -1)
    else:
        # A query that may attend nowhere gets zeros, and passes no gradient: a softmax over
        # minus infinities alone would give NaN in both directions.
        nowhere = scores.amax(-1, keep=True).equals(-math.inf)
        weights = exponents.masked_fill(nowhere, 0.0).along("softmax.int", -1)
        weights = weights.masked_fill(nowhere, 0.0)
    weights = weights.to(q.dtype)
    v = v.repeat_interleave(groups, 1) if groups > 1 else v
    return weights @ v, (products, capped, scores, weights)[mode].to(q.dtype)


def attention(
    asked: Asked,
    *,
    Q: Symbol,
    K: Symbol,
    V: Symbol,
    attn_mask: Symbol | None = None,
    past_key: Symbol | None = None,
    past_value: Symbol | None = None,
    nonpad_kv_seqlen: Symbol | None = None,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Symbol, ...]:
    """Scaled dot product attention with grouped heads.

    Also returns keys and values with the past, and the scores if they are asked for.
    """
    q = by_heads(Q, q_num_heads)
    k = by_heads(K, kv_num_heads)
    v = by_heads(V, kv_num_heads)
    k = k if past_key is None else cat((past_key, k), 2)
    v = v if past_value is None else cat((past_value, v), 2)
    offset: Symbol | int = 0 if past_key is None else past_key.shape[2]
    if past_key is None and nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - q.shape[2]
    if len(asked.outputs) < 4:
        qk_matmul_output_mode = None
    explicit = softcap > 0 or softmax_precision is not None or qk_matmul_output_mode is not None
    windowed = max(left_window_size, right_window_size) >= 0
    placed = any(x is not None for x in (attn_mask, nonpad_kv_seqlen, past_key))
    # Torch's kernels have causal attention without a mask in memory: the usual case keeps it.
    plain = bool(is_causal) and not (explicit or windowed or placed)
    allowed = _allowed(
        q,
        k.shape[2],
        offset=offset,
        causal=bool(is_causal) and not plain,
        left=left_window_size,
        right=right_window_size,
        seen=nonpad_kv_seqlen,
    )
    mask = _mask(attn_mask, allowed, k.shape[2], q.dtype)
    shown: tuple[Symbol, ...] = ()
    if explicit:
        precision = None
        if softmax_precision is not None:
            precision = promoted(dtype_name(softmax_precision, "softmax_precision"), q.dtype)
        y, scores = _explicit(
            q,
            k,
            v,
            mask,
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            softcap=softcap,
            precision=precision,
            mode=qk_matmul_output_mode or 0,
        )
        shown = (scores,)
    else:
        y = q.new(
            "scaled_dot_product_attention.default",
            (*q.shape[:-1], v.shape[-1]),
            query=q,
            key=k,
            value=v,
            attn_mask=mask if mask is None or mask.rank > 1 else mask.reshape(1, -1),
            is_causal=plain or None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1] or None,
        )
    if Q.rank == 3:
        y = y.transpose(1, 2).reshape(*Q.shape[:2], -1)
    return (y, k, v, *shown)


def rotary_embedding(
    *,
    X: Symbol,
    cos_cache: Symbol,
    sin_cache: Symbol,
    position_ids: Symbol | None = None,
    interleaved: int = 0,
    rotary_embedding_dim: int = 0,
    num_heads: int | None = None,
) -> Symbol:
    """Turn pairs of elements of every head by an angle that grows with the position."""
    if X.rank == 4:
        x = X.transpose(1, 2)
    else:
        x = X.reshape(*X.shape[:2], num_heads or 1, -1)
    # Only the first elements of a head may be turned; the others pass.
    size = rotary_embedding_dim or x.shape[-1]
    turned = x.cut(-1, 0, size)
    if position_ids is not None:
        cos_cache, sin_cache = (
            table.index_select(0, position_ids.reshape(position_ids.size)).reshape(
                *position_ids.shape, -1
            )
            for table in (cos_cache, sin_cache)
        )
    cos = cos_cache.unsqueeze(2)
    sin = sin_cache.unsqueeze(2)
    # A pair is two neighbours, or an element and the one half the head further on.
    if interleaved:
        first = turned.cut(-1, 0, size, 2)
        second = turned.cut(-1, 1, size, 2)
    else:
        first, second = turned.chunk(2, -1)
    real = cos * first - sin * second
    imaginary = sin * first + cos * second
    if interleaved:
        turned = stack((real, imaginary), -1).reshape(*turned.shape)
    else:
        turned = cat((real, imaginary), -1)
    if size < x.shape[-1]:
        turned = cat((turned, x.cut(-1, size, x.shape[-1])), -1)
    return turned.transpose(1, 2) if X.rank == 4 else turned.reshape(*X.shape)


def tensor_scatter(
    *,
    past_cache: Symbol,
    update: Symbol,
    write_indices: Symbol | None = None,
    axis: int = -2,
    mode: str = "linear",
) -> Symbol:
    """A copy of the cache with `update` written from each sample's index on.

    A circular cache goes on at its start when its end is reached.
    """
    # The cache is as long as it may become, so nothing is appended.
    axis %= past_cache.rank
    places = update.constant(np.arange(update.shape[axis])[None])
    if write_indices is not None:
        places = write_indices.to("int64").unsqueeze(1) + places
    if mode == "circular":
        places = places.with_other("remainder.Scalar", past_cache.shape[axis])
    shape = [1] * past_cache.rank
    shape[0], shape[axis] = places.shape
    return past_cache.scatter(axis, places.reshape(*shape).expand(*update.shape), update)


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "RotaryEmbedding": rotary_embedding,
    "TensorScatter": tensor_scatter,
}
ASKING: Mapping[str, Callable[..., tuple[Symbol, ...]]] = {"Attention": attention}
