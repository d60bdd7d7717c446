"""Attention, rotary embeddings and the key-value cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.nn.functional as F

from .dtypes import torch_dtype

Tensor = torch.Tensor


def _heads(x: Tensor, count: int | None) -> Tensor:
    """Put the heads in a dim of their own: (batch, heads, length, width)."""
    if x.dim() == 4:
        return x
    if not count:
        raise ValueError("attention over three dims needs q_num_heads and kv_num_heads")
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def _allowed(
    q: int,
    kv: int,
    *,
    offset: Tensor | int,
    causal: bool,
    left: int,
    right: int,
    seen: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """The keys that a query may see by position; None if it may see all."""
    columns = torch.arange(kv, device=device)
    # Keys of a cache stand before the first query, each sample with as many as it has.
    shift = offset.reshape(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset
    distance = torch.arange(q, device=device).unsqueeze(1) + shift - columns
    rules = []
    if causal:
        rules.append(distance >= 0)
    if left >= 0:
        rules.append(distance <= left)
    if right >= 0:
        rules.append(-distance <= right)
    if seen is not None:
        rules.append(columns < seen.reshape(-1, 1, 1, 1))
    return reduce(torch.logical_and, rules) if rules else None


def _bias(
    mask: Tensor | None, allowed: Tensor | None, kv: int, dtype: torch.dtype
) -> Tensor | None:
    """One additive mask of the scores from the given mask and the allowed positions."""
    if mask is not None:
        if mask.shape[-1] < kv:
            # A short mask says nothing of the last keys: ONNX hides them.
            hidden = False if mask.dtype == torch.bool else -math.inf
            mask = F.pad(mask, [0, kv - mask.shape[-1]], value=hidden)
        if mask.dtype == torch.bool:
            allowed = mask if allowed is None else mask & allowed
            mask = None
    if allowed is None:
        return None if mask is None else mask.to(dtype)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    bias = bias.masked_fill(~allowed, -math.inf)
    return bias if mask is None else bias + mask.to(dtype)


def _scores(q: Tensor, k: Tensor, scale: float, groups: int) -> Tensor:
    """The scaled products of queries and keys, each key repeated for its group of heads."""
    k = k.repeat_interleave(groups, dim=1) if groups > 1 else k
    # Both factors are scaled before the product, as ONNX defines it: half precision would overflow.
    root = math.sqrt(scale)
    return torch.matmul(q * root, (k * root).transpose(-1, -2))


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float,
    precision: torch.dtype | None,
    mode: int,
) -> tuple[Tensor, Tensor]:
    """The textbook computation, which also gives the scores of `mode`.

    mode: 0 the scaled products, 1 after the soft cap, 2 with the mask, 3 the weights.
    """
    # Grouped queries: each head of keys serves as many heads of queries.
    groups = q.shape[1] // k.shape[1]
    raw = _scores(q, k, scale, groups)
    if softcap > 0:
        raw = softcap * torch.tanh(raw / softcap)
    scores = raw if bias is None else raw + bias
    exponents = scores.to(precision or scores.dtype)
    if bias is None:
        weights = torch.softmax(exponents, dim=-1)
    else:
        # A query that may attend nowhere gets zeros, and passes no gradient: a softmax over
        # minus infinities alone would give NaN in both directions.
        nowhere = torch.isneginf(bias.amax(-1, keepdim=True))
        weights = torch.softmax(exponents.masked_fill(nowhere, 0.0), dim=-1)
        weights = weights.masked_fill(nowhere, 0.0)
    weights = weights.to(q.dtype)
    v = v.repeat_interleave(groups, dim=1) if groups > 1 else v
    shown = {
        0: _scores(q, k, scale, groups) if softcap > 0 and mode == 0 else raw,
        1: raw,
        2: scores,
        3: weights,
    }[mode]
    return torch.matmul(weights, v), shown.to(q.dtype)


def attention(
    *,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Tensor, ...]:
    """Scaled dot product attention with grouped heads.

    Also returns keys and values with the past, and the scores if they are asked for.
    """
    q = _heads(Q, q_num_heads)
    k = _heads(K, kv_num_heads)
    v = _heads(V, kv_num_heads)
    k = k if past_key is None else torch.cat((past_key, k), dim=2)
    v = v if past_value is None else torch.cat((past_value, v), dim=2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    offset: Tensor | int = 0 if past_key is None else past_key.shape[2]
    if past_key is None and nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - q.shape[2]
    explicit = softcap > 0 or softmax_precision is not None or qk_matmul_output_mode is not None
    windowed = max(left_window_size, right_window_size) >= 0
    placed = any(x is not None for x in (attn_mask, nonpad_kv_seqlen, past_key))
    # Torch's kernels have causal attention without a mask in memory: the usual case keeps it.
    plain = bool(is_causal) and not (explicit or windowed or placed)
    allowed = _allowed(
        q.shape[2],
        k.shape[2],
        offset=offset,
        causal=bool(is_causal) and not plain,
        left=left_window_size,
        right=right_window_size,
        seen=nonpad_kv_seqlen,
        device=q.device,
    )
    bias = _bias(attn_mask, allowed, k.shape[2], q.dtype)
    shown: tuple[Tensor, ...] = ()
    if explicit:
        precision = None
        if softmax_precision is not None:
            precision = torch.promote_types(torch_dtype(softmax_precision), q.dtype)
        mode = qk_matmul_output_mode or 0
        y, scores = _explicit(
            q, k, v, bias, scale=scale, softcap=softcap, precision=precision, mode=mode
        )
        shown = (scores,)
    else:
        mask = bias if bias is None or bias.dim() >= 2 else bias.unsqueeze(0)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=plain, scale=scale, enable_gqa=grouped
        )
    if Q.dim() == 3:
        y = y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)
    return (y, k, v, *shown)


def rotary_embedding(
    *,
    X: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    interleaved: int = 0,
    rotary_embedding_dim: int = 0,
    num_heads: int | None = None,
) -> Tensor:
    """Turn pairs of elements of every head by an angle that grows with the position."""
    x = X.transpose(1, 2) if X.dim() == 4 else X.reshape(X.shape[0], X.shape[1], num_heads or 1, -1)
    # Only the first elements of a head may be turned; the others pass.
    size = rotary_embedding_dim or x.shape[-1]
    turned = x[..., :size]
    unturned = x[..., size:]
    if position_ids is not None:
        cos_cache = cos_cache[position_ids]
        sin_cache = sin_cache[position_ids]
    cos = cos_cache.unsqueeze(2)
    sin = sin_cache.unsqueeze(2)
    # A pair is two neighbours, or an element and the one half the head further on.
    if interleaved:
        first = turned[..., 0::2]
        second = turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    real = cos * first - sin * second
    imaginary = sin * first + cos * second
    if interleaved:
        turned = torch.stack((real, imaginary), dim=-1).reshape(turned.shape)
    else:
        turned = torch.cat((real, imaginary), dim=-1)
    y = torch.cat((turned, unturned), dim=-1)
    return y.transpose(1, 2) if X.dim() == 4 else y.reshape(X.shape)


def tensor_scatter(
    *,
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    """A copy of the cache with `update` written from each sample's index on.

    A circular cache goes on at its start when its end is reached.
    """
    # The cache is as long as it may become, so nothing is appended.
    axis %= past_cache.dim()
    size = past_cache.shape[axis]
    count = update.shape[axis]
    start = write_indices
    if start is None:
        start = torch.zeros(past_cache.shape[0], dtype=torch.int64, device=update.device)
    places = start.unsqueeze(1) + torch.arange(count, device=update.device)
    places = places % size if mode == "circular" else places
    shape = [1] * past_cache.dim()
    shape[0], shape[axis] = places.shape
    return past_cache.scatter(axis, places.reshape(shape).expand(update.shape), update)


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "Attention": attention,
    "RotaryEmbedding": rotary_embedding,
    "TensorScatter": tensor_scatter,
}
