"""Linear recurrences along a split sequence: each rank goes on from the state before its shard.

    S' = A S + B        y = y_0 + Y S

with A, B, y_0 and Y of the rank's own rows. Columns of values are independent, so a delta rule has
A and Y as further columns, which begin with the state I and have values of zero; in a state space A
is a number for each head, and Y = q exp(G). (A, B) is gathered; its gradients are reduce-scattered.
"""

from __future__ import annotations

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
    given = delta_rule_recurrence(query, key, value, decay, beta, normalize)
    width = given.keys.shape[-1]
    columns = given.values.shape[-1]
    wider = Recurrence(
        queries=given.queries,
        keys=given.keys,
        values=functional.pad(given.values, (0, width)),
        decay=given.decay,
        beta=given.beta,
    )
    eye = torch.eye(width, dtype=value.dtype, device=value.device).to(given.values.dtype)
    # The identity passes through the rows as a state would: what it becomes is A, what is read Y.
    first = functional.pad(eye, (columns, 0)).expand(*given.keys.shape[:-2], -1, -1)
    made, last = _recomputed(wider, chunk_size, first)
    nothing, before = _before(last, group)
    # From the first rank on: each rank computes the state before its rows by itself.
    state = nothing[..., :columns]
    for passed in before:
        state = passed[..., columns:] @ state + passed[..., :columns]
    result = made[..., :columns] + made[..., columns:] @ state
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
    # A step is a number for each head and row: a rank's own need nothing of its neighbours.
    given = state_space_recurrence(x, step, decay, key, query, bias, softplus, (low, high))
    made, last = _recomputed(given, chunk_size, None)
    # What a state of the ranks before has lost at each row, and behind the last one.
    total = given.decay.cumsum(-2)
    remaining = total[..., -1:, :].exp().expand(*last.shape[:-1], 1)
    nothing, before = _before(torch.cat((last, remaining), dim=-1), group)
    state = nothing[..., :-1]
    for passed in before:
        state = passed[..., -1:] * state + passed[..., :-1]
    made = made + (given.queries * total.exp()) @ state
    return with_skip(made.transpose(1, 2), x, skip)


def _recomputed(given: Recurrence, rows: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `chunked_recurrence`, of which the backward pass computes what is inside again."""
    made: tuple[Tensor, Tensor] = checkpoint(
        chunked_recurrence, given, rows, state, use_reentrant=False, preserve_rng_state=False
    )
    return made


def _before(own: Tensor, group: AxisGroup) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Zeros, and what the ranks before put in, in their order.

    The zeros are made of the gathered tensor, so that the first rank has a backward pass, too.
    """
    there = step(own[None].contiguous(), Move("all_gather", 0), Move("reduce_scatter", 0), group)
    return there[:0].sum(0), there[: group.coordinate].unbind(0)
