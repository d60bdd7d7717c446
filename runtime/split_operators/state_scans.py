"""Linear recurrences along a split sequence: each rank goes on from the state before its shard.

    S' = A S + B        y = y_0 + Y S

with A, B, y_0 and Y of the rank's own rows. Columns of values are independent, so a delta rule has
A and Y as further columns, which begin with the state I and have values of zero; in a state space A
is a number for each head, and Y = q exp(G). (A, B) is gathered; its gradients are reduce-scattered.

For the backward pass a rank keeps its inputs and what it has gathered, and of a delta rule Y; all
else is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.redistribution.steps import Move, step
from autopar.torch_operators.chunked import Recurrence, chunked_recurrence
from autopar.torch_operators.scans import delta_rule_recurrence, state_space_recurrence, with_skip


def split_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk_size: int,
    normalize: bool,
    group: AxisGroup,
) -> Tensor:
    """As the operator `gated_delta_rule`."""
    width = key.shape[-1]
    columns = value.shape[-1]

    def own(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Results of the rank's own rows, what they read of a state before, and (B, A)."""
        given = delta_rule_recurrence(q, k, v, g, b, normalize)
        wider = Recurrence(
            queries=given.queries,
            keys=given.keys,
            values=functional.pad(given.values, (0, width)),
            decay=given.decay,
            beta=given.beta,
        )
        eye = torch.eye(width, dtype=value.dtype, device=value.device).to(given.values.dtype)
        # The identity passes through the rows as a state would: what it becomes is A, what is
        # read Y.
        first = functional.pad(eye, (columns, 0)).expand(*given.keys.shape[:-2], -1, -1)
        made, last = chunked_recurrence(wider, chunk_size, first)
        # Copies, as a view of a part would keep the whole.
        return made[..., :columns].contiguous(), made[..., columns:].contiguous(), last

    def read(rows: Tensor, gathered: Tensor) -> Tensor:
        """The rows' part of the state that the ranks before leave."""
        nothing, before = _before(gathered, group)
        state = nothing[..., :columns]
        # From the first rank on: each rank computes the state before its rows by itself.
        for passed in before:
            state = passed[..., columns:] @ state + passed[..., :columns]
        return rows @ state

    made, rows, last = _recomputed(own, query, key, value, decay, beta)
    result: Tensor = made + _recomputed(read, rows, _gathered(last, group))
    return result.transpose(1, 2).to(query.dtype).contiguous()


def split_state_space(
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    chunk_size: int,
    softplus: bool,
    low: float,
    high: float,
    group: AxisGroup,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """As the operator `state_space_scan`."""

    limits = (low, high)

    # A step is a number for each head and row: a rank's own need nothing of its neighbours.
    def recurrence(v: Tensor, t: Tensor, g: Tensor, *keys: Any) -> Recurrence:
        k, q, b = keys
        return state_space_recurrence(v, t, g, k, q, b, softplus, limits)

    def own(skip: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Results of the rank's own rows, and (B, A)."""
        given = recurrence(*inputs)
        made, last = chunked_recurrence(given, chunk_size)
        remaining = given.decay.sum(-2, keepdim=True).exp().expand(*last.shape[:-1], 1)
        return with_skip(made.transpose(1, 2), inputs[0], skip), torch.cat(
            (last, remaining), dim=-1
        )

    def read(gathered: Tensor, *inputs: Any) -> Tensor:
        """The rows' part of the state that the ranks before leave."""
        given = recurrence(*inputs)
        nothing, before = _before(gathered, group)
        state = nothing[..., :-1]
        for passed in before:
            state = passed[..., -1:] * state + passed[..., :-1]
        # What that state has lost at each row.
        rows = given.queries * given.decay.cumsum(-2).exp()
        return (rows @ state).transpose(1, 2)

    inputs = (x, step, decay, key, query, bias)
    made, last = _recomputed(own, skip, *inputs)
    result: Tensor = made + _recomputed(read, _gathered(last, group), *inputs)
    return result.contiguous()


def _recomputed(function: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """The function's results, of which the backward pass computes what is inside again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _gathered(own: Tensor, group: AxisGroup) -> Tensor:
    """The tensors of all ranks, by rank."""
    return step(own[None].contiguous(), Move("all_gather", 0), Move("reduce_scatter", 0), group)


def _before(gathered: Tensor, group: AxisGroup) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Zeros, and what the ranks before have put in, in their order.

    The zeros are made of the gathered tensor, so that the first rank has a backward pass, too.
    """
    return gathered[:0].sum(0), gathered[: group.coordinate].unbind(0)
