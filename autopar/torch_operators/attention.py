"""Attention with what torch's own lacks: sinks, windows of keys, capped scores.

    o = exp(s - l) v,   l = log(sum exp(s) + exp(sink)),   s = scale q kᵀ + mask

A sink is a learned score of each head that is of no key, so that weights add up to less than one
(G. Xiao et al., arXiv:2309.17453; OpenAI, gpt-oss model card, arXiv:2508.10925). A kernel without
sinks gives o' and l', of which o = exp(l' - l) o'; its backward pass is right for o and l as it is,
and the gradient of a sink is -sum(exp(sink - l) do o). Windows without a kernel are computed a
block of queries at a time, with the keys that it sees.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import flash
from .attention_blocks import Ahead, Place, attend, fused, gradient_of_sinks, gradients, with_sinks
from .defining import LIBRARY, precise


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, of [batch, heads, length, width].

    Each head of keys is for consecutive heads of queries. `sinks`: [heads]. `window`: so many keys
    up to its own place are seen by a causal query (0: all). `attn_mask` broadcasts to the scores.
    `cap`: scores are cap tanh(score / cap) before the mask is added (0: as they are).
    A window that is not causal, or of other keys than queries, is a `ValueError`.
    """
    if window and not (is_causal and query.shape[2] == key.shape[2]):
        raise ValueError("a window of keys is causal, and of as many keys as queries")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    given = (query, key, value, sinks, attn_mask, scale, is_causal, window, cap)
    out: Tensor = torch.ops.autopar.attention_forward(*given)[0]
    return out


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, *seen: Any
) -> tuple[Tensor, Tensor]:
    attended = attend(query, key, value, mask, Place(*seen))
    if sinks is not None:
        attended = with_sinks(attended, sinks)
    out, normal = attended
    laid = out.dtype == query.dtype and out.transpose(1, 2).is_contiguous()
    return out if laid else _empty(query, key, value)[0].copy_(out), normal.contiguous()


def _empty(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Results with the heads of a token side by side, as kernels write them, and logs of sums."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty((*query.shape[:-1], 1), dtype=precise(query.dtype))


def _backward(gradient: Tensor, *given: Any) -> list[Tensor]:
    """The gradients of queries, keys and values, and of sinks and a mask of numbers."""
    *inputs, sinks, mask, out, normal = given[:7]
    place = Place(*given[7:])
    ahead = Ahead(gradient, out, normal)
    last = [] if sinks is None else [gradient_of_sinks(ahead, sinks)]
    query, key, value = inputs
    form = fused(query, key, value, mask, place)
    if form is not None:
        return [*flash.backward(ahead, (query, key, value), *form), *last]
    floats = [x for x in (*inputs, mask) if x is not None and x.is_floating_point()]
    sums = [torch.zeros_like(x, dtype=normal.dtype) for x in floats]
    into = (sums[0], sums[1], sums[2], sums[3] if len(sums) > 3 else None)
    gradients((query, key, value, mask), ahead, into, place)
    made = [x.to(given.dtype) for x, given in zip(sums, floats, strict=True)]
    return [*made[:3], *last, *made[3:]]


def _empty_gradients(gradient: Tensor, *given: Any) -> list[Tensor]:
    floats = (x for x in given[:5] if x is not None and x.is_floating_point())
    return [torch.empty_like(x) for x in floats]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.others = inputs[5:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("autopar.attention has no second derivatives")
    saved = ctx.saved_tensors
    made = iter(torch.ops.autopar.attention_backward(gradient, *saved, *ctx.others))
    floats = (x is not None and x.is_floating_point() for x in saved[:5])
    return (*(next(made) if one else None for one in floats), None, None, None, None)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
LIBRARY.define(
    f"attention({_INPUTS}=None, Tensor? attn_mask=None, bool is_causal=False, int window=0, "
    "float? scale=None, float cap=0.0) -> Tensor"
)
LIBRARY.define(
    f"attention_forward({_INPUTS}, Tensor? mask, float scale, bool causal, int window, "
    "float cap) -> (Tensor, Tensor)"
)
LIBRARY.define(
    f"attention_backward(Tensor gradient, {_INPUTS}, Tensor? mask, Tensor out, Tensor normal, "
    "float scale, bool causal, int window, float cap) -> Tensor[]"
)
LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")
LIBRARY.impl("attention_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::attention_forward", _empty, lib=LIBRARY)
torch.library.register_fake("autopar::attention_backward", _empty_gradients, lib=LIBRARY)
torch.library.register_autograd(
    "autopar::attention_forward", _differentiate, setup_context=_keep, lib=LIBRARY
)
