"""Steps whose collectives and operators take stated times: as they are played, and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.costmodel import load_cluster
from autopar.costmodel.step.covered import Seconds
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.timeline import Timeline, step_timeline
from autopar.order.execution import Execution
from autopar.order.scheduled import Scheduled
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.operators import Function, function_of
from autopar.runtime.operators.functions import known_as
from autopar.runtime.ranks.world import World
from autopar.runtime.strict_backend import holding
from autopar.runtime.strict_backend.lateness import now, wait_until
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Compute
from tests.runtime.virtual_clock import VirtualClock

SLOW = ("aten.tanh.default", "aten.gelu.default", "aten.add.Tensor", "aten.mul.Tensor")
"""The operators whose computation takes time; that of others takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a slow operator forward and backward, and of collectives by kind."""

    forward: float = 0.02
    backward: float = 0.04
    kinds: Mapping[str, float] = field(
        default_factory=lambda: {
            "all_gather": 0.03,
            "reduce_scatter": 0.035,
            "all_reduce": 0.01,
            "all_to_all": 0.015,
        }
    )

    def hold(self, kind: str, ranks: tuple[int, ...]) -> float:
        """The seconds of an operation, as the backend asks for them; others take none."""
        return self.kinds.get(kind, 0.0)

    def seconds_in(self, plan: Scheduled) -> Callable[[Compute], Seconds]:
        """The seconds of an operator of a plan; masks and tables have no backward pass."""
        gradients = plan.program.assignment.gradients

        def seconds(step: Compute) -> Seconds:
            slow = step.operator.kind in SLOW
            trained = not gradients.isdisjoint(step.operator.outputs)
            return Seconds(self.forward * slow, self.backward * (slow and trained))

        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(MeshPrices):
    """The stated times as prices; transfers do not slow each other down."""

    times: Times

    def seconds(self, kind: str, axes: Axes, nbytes: int) -> float:
        """The stated time."""
        return self.times.kinds[kind]

    def uses(self, axes: Axes) -> dict[str, float]:
        """No link that another group uses."""
        return {}


def played(plan: Execution, times: Times) -> Timeline:
    mesh = plan.micro.program.assignment.mesh
    prices = Prices(cluster=load_cluster("dgx-a100"), mesh=mesh, times=times)
    return step_timeline(plan.micro, prices, times.seconds_in(plan.micro))


def all_played(plans: Sequence[Execution], times: Times) -> list[float]:
    return [played(plan, times).step for plan in plans]


# --- on ranks ---


class Model(NamedTuple):
    """A model with its parameters and inputs."""

    analysis: Analysis
    values: Mapping[str, Tensor]
    inputs: Sequence[Tensor]


class _Takes(torch.autograd.Function):
    """A value that takes its time in both passes, while times are stated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: Times) -> Tensor:
        ctx.times = times
        wait_until(now() + times.forward)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wait_until(now() + ctx.times.backward)
        return gradients[0], None


def _slow(kind: str, times: Times) -> Function:
    function = function_of(kind)

    def call(**arguments: Any) -> Tensor:
        value: Tensor = _Takes.apply(function(**arguments), times)  # type: ignore[no-untyped-call]
        return value

    return call


def _module(plan: Execution, model: Model, times: Times) -> ParallelModule:
    """The planned module, some of whose operators take their time."""
    with ExitStack() as stack:
        for kind in SLOW:
            stack.enter_context(known_as(kind, _slow(kind, times)))
        module = ParallelModule(plan, World.of(plan), model.values)
        # Programs of unlike micro-batches are made when they are asked for.
        for stage in module.engine.stages.values():
            for index in range(stage.count):
                stage.program(index)
        return module


def _taken(plans: Sequence[Execution], model: Model, times: Times) -> list[float]:
    """The seconds of a step of each plan on this rank."""
    clock = VirtualClock()
    results = []
    for plan in plans:
        ours = _module(plan, model, times)

        def step(ours: ParallelModule = ours) -> float:
            begun = clock.now()
            ours.loss(*model.inputs).backward()  # type: ignore[no-untyped-call]
            return clock.now() - begun

        step()
        dist.barrier()
        with holding(times.hold, clock):
            results.append(step())
    return results


def measured(plans: Sequence[Execution], model: Model, times: Times) -> list[float]:
    """The seconds of a step of each plan on its slowest rank, by a virtual clock."""
    each = run_ranks(_taken, plans[0].devices, plans, model, times, timeout=300.0)
    return [max(taken) for taken in zip(*each, strict=True)]
