"""Operators whose local form needs to know where this rank's shard lies: look-ups in a split table, and dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.sharding.rules.experts import EXPERTS

from .collectives import Cut, shard_of
from .communicating.rows import local_experts
from .experts import own_experts
from .functions import arguments_of, function_of

Cuts = Sequence[Sequence[int]]


def shard_index(indices: Tensor, size: int, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """Where global rows lie inside this rank's shard (0 for those that do not), and which of them do."""
    local, inside = indices, torch.ones_like(indices, dtype=torch.bool)
    for _, parts, degree, coordinate in cuts:
        chunk = size // (parts * degree)
        within = local % (degree * chunk)
        inside = inside & (within // chunk == coordinate)
        local = local // (degree * chunk) * chunk + within % chunk
        size //= degree
    return torch.where(inside, local, 0), inside


def padding_row(row: int, size: int, cuts: Cuts) -> int:
    """The padding row inside this rank's shard, or -1 (none)."""
    local, inside = shard_index(torch.tensor(row), size, cuts)
    return int(local) if bool(inside) else -1


def embedding(
    weight: Tensor, indices: Tensor, rows: int, cuts: Cuts, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Look up the rows that this rank holds; the others give zeros, so that the ranks' results add up."""
    local, inside = shard_index(indices, rows, cuts)
    out = torch.ops.aten.embedding.default(weight, local, padding_idx, scale_grad_by_freq, sparse)
    return torch.where(inside.unsqueeze(-1), out, 0.0)


def _mask(like: Tensor, p: float, shape: Sequence[int], cuts: Cuts) -> Tensor:
    """This rank's shard of a mask drawn for the whole tensor, the same on every rank that has the same seed."""
    whole = torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_(1 - p)
    return shard_of(whole, [Cut(*cut) for cut in cuts])


def dropout(input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts) -> Tensor:
    """Dropout that equals one device's: mask and scale as `torch.nn.functional.dropout` on CPU."""
    assert train
    return input * _mask(input, p, shape, cuts).div(1 - p) if p < 1 else input * 0


def onnx_dropout(
    data: Tensor, shape: Sequence[int], cuts: Cuts, ratio: float, training_mode: bool, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """ONNX `Dropout` that equals one device's: the values, and the mask of what stays."""
    if not training_mode or not ratio:
        return data, torch.ones_like(data, dtype=torch.bool)
    whole = torch.rand(tuple(shape), dtype=torch.float32, device=data.device) >= ratio
    mask = shard_of(whole, [Cut(*cut) for cut in cuts])
    return data * mask / (1 - ratio), mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Sequence[int],
    cuts: Cuts,
    dropout_p: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout on its weights, written out: the mask is this rank's shard of the whole one."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    weights = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        weights = weights.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else weights + attn_mask
    return dropout(torch.softmax(weights, -1), dropout_p, True, shape, cuts) @ value


def native_dropout(input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts) -> tuple[Tensor, Tensor]:
    """`native_dropout` that equals one device's: the values, and the mask of what stays."""
    assert train
    _, whole = torch.ops.aten.native_dropout.default(input.new_ones(tuple(shape)), p, True)
    mask = shard_of(whole, [Cut(*cut) for cut in cuts])
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _drawn_like(kind: str, self: Tensor, shape: Sequence[int], cuts: Cuts, **arguments: Any) -> Tensor:
    """This rank's shard of random numbers drawn for the whole tensor."""
    function = function_of(kind)
    whole = function(self.new_empty(tuple(shape)), **arguments_of(function, arguments, (self,), self.device))
    return shard_of(whole, [Cut(*cut) for cut in cuts])


LIKE = (
    "aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default", "aten.randint_like.low_dtype", "aten.bernoulli.p",
    "aten.uniform.default", "aten.exponential.default", "aten.normal_functional.default", "aten.geometric.default",
    "aten.log_normal.default", "aten.cauchy.default", "aten.random.default", "aten.random.from", "aten.random.to",
)  # fmt: skip
"""Random numbers that take no more from a tensor than its shape and type."""

SPECIAL_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{kind: functools.partial(_drawn_like, kind) for kind in LIKE},
    "aten.native_dropout.default": native_dropout,
    "transformers.grouped_mm_fallback.default": local_experts,
    "aten._grouped_mm.default": local_experts,
    EXPERTS: own_experts,
    "aten.embedding.default": embedding,
    "aten.dropout.default": dropout,
    "aten.feature_dropout.default": dropout,
    "onnx.Dropout": onnx_dropout,
    "aten.scaled_dot_product_attention.default": attention,
}
