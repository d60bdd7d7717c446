"""The roofline: which side bounds an operator, and how matrix products lose on small dimensions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import contraction_fraction, load_cluster, operator_time
from autopar.errors import ClusterError

DEVICE = load_cluster("dgx-a100").device


def test_arithmetic_bounds_large_products_and_memory_the_rest() -> None:
    n = 8192
    product = float(operator_time(2 * n**3, 3 * n * n * 2, "bfloat16", DEVICE, smallest=n, launch=False))
    assert product == pytest.approx(2 * n**3 / (312e12 * 0.869 * n / (n + 96)))
    addition = float(operator_time(n * n, 3 * n * n * 2, "bfloat16", DEVICE, launch=False))
    assert addition == pytest.approx(3 * n * n * 2 / (1555e9 * 0.85))


def test_a_launch_is_paid_once_and_by_views_never() -> None:
    with_launch, fused = (operator_time([1e9, 0.0], [1e6, 0.0], "float32", DEVICE, launch=launch) for launch in (True, False))
    assert with_launch[0] - fused[0] == pytest.approx(DEVICE.launch)
    assert with_launch[1] == fused[1] == 0


def test_half_of_the_rate_at_half_size() -> None:
    assert float(contraction_fraction(DEVICE.half_size, DEVICE)) == pytest.approx(DEVICE.matmul_fraction / 2)
    assert np.all(np.diff(contraction_fraction([1, 2, 64, 4096], DEVICE)) > 0)


def test_arrays_broadcast() -> None:
    times = operator_time(np.ones((3, 1)) * 1e12, np.ones(4), "float32", DEVICE, smallest=np.array([1, 16, 256, 4096]))
    assert times.shape == (3, 4)


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ClusterError, match="unknown dtype 'fp32'"):
        operator_time(1, 1, "fp32", DEVICE)


@given(st.floats(0, 1e18), st.floats(0, 1e18), st.floats(0, 1e15), st.integers(1, 10**5))
def test_more_work_never_takes_less_time(flops: float, more: float, nbytes: float, smallest: int) -> None:
    times = operator_time([flops, flops + more], nbytes, "float16", DEVICE, smallest=smallest)
    assert times[0] <= times[1]
