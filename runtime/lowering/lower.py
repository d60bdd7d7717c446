"""The doors of lowering: a program, a scheduled program of a stage, and the preamble of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.order.scheduled import Scheduled, scheduled
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.program import Compute, Program

from .builder import Arrival, Builder, Exchange
from .frame import Frame
from .program import LocalProgram, Time

__all__ = ["Arrival", "Exchange", "lower", "lower_preamble", "lower_scheduled", "same_operators"]


def lower(
    program: Program, groups: DeviceGroups, *, device: torch.device | str = "cpu"
) -> LocalProgram:
    """The local program of this rank; nodes carry the names of operators and tensors."""
    return lower_scheduled(scheduled(program), groups, device=device)


def lower_scheduled(
    plan: Scheduled,
    groups: DeviceGroups,
    *,
    device: torch.device | str = "cpu",
    time: Time | None = None,
    exchange: Exchange | None = None,
    late: bool = False,
) -> LocalProgram:
    """As `lower`, under a schedule.

    time: lower one micro-batch, where `plan` is that of the whole batch. exchange: the values that
    other stages hand over or read. late: weight gradients of matrix products may be computed apart
    from those of values.
    """
    exchange = Exchange() if exchange is None else exchange
    return Builder(plan, groups, torch.device(device), time, exchange, late=late).run()


def same_operators(plan: Scheduled, groups: DeviceGroups, first: Time, second: Time) -> bool:
    """Whether two micro-batches run the same local operators, so that one program serves both."""
    frames = [Frame(plan, groups, time) for time in (first, second)]
    computed = [
        item for item in plan.program.steps if isinstance(item, Compute) and frames[0].runs(item)
    ]
    return all(frames[0].local(item) == frames[1].local(item) for item in computed)


def lower_preamble(
    plan: Scheduled,
    groups: DeviceGroups,
    names: Sequence[str],
    *,
    device: torch.device | str = "cpu",
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """A module that computes the whole values `names` once a step, and the names of its arguments.

    It reads constants and inputs alone.
    """
    return Builder(plan, groups, torch.device(device), None, Exchange()).preamble(names)
