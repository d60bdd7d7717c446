"""The speed of a plan in the units of training logs, and what a run of many tokens takes.

    MFU = sum over types (FLOPs of a step / peak FLOP/s) / (devices * seconds of a step)
    device hours = steps * seconds of a step * devices / 3600, steps = tokens / tokens of a step

Devices are those that the plan was given, idle ones too: they are paid for. The FLOPs are the
model's (`autopar.sharding.model_flops`), without what is recomputed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.errors import ClusterError, UsageError
from autopar.plan import Plan
from autopar.plan_parts import InputSpec

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The work of a step, and its seconds.

    `samples`, `sequence`: of the global batch; the sequence is 0 where inputs are no tokens.
    `flops`: of the model's products. `busy`: seconds that they take one device at its peaks (None:
    a peak is unknown).
    """

    step: float
    devices: int
    samples: int
    sequence: int
    flops: float
    busy: float | None

    @property
    def tokens(self) -> int:
        """Tokens of a step; 0 where inputs are no tokens."""
        return self.samples * self.sequence

    @property
    def samples_per_second(self) -> float:
        """Samples a second of all devices."""
        return self.samples / self.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices."""
        return self.tokens / self.step

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of a device that the model asked for."""
        return self.flops / (self.step * self.devices)

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that these are."""
        return self.busy / (self.step * self.devices) if self.busy else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A run that is asked about: its tokens, and the price of a device and hour."""

    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("price", self.price)):
            if value is not None and not (0 < value < math.inf):
                raise UsageError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a run; without tokens, of a step.

    `money`: in the unit of the price, if there is one.
    """

    steps: float
    seconds: float
    device_hours: float
    money: float | None


def throughput_of(plan: Plan, cluster: Cluster | None = None, step: float = 0.0) -> Throughput:
    """The speed of a plan.

    `cluster`: with the peaks of the devices. `step`: seconds of another plan for the same model.
    """
    samples, sequence = _sizes(plan)
    return Throughput(
        step=step or plan.predicted.step,
        devices=plan.devices + plan.unused,
        samples=samples,
        sequence=sequence,
        flops=sum(plan.model.flops.values()),
        busy=_busy(plan, cluster) if cluster is not None else None,
    )


def cost_of(speed: Throughput, budget: Budget) -> Cost:
    """The cost of the tokens of the budget, or of one step without any."""
    if budget.tokens is not None and not speed.tokens:
        raise UsageError(
            "the model's inputs are no sequences of tokens, so that a number of tokens says "
            "nothing about its steps"
        )
    steps = budget.tokens / speed.tokens if budget.tokens is not None else 1.0
    hours = steps * speed.step * speed.devices / HOUR
    return Cost(
        steps=steps,
        seconds=steps * speed.step,
        device_hours=hours,
        money=hours * budget.price if budget.price is not None else None,
    )


def is_tokens(spec: InputSpec) -> bool:
    """Whether an input is of token numbers: [batch, sequence] of integers."""
    return len(spec.shape) == 2 and spec.dtype.startswith(("int", "uint"))


def _sizes(plan: Plan) -> tuple[int, int]:
    """Samples of the global batch, and tokens of each."""
    shaped = [spec for spec in plan.model.inputs.values() if spec.shape]
    if not shaped:
        return 1, 0
    first = next(filter(is_tokens, shaped), None)
    return (first.shape[0], first.shape[1]) if first else (shaped[0].shape[0], 0)


def _busy(plan: Plan, cluster: Cluster) -> float | None:
    """Seconds of the products on one device at its peaks, the mean of them if there are several."""
    devices = sum(pool.devices for pool in cluster.pools)
    try:
        return sum(
            flops
            / (sum(pool.devices * pool.device.flops(kind) for pool in cluster.pools) / devices)
            for kind, flops in plan.model.flops.items()
        )
    except ClusterError:
        return None
