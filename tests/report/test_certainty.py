"""Intervals of predictions and the constants that are assumed, in words and as values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.calibration.intervals import MEMORY, STEP, memory_interval, step_interval
from autopar.costmodel.cluster.source import Source
from autopar.report.certainty import assumed_line, certainty_json, certainty_lines

PLAN: Any = SimpleNamespace(predicted=SimpleNamespace(step=2.0, memory=2.0**34))


def test_the_interval_is_around_the_figure() -> None:
    cluster = load_cluster("dgx-h100")
    actual = certainty_json(PLAN, cluster)
    low, high = actual["step_interval"]
    assert low < 2.0 < high and low == pytest.approx(2.0 * step_interval(cluster).low)
    assert actual["memory_interval"][1] == pytest.approx(2.0**34 * memory_interval().high)
    assert "device.launch" in actual["assumed_constants"]
    first, second = certainty_lines(PLAN, cluster)
    assert first.startswith("interval nine runs in ten take 1.") and "published runs" in first
    count = len(actual["assumed_constants"])
    assert second.startswith(f"assumed {count} constants of dgx-h100")
    assert second.endswith("autopar cluster show dgx-h100")


def test_devices_that_nobody_measured_are_less_sure() -> None:
    measured = step_interval(load_cluster("dgx-h100"))
    assumed = step_interval(load_cluster("mi300x"))
    assert assumed.low < measured.low < measured.high < assumed.high
    assert assumed.assumed and not measured.assumed


def test_a_cluster_without_assumptions_says_so() -> None:
    cluster = load_cluster("dgx-h100")
    plain = replace(
        cluster, sources={name: Source(text="a data sheet") for name in cluster.sources}
    )
    assert assumed_line(plain).startswith("assumed nothing")


def test_intervals_are_those_of_the_held_out_runs() -> None:
    assert STEP.low < 0 < STEP.middle < STEP.high and MEMORY.low < 0 < MEMORY.high
