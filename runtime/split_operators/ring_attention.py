"""Ring attention: queries and keys are split alike, and blocks of keys travel once around the axis.

    o   = sum_j w_j o_j,   w_j = exp(l_j - l)
    l   = log sum_j exp(l_j)
    l_j = log sum_k exp(s_k)                     over the keys k of block j

with o_j the attention to block j alone (Liu et al. 2023, arXiv:2310.01889). The next block travels
during the attention to the present one. Backward, scores are computed again from l, and each
block's gradients travel around behind it. A block that the queries cannot see costs only its
travel; under a causal mask the last rank sees all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import arrived, set_off
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.torch_operators.attention_blocks import (
    Ahead,
    Attended,
    Place,
    attend,
    finite,
    gradient_of_sinks,
    gradients,
    merge,
    nothing,
    with_sinks,
)


class Round(NamedTuple):
    """The ring, and what queries see, common to all rounds."""

    group: AxisGroup
    whole: Place

    def block(self, number: int, queries: int, keys: int) -> Place | None:
        """The place of this round's block and our queries; None if they see nothing of it."""
        source = (self.group.coordinate - number) % self.group.size
        place = self.whole._replace(row=self.group.coordinate * queries, column=source * keys)
        unseen = place.causal and place.row + queries <= place.column
        passed = place.window and place.column + keys <= place.row - place.window + 1
        return None if unseen or passed else place


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one vector, which travels in one message."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _apart(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a joined vector."""
    return both[: key.numel()].view(key.shape), both[key.numel() :].view(value.shape)


class _Ring(torch.autograd.Function):
    """Attention of local queries to all keys, and the logs of the sums of exponentials.

    It saves local tensors alone: blocks of other ranks travel again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        spec: Round,
    ) -> tuple[Tensor, Tensor]:
        # The block at hand; the first one is this rank's own.
        k = key
        v = value
        result = nothing(query, key, value)
        for number in range(spec.group.size):
            last = number == spec.group.size - 1
            # Sent before the attention to the present block, which hides the travel.
            coming = None if last else set_off(_joined(k, v), spec.group)
            place = spec.block(number, query.shape[-2], key.shape[-2])
            if place is not None:
                result = merge(result, attend(query, k, v, mask, place))
            if coming is not None:
                k, v = _apart(arrived(coming), key, value)
        if sinks is not None:
            result = with_sinks(result, sinks)
        out = result[0].to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, sinks, out, result[1])
        ctx.spec = spec
        # torch's own kernels have no gradient for the logs either.
        ctx.mark_non_differentiable(result[1])
        return out, result[1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, normal = ctx.saved_tensors
        spec: Round = ctx.spec
        wide = normal.dtype
        ahead = Ahead(upstream[0], out, normal)
        d_query = torch.zeros_like(query, dtype=wide)
        d_mask = None
        if mask is not None and ctx.needs_input_grad[3]:
            d_mask = torch.zeros_like(mask, dtype=wide)
        k = key
        v = value
        travelling = None
        for number in range(spec.group.size):
            last = number == spec.group.size - 1
            coming = None if last else set_off(_joined(k, v), spec.group)
            place = spec.block(number, query.shape[-2], key.shape[-2])
            own = torch.zeros_like(_joined(k, v), dtype=wide)
            if place is not None:
                inputs = (query, k, v, mask)
                into = (d_query, *_apart(own, key, value), d_mask)
                gradients(inputs, ahead, into, place)
            # A block's gradients follow it, so they arrive at its rank after the last round.
            if travelling is not None:
                own = own + arrived(travelling)
            travelling = set_off(own, spec.group)
            if coming is not None:
                k, v = _apart(arrived(coming), key, value)
        assert travelling is not None
        d_key, d_value = _apart(arrived(travelling), key, value)
        if d_mask is not None:
            d_mask = d_mask.to(mask.dtype)
        made = (d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype))
        return *made, d_mask, None if sinks is None else gradient_of_sinks(ahead, sinks), None


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: Round,
    sinks: Tensor | None = None,
) -> Attended:
    """Attention of [..., heads, local queries, width] to all ranks' keys.

    mask: [..., local queries, all keys].
    """
    given = (query, key, value, mask, sinks, spec)
    out: Attended = _Ring.apply(*given)  # type: ignore[no-untyped-call]
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention` and `autopar.attention` on this rank's
    shards.

    attn_mask: for this rank's queries and all keys.
    """
    assert not dropout_p
    spec = _round(query, group, scale, is_causal, window, cap)
    if query.dim() == 2:
        heads = [x.unsqueeze(0) for x in (query, key, value)]
        return ring(heads[0], heads[1], heads[2], attn_mask, spec)[0].squeeze(0)
    return ring(query, key, value, attn_mask, spec, sinks)[0]


def _round(
    query: Tensor, group: AxisGroup, scale: float | None, causal: bool, *others: Any
) -> Round:
    """The rounds of an attention, with torch's default scale if none is given.

    `others`: its window and cap, if it has any.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Round(group, Place(scale, causal, *others))


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attended:
    """As `aten._scaled_dot_product_flash_attention_for_cpu` on this rank's shards.

    A query that sees nothing has 0 as its second result.
    """
    assert not dropout_p
    spec = _round(query, group, scale, is_causal)
    out, normal = ring(query, key, value, attn_mask, spec)
    return out, finite(normal).squeeze(-1)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": attention,
    "autopar.attention.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
}


def split_keys(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form of an attention whose queries and keys are split."""
    return _FUNCTIONS[call.operator.kind], {"group": group}


register("ring", talks=split_keys)
