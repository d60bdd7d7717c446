"""Kernels of a state-space scan: the products of their chunks, and the states between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device import scan_kernels
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.products import Product
from autopar.costmodel.device.scan_kernels import Kernel, ScanKernels
from autopar.costmodel.frameworks import framework_named
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.rules.recurrent import STATE_SPACE
from benchmarks.validating.known.shape import StateSpace
from benchmarks.validating.known.transformer import transformer
from tests.benchmarks.known.hybrid import HYBRID
from tests.benchmarks.known.operator_seconds import operator_seconds

CLUSTER = load_cluster("dgx-h100")
STATE = StateSpace(heads=32, width=64, size=128, groups=8)
SHAPE = replace(HYBRID, layers=1, pattern="M", state=STATE)


def kernels_of_scan(state: StateSpace) -> ScanKernels:
    """The kernels of a scan of 1,024 rows on one device."""
    graph = transformer(replace(SHAPE, state=state), batch=1).graph
    call = Call.of(graph, next(op for op in graph.operators if op.kind == STATE_SPACE))
    rule = rule_of(call)
    local = np.array([[float(factor.size) for factor in rule.factors]])
    return ScanKernels(call, rule, local, "bfloat16", CLUSTER.device)


def test_the_products_of_a_scan_are_those_of_the_formula() -> None:
    """Per token 2 Q (g n + w) for the chunk's own rows and 4 n w for the states, w of all heads
    together. Backward scores, states, and what reads both are computed once more.
    """
    scan = kernels_of_scan(STATE)

    def flops(kernels: Iterable[Kernel]) -> float:
        products = [kernel.product for kernel in kernels if kernel.product is not None]
        return float(sum((2 * p.batch * p.m * p.n * p.k)[0] for p in products)) / 1024

    ahead = scan.ahead()
    back = scan.back()
    assert (len(ahead), len(back)) == (scan_kernels.FORWARD, scan_kernels.BACKWARD)
    assert flops(ahead) == 2.0 * (128 * (8 * 128 + 2048) + 2 * 128 * 2048)
    assert flops(back) == 2.0 * (128 * (3 * 8 * 128 + 3 * 2048) + 5 * 128 * 2048)


def test_states_are_written_wide_and_passed_on_narrow() -> None:
    """Longer chunks have fewer states, whose bytes are most of what a pass moves."""
    states = 8 * 32 * 64 * 128  # elements of 8 chunks of 32 heads
    short, long = (kernels_of_scan(replace(STATE, chunk=size)).ahead() for size in (128, 256))
    assert short[2].nbytes[0] == states * (4 + 2)
    assert long[2].nbytes[0] == short[2].nbytes[0] / 2
    assert short[1].nbytes[0] == 1024 * (2048 + 8 * 128) * 2 + states * 4


def test_the_backward_kernels_of_a_scan_compute_it_again() -> None:
    seconds = operator_seconds(SHAPE, CLUSTER, framework_named("megatron-core"))
    scan = next(one for name, one in seconds.items() if name.endswith(".chunks"))
    assert 2 * scan.forward < scan.backward < 5 * scan.forward


def test_elements_of_four_bits_are_aligned_without_their_scales() -> None:
    """Rows of 18,560 elements are 9,280 bytes, a multiple of 16; with their scales they are 10,440,
    which is none.
    """
    device = load_cluster("dgx-b200").device
    shapes = [
        Product(batch=np.ones(1), m=np.full(1, 8192.0), n=np.full(1, n), k=np.full(1, 4096.0))
        for n in (18560.0, 18432.0)
    ]
    one, other = (product_seconds(shape, "float4", device, itemsize=0.5625) for shape in shapes)
    assert one[0] / other[0] == pytest.approx(1.0, abs=0.1)
