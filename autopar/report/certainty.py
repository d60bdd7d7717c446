"""The certainty of a prediction: its intervals, and the cluster's assumed constants.

An interval holds nine measurements in ten.
"""

from __future__ import annotations

from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.calibration.intervals import (
    assumed_constants,
    memory_interval,
    step_interval,
)
from autopar.plan import Plan
from autopar.units import bytes_text, seconds_text


def certainty_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """A line with the intervals of step and memory, and one with the assumed constants."""
    step = step_interval(cluster)
    memory = memory_interval()
    low, high = (seconds_text(plan.predicted.step * factor) for factor in (step.low, step.high))
    least, most = (
        bytes_text(plan.predicted.memory * factor) for factor in (memory.low, memory.high)
    )
    return [
        f"interval nine runs in ten take {low} to {high} and need {least} to {most} "
        f"({step.source.text})",
        assumed_line(cluster),
    ]


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
    step = step_interval(cluster)
    memory = memory_interval()
    return {
        "step_interval": [plan.predicted.step * factor for factor in (step.low, step.high)],
        "memory_interval": [plan.predicted.memory * factor for factor in (memory.low, memory.high)],
        "interval_source": step.source.text,
        "assumed_constants": assumed_constants(cluster),
    }
