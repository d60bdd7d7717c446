"""How far prices may be off: what rows said where there are rows, a wide interval that says it is
assumed where there are none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import dump, load_cluster
from autopar.costmodel.calibration.intervals import (
    BACKWARD,
    MEMORY,
    WIDE,
    chance_to_fit,
    kernel_interval,
    step_interval,
)
from autopar.costmodel.calibration.run_kinds import EXPERTS, RUN_KINDS, UNMEASURED, run_kind
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.costmodel.cluster.residual import Residual, left_by
from autopar.costmodel.device.measured_kernels import SHEET, Fitted, kernels_of, measured
from autopar.errors import ClusterError
from benchmarks.fitting.collective_intervals import collective_interval

H100 = load_cluster("dgx-h100")


def test_products_have_the_interval_of_their_fit() -> None:
    fit = kernels_of("h100_sxm").fits["products bfloat16"]
    for dtype in ("bfloat16", "float16"):
        actual = kernel_interval(H100, "products", dtype)
        assert (actual.low, actual.middle, actual.high) == pytest.approx(
            [math.exp(x) for x in (fit.low, fit.middle, fit.high)]
        )
        assert (actual.rows, actual.source.kind, actual.assumed) == (fit.rows, "fitted", False)
    assert (
        kernel_interval(H100, "products", "float8_e4m3fn").rows
        == kernels_of("h100_sxm").fits["products float8"].rows
    )
    assert (
        kernel_interval(H100, "grouped", "bfloat16").rows
        == kernels_of("h100_sxm").fits[f"grouped {_experts()}"].rows
    )


def _experts() -> str:
    return kernels_of("h100_sxm").experts["bfloat16"]


def test_attention_is_wider_where_a_ratio_or_a_rule_is_assumed() -> None:
    fit = kernels_of("h100_sxm").fits["attention fa3"]
    forward, backward = (
        kernel_interval(H100, "attention", "flash3", direction=way)
        for way in ("forward", "backward")
    )
    assert (forward.low, forward.high) == pytest.approx((math.exp(fit.low), math.exp(fit.high)))
    assert (backward.low, backward.high) == pytest.approx(
        (forward.low / BACKWARD, forward.high * BACKWARD)
    )
    assert not forward.assumed and backward.assumed and backward.rows == fit.rows
    other = kernel_interval(H100, "attention", "flash2")
    assert other.assumed and (other.low, other.high) == pytest.approx(
        (backward.low, backward.high)
    ), "FlashAttention-3 and a ratio"


@pytest.mark.parametrize(
    ("preset", "kind", "what"),
    [
        ("local-cpu", "products", "bfloat16"),  # no kernels at all
        ("rtx4090", "products", "bfloat16"),  # those of another device
        ("dgx-h100", "products", "float32"),  # no rows of this dtype
        ("dgx-h100", "elementwise", ""),
        ("dgx-h100", "attention", "flash9"),
        ("local-cpu", "grouped", "bfloat16"),
    ],
)
def test_what_was_not_measured_is_wide_and_says_so(preset: str, kind: str, what: str) -> None:
    actual = kernel_interval(load_cluster(preset), kind, what)
    assert (actual.low, actual.high) == WIDE[kind] and actual.assumed and actual.rows == 0


@pytest.mark.parametrize(
    ("kind", "what", "fit"),
    [
        ("products", "bfloat16", "products bfloat16"),
        ("products", "float8_e4m3fn", "products float8"),
        ("grouped", "bfloat16", "grouped bfloat16"),
    ],
)
def test_a_device_by_its_data_sheet_is_as_sure_as_devices_left_out(
    kind: str, what: str, fit: str
) -> None:
    left = kernels_of(SHEET).fits[fit]
    actual = kernel_interval(load_cluster("mi300x"), kind, what)
    assert (actual.low, actual.high) == pytest.approx((math.exp(left.low), math.exp(left.high)))
    if kind == "products":
        measured = kernel_interval(H100, kind, what)
        assert actual.high / actual.low > measured.high / measured.low


def test_steps_of_every_kind_have_an_interval_and_unmeasured_kernels_the_widest() -> None:
    around = {kind: step_interval(H100, kind) for kind in RUN_KINDS}
    widths = {kind: one.high / one.low for kind, one in around.items()}
    assert max(widths, key=widths.__getitem__) == UNMEASURED
    assert min(widths, key=widths.__getitem__) != EXPERTS
    with pytest.raises(ClusterError, match="unknown kind of run 'fast': valid are 16 bits"):
        step_interval(H100, "fast")
    assert run_kind(experts=True, narrow=True, unmeasured=False) == EXPERTS


def test_steps_by_the_habits_of_most_frameworks_are_less_sure() -> None:
    for kind in RUN_KINDS:
        read, unread = (step_interval(H100, kind, profile=known) for known in (True, False))
        assert unread.low <= read.low and unread.high >= read.high
    assert step_interval(H100, profile=False).high > step_interval(H100).high


def test_the_chance_to_fit_falls_with_the_bytes_and_has_the_stated_quantiles() -> None:
    chances = [chance_to_fit(nbytes, 1.0) for nbytes in np.linspace(0.5, 1.5, 20)]
    assert chances == sorted(chances, reverse=True) and chances[0] > 0.99 and chances[-1] < 0.05
    for share, left in ((0.05, MEMORY.low), (0.5, MEMORY.middle), (0.95, MEMORY.high)):
        assert chance_to_fit(1.0, math.exp(left)) == pytest.approx(share, abs=1e-4)
    assert chance_to_fit(0.0, 1.0) == 1.0


def test_profiled_devices_know_their_products_and_streams_but_not_their_attention() -> None:
    cluster = load_cluster("p3.16xlarge")
    assert kernel_interval(cluster, "products", "float16").rows > 100
    assert not kernel_interval(cluster, "elementwise").assumed
    for kind, what in (("products", "float32"), ("attention", "flash2"), ("grouped", "float16")):
        assert kernel_interval(cluster, kind, what).assumed, kind


def test_a_fit_without_residuals_says_nothing() -> None:
    kernels = kernels_of("h100_sxm")
    fits = {"products bfloat16": Fitted(kind="fitted", source="x", rows=9)}
    cluster = replace(H100, device=replace(H100.device, kernels=replace(kernels, fits=fits)))
    assert kernel_interval(cluster, "products", "bfloat16").assumed


def test_mistakes_are_named() -> None:
    with pytest.raises(ClusterError, match="unknown kind of kernels 'links': valid are"):
        kernel_interval(H100, "links")
    with pytest.raises(ClusterError, match="unknown dtype 'bf16'"):
        kernel_interval(H100, "products", "bf16")


@pytest.mark.parametrize(
    ("kind", "as_kind"),
    [("all_reduce", "all_reduce"), ("send", "all_to_all"), ("broadcast", "all_gather")],
)
def test_collectives_have_the_interval_of_their_level_and_size(kind: str, as_kind: str) -> None:
    for nbytes in (1e3, 2.0**20, 1e9):
        left = H100.level("nvlink").residuals[left_by(as_kind, nbytes)]
        actual = collective_interval(kind, nbytes, 8, level="nvlink", cluster=H100)
        assert (actual.low, actual.high, actual.rows) == (
            pytest.approx(math.exp(left.low)),
            pytest.approx(math.exp(left.high)),
            left.rows,
        )
        assert not actual.assumed
    assert left_by(as_kind, 2**20 - 1) != left_by(as_kind, 2**20)


def test_the_outermost_level_counts_and_a_group_of_one_sends_nothing() -> None:
    among = H100.sized(16)
    across = collective_interval("all_reduce", 1e9, 16, level="nvlink:8+nic:2", cluster=among)
    assert across.assumed and (across.low, across.high) == WIDE["collectives"]
    alone = collective_interval("all_reduce", 1e9, 1, level="nvlink", cluster=H100)
    assert (alone.low, alone.high) == (1.0, 1.0)


def test_a_measured_curve_has_its_own_interval() -> None:
    curve = Measured(
        kind="all_reduce",
        level="nvlink",
        group=8,
        curve=Curve(alpha=1e-5, beta=1e-11),
        residual=0.05,
        spread=0.02,
    )
    actual = collective_interval(
        "all_reduce", 1e6, 8, level="nvlink", cluster=replace(H100, measured=(curve,))
    )
    assert (actual.low, actual.high, actual.source.kind) == (
        pytest.approx(math.exp(-0.12)),
        pytest.approx(math.exp(0.12)),
        "measured",
    )


def test_links_that_are_assumed_to_be_alike_have_no_residuals() -> None:
    assert list(load_cluster("p3.16xlarge").level("nvlink").residuals) == [
        "all_reduce from 1 MiB"
    ], "rows that nothing was fitted to"
    assert not load_cluster("mi300x").levels[0].residuals
    assert "residuals" in dump(H100)


@pytest.mark.parametrize("name", measured())
def test_every_fit_states_an_interval(name: str) -> None:
    for what, fit in kernels_of(name).fits.items():
        if fit.kind == "assumed":
            continue
        assert -1.5 < fit.low < fit.middle < fit.high < 1.5, what
        assert abs(fit.middle) < 0.12, what


def test_quantiles_are_those_of_one_row_more() -> None:
    """After n rows drawn alike, one in ten of the next rows lies outside of the quantiles."""
    drawn = np.random.default_rng(1).normal(size=(400, 40))
    outside = 0.0
    for row in drawn:
        left = Residual.of(row[:39])
        outside += not left.low <= row[39] <= left.high
    assert outside / 400 == pytest.approx(0.1, abs=0.03)
