"""The certainty of a prediction: its intervals, and the cluster's assumed constants.

An interval holds nine measurements in ten.
"""

from __future__ import annotations

from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.calibration.intervals import (
    Interval,
    assumed_constants,
    chance_to_fit,
    memory_interval,
    step_interval,
)
from autopar.costmodel.calibration.run_kinds import run_kind
from autopar.costmodel.device import FAMILIES
from autopar.costmodel.device.attention_kernels import price_of_attention
from autopar.costmodel.device.scans import SCANS
from autopar.ir.bodies import POINTWISE
from autopar.plan import Plan
from autopar.sharding.rules import RULES
from autopar.sharding.rules.contraction import INDEX_SCORES
from autopar.sharding.rules.experts import EXPERTS
from autopar.units import bytes_text, seconds_text


def step_around(plan: Plan, cluster: Cluster) -> Interval:
    """The interval of the plan's step, by what is known of runs of its kind."""
    kernels = cluster.device.kernels
    flops = plan.model.flops
    # Products of float32 run on units whose rates no table has where 16-bit products were measured.
    unknown = (
        kernels is not None and set(flops) == {"float32"} and "float32" not in kernels.products
    )
    kinds = {operator.kind for operator in plan.operators.values()}
    kind = run_kind(
        experts=EXPERTS in kinds,
        narrow=any(FAMILIES.get(dtype, "") in NARROW for dtype in flops),
        unmeasured=unknown or not kinds.isdisjoint({*SCANS, INDEX_SCORES}),
    )
    return step_interval(cluster, kind, profile=cluster.framework.name != UNREAD)


UNREAD = "neutral"
"""The framework that stands for one whose habits were not read."""
NARROW = ("float8", "float8_block", "float4")
"""Families of types of 8 bits or fewer."""


def room_of(cluster: Cluster) -> float:
    """Bytes of the smallest device that a step's tensors may take."""
    return min(pool.device.usable_memory for pool in cluster.pools)


def chance_text(chance: float) -> str:
    """The chance to fit, in words.

    >>> chance_text(0.9), chance_text(0.999), chance_text(0.001)
    ('fits in 90% of runs', 'fits', 'does not fit')
    """
    if chance >= SURE:
        return "fits"
    if chance <= 1 - SURE:
        return "does not fit"
    return f"fits in {chance:.0%} of runs"


SURE = 0.995
"""From this chance on nothing is said of runs that do not fit."""


def fit_text(nbytes: float, cluster: Cluster) -> str:
    """The chance that a step of so many predicted bytes fits a device, in words."""
    return chance_text(chance_to_fit(nbytes, room_of(cluster)))


def fits_surely(nbytes: float, cluster: Cluster) -> bool:
    """Whether a step of so many predicted bytes fits a device in 95 % of runs."""
    return nbytes * memory_interval().high <= room_of(cluster)


def memory_to_ask(cluster: Cluster) -> str:
    """The limit within which a plan fits in 95 % of runs, as `--memory` takes it."""
    return bytes_text(room_of(cluster) / memory_interval().high).replace(" ", "")


def fit_line(nbytes: float, cluster: Cluster) -> str:
    """A line with the chance that a step of so many predicted bytes fits a device."""
    return (
        f"memory {fit_text(nbytes, cluster)}: {bytes_text(nbytes)} are predicted of the "
        f"{bytes_text(room_of(cluster))} that a step may take"
    )


def certainty_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Lines with the intervals of step and memory, the chance to fit, and the assumed constants."""
    step = step_around(plan, cluster)
    memory = memory_interval()
    low, high = (seconds_text(plan.predicted.step * factor) for factor in (step.low, step.high))
    least, most = (
        bytes_text(plan.predicted.memory * factor) for factor in (memory.low, memory.high)
    )
    return [
        f"interval nine runs in ten take {low} to {high} and need {least} to {most} "
        f"({step.source.text})",
        fit_line(plan.predicted.memory, cluster),
        assumed_line(cluster),
    ]


def kernel_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Lines with kernels that a price assumes: compiled ones, and attention of another device."""
    kinds = {operator.kind for operator in plan.operators.values()}
    lines = ["gates and other pointwise trees are one compiled kernel each"]
    lines *= POINTWISE in kinds and cluster.fuses
    if not any(kind in RULES and len(RULES[kind].products) > 1 for kind in kinds):
        return lines
    devices = {pool.device.name: pool.device for pool in cluster.pools}
    kernel = cluster.framework.attention
    said = {name: price_of_attention(kernel, device) for name, device in devices.items()}
    return lines + [f"attention on {name}: {text}" for name, text in said.items() if text]


def assumed_line(cluster: Cluster) -> str:
    """A line with the number of assumed constants, and the command that lists them."""
    names = assumed_constants(cluster)
    if not names:
        return (
            f"assumed nothing: every constant of {cluster.name} is measured, fitted to "
            "measurements, or of a data sheet"
        )
    return (
        f"assumed {len(names)} constants of {cluster.name} that nothing measured: "
        f"autopar cluster show {cluster.name}"
    )


def certainty_json(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The intervals and assumed constants as plain values: seconds and bytes."""
    step = step_around(plan, cluster)
    memory = memory_interval()
    return {
        "step_interval": [plan.predicted.step * factor for factor in (step.low, step.high)],
        "memory_interval": [plan.predicted.memory * factor for factor in (memory.low, memory.high)],
        "fits_probability": chance_to_fit(plan.predicted.memory, room_of(cluster)),
        "interval_source": step.source.text,
        "assumed_constants": assumed_constants(cluster),
    }
