"""Scans along a split dim: each rank scans its shard and goes on from the totals before it.

    y_i = t_1 + ... + t_{r-1} + scan(x)_i   (for products, times)

with t_j the total of rank j's shard. The totals are gathered; their gradients are reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.redistribution.steps import Move, step
from autopar.sharding.rules.recurrent import DELTA_RULE, STATE_SPACE

from .state_scans import split_delta_rule, split_state_space


def _before(total: Tensor, dim: int, group: AxisGroup, *, reverse: bool, product: bool) -> Tensor:
    """The totals of the ranks before put together, as [..., 1, ...].

    Where the scan runs in reverse these are the ranks behind.
    """
    # Totals are one slice a rank, so gathering all of them is cheap.
    totals = step(total, Move("all_gather", dim), Move("reduce_scatter", dim), group)
    start = group.coordinate + 1 if reverse else 0
    count = group.size - 1 - group.coordinate if reverse else group.coordinate
    part = totals.narrow(dim, start, count)
    # The dtype is named: torch would sum small integers in 64 bits.
    if product:
        return part.prod(dim, keepdim=True, dtype=total.dtype)
    return part.sum(dim, keepdim=True, dtype=total.dtype)


def cumsum(self: Tensor, dim: int, group: AxisGroup, dtype: str | None = None) -> Tensor:
    """As `torch.cumsum`."""
    out = torch.cumsum(self, dim, dtype=getattr(torch, dtype) if dtype else None)
    total = self.sum(dim, keepdim=True, dtype=out.dtype)
    return out + _before(total, dim % self.dim(), group, reverse=False, product=False)


def cumprod(self: Tensor, dim: int, group: AxisGroup, dtype: str | None = None) -> Tensor:
    """As `torch.cumprod`."""
    out = torch.cumprod(self, dim, dtype=getattr(torch, dtype) if dtype else None)
    total = self.prod(dim, keepdim=True, dtype=out.dtype)
    return out * _before(total, dim % self.dim(), group, reverse=False, product=True)


SCANS: Mapping[str, Callable[..., Tensor]] = {
    "aten.cumprod.default": cumprod,
    "aten.cumsum.default": cumsum,
    DELTA_RULE: split_delta_rule,
    STATE_SPACE: split_state_space,
}


def split_scan(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form of a scan whose dim is split."""
    return SCANS[call.operator.kind], {"group": group}


register("prefix", talks=split_scan)
