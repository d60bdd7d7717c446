"""Devices without measured kernels: the roofline, and how their products lose on tiles, waves and
short inner sizes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import load_cluster
from autopar.costmodel.device.attention_kernels import price_of_attention
from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.unmeasured_kernels import (
    attention_arithmetic,
    contraction_fraction,
    plain_arithmetic,
)
from autopar.errors import ClusterError
from tests.costmodel.device.shapes import product

DEVICE = replace(
    load_cluster("dgx-a100").device,
    kernels=None,
    units=108,
    matmul_fraction=0.8,
    half_size=68,
    ragged_fraction=0.5,
    attention={"flash1.forward": 0.3, "flash2.forward": 0.5},
)
SMOOTH = replace(DEVICE, units=0)


def seconds(m: float, n: float, k: float, batch: float = 1.0, *, dtype: str = "bfloat16") -> float:
    return float(plain_arithmetic(product(m, n, k, batch), dtype, DEVICE)[0])


def test_whole_waves_of_large_tiles_reach_the_fraction() -> None:
    """108 tiles of 256 x 128 are one wave: nothing is lost but the prologue of every tile."""
    m = 256 * 12
    n = 128 * 9
    k = 16384
    best = 2 * m * n * k / (312e12 * DEVICE.matmul_fraction)
    assert seconds(m, n, k) == pytest.approx(best * (k + DEVICE.half_size) / k, rel=1e-12)


def test_one_tile_more_costs_no_less_than_its_share_of_another_wave() -> None:
    whole = seconds(256 * 12, 128 * 9, 4096)
    more = seconds(256 * 12 + 1, 128 * 9, 4096)
    assert whole * 1.05 < more <= whole * 2


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 64))
def test_no_product_beats_the_fraction_of_the_peak(m: int, n: int, k: int, batch: int) -> None:
    ideal = 2.0 * batch * m * n * k / (312e12 * DEVICE.matmul_fraction)
    assert seconds(m, n, k, batch) >= ideal * (1 - 1e-12)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_the_two_operands_may_change_places(m: int, n: int, k: int) -> None:
    """Away from the alignment of rows, which is not symmetric."""
    m = 8 * m
    n = 8 * n
    k = 8 * k
    assert seconds(m, n, k) == pytest.approx(seconds(n, m, k), rel=1e-12)


def test_long_inner_sizes_are_split_over_idle_units() -> None:
    assert seconds(128, 128, 1 << 16) < 0.5 * (1 << 16) * 2 * 128 * 128 * 108 / (
        312e12 * DEVICE.matmul_fraction
    )


def test_ragged_rows_are_slower() -> None:
    """Measured kernels too."""
    for device in (DEVICE, load_cluster("dgx-h100").device):
        odd, even = (
            float(product_seconds(product(4096, 4096, k), "bfloat16", device, itemsize=2)[0])
            for k in (4098, 4104)
        )
        assert odd == pytest.approx(even / device.ragged_fraction, rel=0.05)


def test_without_units_the_smallest_side_decides() -> None:
    assert float(contraction_fraction(SMOOTH.half_size, SMOOTH)) == pytest.approx(
        SMOOTH.matmul_fraction / 2
    )
    assert np.all(np.diff(contraction_fraction([1, 2, 64, 4096], SMOOTH)) > 0)
    actual = plain_arithmetic(product(4096, 8192, SMOOTH.half_size), "float16", SMOOTH)[0]
    assert actual == pytest.approx(
        2 * 4096 * 8192 * SMOOTH.half_size / (312e12 * SMOOTH.matmul_fraction / 2)
    )


def test_the_longer_of_arithmetic_and_traffic_bounds_and_a_view_is_free() -> None:
    times = with_launch([2.0, 1.0, 0.0], [1.0, 3.0, 0.0], DEVICE)
    assert times.tolist() == pytest.approx([2 + DEVICE.launch, 3 + DEVICE.launch, 0])
    assert float(memory_seconds(1e9, DEVICE)) == pytest.approx(
        1e9 / (DEVICE.memory_bandwidth * DEVICE.memory_fraction)
    )


def test_attention_kernels_have_rates_of_their_own() -> None:
    one, two = (
        float(attention_arithmetic(1e12, kernel, "forward", "float16", DEVICE))
        for kernel in ("flash1", "flash2")
    )
    assert one > 1.3 * two > 0
    with pytest.raises(ClusterError, match="unknown attention kernel 'flash9'"):
        attention_arithmetic(1e12, "flash9", "forward", "float16", DEVICE)


@pytest.mark.parametrize(
    ("kernel", "stand_in"), [("cudnn", "flash2"), ("flash3", "flash2"), ("flash1", "flash1")]
)
def test_the_nearest_kernel_stands_for_one_that_a_device_lacks(kernel: str, stand_in: str) -> None:
    asked, priced = (
        float(attention_arithmetic(1e12, name, "forward", "float16", DEVICE))
        for name in (kernel, stand_in)
    )
    assert asked == priced
    said = price_of_attention(kernel, DEVICE)
    assert said == ("" if kernel == stand_in else f"{kernel} is priced as {stand_in}")


def test_what_attention_without_a_measurement_is_priced_as_is_told() -> None:
    bare = replace(DEVICE, attention={})
    assert "at the rate of products" in price_of_attention("cudnn", bare)
    hopper = load_cluster("dgx-h100").device
    assert price_of_attention("flash3", hopper) == ""
    assert price_of_attention("flash2", hopper).startswith("flash2 is priced as fa3 (assumed: ")


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ClusterError, match="unknown dtype 'fp32'"):
        seconds(8, 8, 8, dtype="fp32")
