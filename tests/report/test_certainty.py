"""Intervals of predictions and the constants that are assumed, in words and as values."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.calibration.intervals import memory_interval, step_interval
from autopar.costmodel.calibration.run_kinds import EXPERTS, NARROW_TYPES, UNMEASURED, WIDE_TYPES
from autopar.costmodel.cluster.source import Source
from autopar.report.certainty import (
    assumed_line,
    certainty_json,
    certainty_lines,
    fit_line,
    room_of,
    step_around,
)
from autopar.report.tables import gap_text

PLAN: Any = SimpleNamespace(
    predicted=SimpleNamespace(step=2.0, memory=2.0**34),
    model=SimpleNamespace(flops={"bfloat16": 1.0}),
    operators={"fc": SimpleNamespace(kind="aten.linear.default")},
)


def test_the_interval_is_around_the_figure() -> None:
    cluster = load_cluster("dgx-h100")
    actual = certainty_json(PLAN, cluster)
    low, high = actual["step_interval"]
    assert low < 2.0 < high and low == pytest.approx(2.0 * step_interval(cluster).low)
    assert actual["memory_interval"][1] == pytest.approx(2.0**34 * memory_interval().high)
    assert "device.launch" in actual["assumed_constants"]
    first, fits, second = certainty_lines(PLAN, cluster)
    assert first.startswith("interval nine runs in ten take 1.") and "published runs" in first
    assert fits.startswith("memory fits: 16.0 GiB are predicted of ")
    assert actual["fits_probability"] > 0.995
    count = len(actual["assumed_constants"])
    assert second.startswith(f"assumed {count} constants of dgx-h100")
    assert second.endswith("autopar cluster show dgx-h100")


def test_devices_that_nobody_measured_are_less_sure() -> None:
    measured = step_interval(load_cluster("dgx-h100"))
    by_sheet = step_interval(load_cluster("mi300x"))
    assert by_sheet.low <= measured.low < measured.high <= by_sheet.high
    assert by_sheet.high / by_sheet.low > measured.high / measured.low
    assert "kernels of other devices" in by_sheet.source.text
    bare = load_cluster("dgx-h100")
    bare = replace(bare, device=replace(bare.device, kernels=None))
    assumed = step_interval(bare)
    assert assumed.low < measured.low < measured.high < assumed.high
    assert assumed.assumed and not measured.assumed


def test_a_cluster_without_assumptions_says_so() -> None:
    cluster = load_cluster("dgx-h100")
    plain = replace(
        cluster, sources={name: Source(text="a data sheet") for name in cluster.sources}
    )
    assert assumed_line(plain).startswith("assumed nothing")


@pytest.mark.parametrize(
    ("flops", "operator", "kind"),
    [
        ("bfloat16", "aten.linear.default", WIDE_TYPES),
        ("float8_e4m3fn", "aten.linear.default", NARROW_TYPES),
        ("bfloat16", "autopar.experts", EXPERTS),
        ("float32", "aten.linear.default", UNMEASURED),
        ("bfloat16", "autopar.state_space_scan.default", UNMEASURED),
    ],
)
def test_a_plan_is_as_sure_as_runs_of_its_kind(flops: str, operator: str, kind: str) -> None:
    cluster = load_cluster("dgx-h100")
    plan: Any = SimpleNamespace(
        model=SimpleNamespace(flops={flops: 1.0}), operators={"one": SimpleNamespace(kind=operator)}
    )
    assert step_around(plan, cluster) == step_interval(cluster, kind)
    unread = cluster.run_by(replace(cluster.framework, name="neutral"))
    assert step_around(plan, unread) == step_interval(cluster, kind, profile=False)


def test_a_step_that_nearly_fills_a_device_may_not_fit() -> None:
    cluster = load_cluster("dgx-h100")
    line = fit_line(0.9 * room_of(cluster), cluster)
    assert re.match(r"memory fits in \d\d% of runs: ", line)
    assert fit_line(3 * room_of(cluster), cluster).startswith("memory does not fit: ")


@pytest.mark.parametrize(
    ("gap", "told"),
    [
        (0.1, "no plan takes less than 1.00 s, so that this one is at most 10.00% above the best"),
        (None, "not bounded"),
    ],
)
def test_a_gap_says_what_it_bounds(gap: float | None, told: str) -> None:
    plan: Any = SimpleNamespace(provenance=SimpleNamespace(gap=gap, lower_bound=1.0))
    assert gap_text(plan) == told
