"""Attention with what torch's own lacks: sinks and windows of keys.

    o = exp(s - l) v,   l = log(sum exp(s) + exp(sink)),   s = scale q kᵀ + mask

A sink is a learned score of each head that is of no key, so that weights add up to less than one
(G. Xiao et al., arXiv:2309.17453; OpenAI, gpt-oss model card, arXiv:2508.10925). A kernel without
sinks gives o' and l', of which o = exp(l' - l) o'; its backward pass is right for o and l as it is,
and the gradient of a sink is -sum(exp(sink - l) do o). Windows without a kernel are computed a
block of queries at a time, with the keys that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import flash
from .attention_blocks import Ahead, Corner, attend, gradient_of_sinks, gradients, with_sinks
from .defining import LIBRARY, precise

ROWS = 128
"""The least rows of queries in a block of a window."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, of [batch, heads, length, width].

    Each head of keys is for consecutive heads of queries. `sinks`: [heads]. `window`: so many keys
    up to its own place are seen by a causal query (0: all). `attn_mask` broadcasts to the scores.
    A window that is not causal, or of other keys than queries, is a `ValueError`.
    """
    if window and not (is_causal and query.shape[2] == key.shape[2]):
        raise ValueError("a window of keys is causal, and of as many keys as queries")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    given = (query, key, value, sinks, attn_mask, is_causal, window, scale)
    out: Tensor = torch.ops.autopar.attention_forward(*given)[0]
    return out


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _pieces(queries: int, keys: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that any of them sees."""
    size = max(window, ROWS) if window else max(queries, 1)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, start - window + 1) if window else 0
        yield slice(start, stop), slice(first, min(stop, keys) if window else keys)


def _laid_out(query: Tensor, value: Tensor) -> Tensor:
    """Empty results, with the heads of a token side by side."""
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, normal = _empty(query, key, value, sinks, mask, causal, window, scale)
    whole = mask is None and flash.covers(query, key, value, causal, window)
    for rows, columns in _pieces(query.shape[2], key.shape[2], 0 if whole else window):
        attended = attend(
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            _rows_of(mask, rows),
            causal,
            Corner(rows.start, columns.start, window),
            scale,
        )
        if sinks is not None:
            attended = with_sinks(attended, sinks)
        out[:, :, rows] = attended[0]
        normal[:, :, rows] = attended[1]
    return out, normal


def _empty(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    normal = query.new_empty((*query.shape[:-1], 1), dtype=precise(query.dtype))
    return _laid_out(query, value), normal


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    normal: Tensor,
    causal: bool,
    window: int,
    scale: float,
    of_mask: bool,
) -> list[Tensor]:
    """The gradients of queries, keys and values, of sinks if there are any, and of the mask."""
    inputs = (query, key, value)
    ahead = Ahead(gradient, out, normal)
    last = [] if sinks is None else [gradient_of_sinks(ahead, sinks)]
    if mask is None and flash.covers(*inputs, causal, window):
        return [*flash.backward((gradient, out, normal), inputs, causal, window, scale), *last]
    made = [torch.zeros_like(x, dtype=normal.dtype) for x in inputs]
    d_mask = torch.zeros_like(mask, dtype=normal.dtype) if mask is not None and of_mask else None
    for rows, columns in _pieces(query.shape[2], key.shape[2], window):
        gradients(
            (query[:, :, rows], key[:, :, columns], value[:, :, columns], _rows_of(mask, rows)),
            Ahead(*(x[:, :, rows] for x in ahead)),
            (
                made[0][:, :, rows],
                made[1][:, :, columns],
                made[2][:, :, columns],
                _rows_of(d_mask, rows),
            ),
            causal,
            Corner(rows.start, columns.start, window),
            scale,
        )
    made = [x.to(given.dtype) for x, given in zip(made, inputs, strict=True)]
    return [*made, *last, *([] if d_mask is None or mask is None else [d_mask.to(mask.dtype)])]


def _empty_gradients(gradient: Tensor, *given: Any) -> list[Tensor]:
    query, key, value, sinks, mask = given[:5]
    wanted = (query, key, value, sinks, mask if given[-1] else None)
    return [torch.empty_like(x) for x in wanted if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.others = inputs[5:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("autopar.attention has no second derivatives")
    saved = ctx.saved_tensors
    given = (gradient, *saved, *ctx.others, ctx.needs_input_grad[4])
    made = iter(torch.ops.autopar.attention_backward(*given))
    first = [next(made) for _ in range(3)]
    of_sinks = None if saved[3] is None else next(made)
    return (*first, of_sinks, next(made, None), None, None, None)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
LIBRARY.define(
    f"attention({_INPUTS}=None, Tensor? attn_mask=None, bool is_causal=False, int window=0, "
    "float? scale=None) -> Tensor"
)
LIBRARY.define(
    f"attention_forward({_INPUTS}, Tensor? mask, bool causal, int window, float scale) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_backward(Tensor gradient, {_INPUTS}, Tensor? mask, Tensor out, Tensor normal, "
    "bool causal, int window, float scale, bool of_mask) -> Tensor[]"
)
LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")
LIBRARY.impl("attention_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::attention_forward", _empty, lib=LIBRARY)
torch.library.register_fake("autopar::attention_backward", _empty_gradients, lib=LIBRARY)
torch.library.register_autograd(
    "autopar::attention_forward", _differentiate, setup_context=_keep, lib=LIBRARY
)
