"""The forms of kernels beside their formulas written out for one shape at a time, with every
constant at work.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.device.attention import BACKWARD_RATE, BACKWARD_WORK, AttentionForm, Scores
from autopar.costmodel.device.grouped_products import Dealt, GroupedForm, Layer
from autopar.costmodel.device.kernel_seconds import (
    experts_kernel,
    grouped_seconds,
    product_seconds,
    stands_for,
)
from autopar.costmodel.device.products import Clock, Library, Product, ProductForm, Speed
from autopar.errors import ClusterError
from benchmarks.kernels.libraries import seconds_in

SPEED = Speed(flops=3e14, memory=1.5e12, reference=2e12, units=60)
BURST = Clock(rate=0.85, heat=0.12, warm=9e-4)
LASTING = Clock(rate=0.8, heat=0.3, warm=4e-5)
PRODUCT = ProductForm(
    burst=BURST,
    sustained=LASTING,
    square=1.05,
    whole=0.93,
    half=0.81,
    quarter=0.6,
    prologue=17.0,
    epilogue=90.0,
    launch=2.5e-6,
    stream=0.83,
    cache=4.1,
    quantum=0.3,
    split=3e-6,
    blend=2.7,
    held=3e6,
    libraries={"lib fp8": Library(factor=1.07, passes=2.2, start=1.5e-6, held=5e6)},
)
ATTENTION = AttentionForm(
    burst=BURST,
    sustained=LASTING,
    start=70.0,
    edge=40.0,
    quantum=0.6,
    longest=0.8,
    grouped=1.1,
    launch=9e-6,
    passes=0.7,
    blend=2.9,
    held=4e6,
    backward_rate=0.8,
    widths={"64": 0.7},
)
GROUPED = GroupedForm(
    burst=BURST,
    sustained=LASTING,
    small=0.4,
    prologue=80.0,
    quantum=0.35,
    stream=0.7,
    blend=3.1,
    passes=1.3,
    tokens=2.1,
    expert=2e-7,
    others=0.04,
    uneven=0.2,
    launch=1.7e-5,
)
TILES = [
    (256, 256),
    (256, 128),
    (128, 256),
    (192, 128),
    (128, 192),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
]


def up(value: float) -> int:
    return math.ceil(value - 1e-12)


def warmed(busy: float, compute: float, clock: Clock) -> float:
    h = (compute / clock.warm) ** 2
    return busy * (1 + clock.heat * h / (1 + h))


def rounds(each: float, quantum: float) -> float:
    return 1.0 if each <= 1 else each + quantum * (up(each) - each)


def reached(area: int) -> float:
    points = [(12, 0.6), (13, 0.81), (14, 0.93), (15, 1.0), (16, 1.05)]
    at = math.log2(area)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= at <= x1:
            return float(y0 * (y1 / y0) ** ((at - x0) / (x1 - x0)))
    raise AssertionError(area)


def product_written_out(b: int, m: int, n: int, k: int, clock: Clock, itemsize: float) -> float:
    best = math.inf
    for (rows, columns), s in itertools.product(TILES, (1, 2, 3, 4, 6, 8, 16)):
        tiles = b * up(m / rows) * up(n / columns) * s
        inner = up(k / s / 64) * 64
        work = 2 * rows * columns * (inner / reached(rows * columns) + 90.0) + 2 * 128 * 128 * 17.0
        spent = rounds(tiles / 60, 0.3) * work * 60 / (3e14 * clock.rate)
        cache = 2e12 * 4.1
        loaded = tiles * (rows + columns) * k / s * itemsize / cache
        summed = b * m * n * 8 * s / cache + 3e-6 if s > 1 else 0.0
        best = min(best, max(spent, loaded) + summed)
    moved = b * ((m * k + k * n) * itemsize + m * n * 2)
    traffic = moved * moved / (moved + 3e6) / (1.5e12 * 0.83)
    return 2.5e-6 + warmed((best**2.7 + traffic**2.7) ** (1 / 2.7), best, clock)


SHAPES = [
    (1, 4096, 4096, 4096),
    (1, 128, 8192, 1024),
    (3, 100, 300, 77),
    (1, 256, 256, 65536),
    (8, 2048, 128, 64),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sustained", [False, True])
def test_products(shape: tuple[int, int, int, int], sustained: bool) -> None:
    b, m, n, k = (np.array([float(side)]) for side in shape)
    one = Product(batch=b, m=m, n=n, k=k)
    expected = product_written_out(*shape, LASTING if sustained else BURST, 2.0)
    assert float(
        PRODUCT.seconds(one, SPEED, itemsize=2.0, sustained=sustained)[0]
    ) == pytest.approx(expected, rel=1e-9)
    read = 2.0 * math.prod((shape[0], shape[1], shape[3]))
    expected = (
        1.07 * product_written_out(*shape, BURST, 1.0)
        + 1.5e-6
        + 2.2 * read / 1.5e12 * read / (read + 5e6)
    )
    assert float(
        seconds_in(PRODUCT, "lib fp8", one, SPEED, itemsize=1.0, sustained=False)[0]
    ) == pytest.approx(expected, rel=1e-9)


def test_bytes_and_slower_arithmetic_may_be_given() -> None:
    one = Product(batch=np.ones(1), m=np.array([512.0]), n=np.array([512.0]), k=np.array([512.0]))
    quick = replace(PRODUCT, blend=12.0, held=0.0)
    far = float(quick.seconds(one, SPEED, itemsize=2, nbytes=np.array([1e10]))[0])
    assert far == pytest.approx(quick.launch + 1e10 / (1.5e12 * 0.83), rel=0.01)
    plain, slow = (
        float(
            quick.seconds(one, SPEED, itemsize=2, nbytes=np.zeros(1), slower=by, sustained=False)[0]
        )
        for by in (1.0, 3.0)
    )
    assert slow - quick.launch == pytest.approx(3 * (plain - quick.launch), rel=0.01)


AttentionCase = tuple[int, int, int, int, int, int, int, bool]
"""Batch, heads, heads of keys, queries, keys, width of a head, window (0: none), causal."""


def attention_written_out(case: AttentionCase, clock: Clock) -> tuple[float, float]:
    """Seconds but for launch and passes, and those of its traffic."""
    b, h, kv, q, s, d, window, causal = case
    keys = up(s / 128) * 128
    seen = (
        min((keys + 128) / 2 if causal else keys, window + 128 + 40.0 if window else math.inf)
        + 70.0
    )
    most = min(keys, window + 128 + 40.0 if window else math.inf) + 70.0
    each = b * h * up(q / 128) / 60
    rate = {64: 0.7, 96: 0.85, 128: 1.0}[d]
    block = 4 * d * 128 * 60 / (3e14 * clock.rate * rate)
    compute = (
        (1.1 if kv < h else 1.0) * block * max(seen * (each + 0.6 * (up(each) - each)), 0.8 * most)
    )
    moved = 2 * 2 * b * d * (h * q + kv * s)
    traffic = moved / 1.5e12 * moved / (moved + 4e6)
    return warmed((compute**2.9 + traffic**2.9) ** (1 / 2.9), compute, clock), traffic


CASES = [
    (2, 16, 16, 2048, 2048, 128, 0, True),
    (1, 8, 2, 300, 900, 64, 0, False),
    (4, 12, 4, 8192, 8192, 96, 1000, True),
    (1, 1, 1, 128, 128, 128, 0, True),
    (1, 4, 4, 128, 32768, 128, 4096, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sustained", [False, True])
def test_attention(case: AttentionCase, sustained: bool) -> None:
    b, h, kv, q, s, d, w = (np.array([float(size)]) for size in case[:7])
    scores = Scores(
        batch=b,
        heads=h,
        kv_heads=kv,
        queries=q,
        keys=s,
        width=d,
        window=w,
        causal=np.array([case[7]]),
    )
    busy, traffic = attention_written_out(case, LASTING if sustained else BURST)
    forward = ATTENTION.seconds(scores, SPEED, sustained=sustained)
    backward = ATTENTION.backward(scores, SPEED, sustained=sustained)
    assert float(forward[0]) == pytest.approx(9e-6 + busy + 0.7 * traffic, rel=1e-9)
    assert float(backward[0]) == pytest.approx(27e-6 + busy * BACKWARD_WORK / 0.8, rel=1e-9)
    assert (
        replace(ATTENTION, backward_rate=BACKWARD_RATE).backward(scores, SPEED)[0]
        < ATTENTION.backward(scores, SPEED)[0]
    )


def grouped_written_out(
    rows: float, active: float, tiles: list[float], weight: tuple[int, int], slower: float
) -> float:
    """Seconds of one product of a layer of experts, `weight`: its columns and inner size."""
    n, k = weight
    best = math.inf
    for size, count in zip((16, 32, 64, 128, 256), tiles, strict=True):
        rate = (size / 128) ** (0.4 if size < 128 else 0.04)
        work = 2 * size * 128 * (k / rate + 80.0) * 60 / (3e14 * LASTING.rate)
        best = min(best, rounds(count * up(n / 128) / 60, 0.35) * work)
    compute = best * slower
    traffic = ((active * n + rows) * k * 2 + 2 * rows * n) / (1.5e12 * 0.7)
    return warmed((compute**3.1 + traffic**3.1) ** (1 / 3.1), compute, LASTING)


@pytest.mark.parametrize(
    ("tokens", "experts", "gated", "even"),
    [(4096, 8, True, True), (300, 64, False, True), (20000, 16, True, False)],
)
def test_layers_of_experts(tokens: int, experts: int, gated: bool, even: bool) -> None:
    rows = 2.0 * tokens
    active = float(min(experts, 2 * tokens))
    tiles = [active * up(rows / active / size) for size in (16, 32, 64, 128, 256)]
    dealt = Dealt.evenly(np.array([rows]), np.array([float(experts)]))
    width = 1024
    inner = 768
    others = 5000.0
    layer = Layer(
        dealt=dealt,
        tokens=np.array([float(tokens)]),
        experts=np.array([float(experts)]),
        width=np.array([float(width)]),
        inner=np.array([float(inner)]),
        gated=np.array([gated]),
        others=np.array([others]),
        even=np.array([even]),
    )
    more = [
        count + 0.04 * others / size
        for count, size in zip(tiles, (16, 32, 64, 128, 256), strict=True)
    ]
    slower = 1.0 if even else 1.2
    shapes = ((inner * (2 if gated else 1), width), (width, inner))
    busy = sum(grouped_written_out(rows, active, more, shape, slower) for shape in shapes)
    moved = 1.3 * rows * (2 * width + 3 * inner) + 2.1 * 2 * tokens * width
    expected = 1.7e-5 + busy + moved / 1.5e12 + 2e-7 * experts
    assert float(GROUPED.seconds(layer, SPEED, itemsize=2, sustained=True)[0]) == pytest.approx(
        expected, rel=1e-9
    )


def test_sixteen_bits_stand_for_each_other_and_for_what_was_not_measured() -> None:
    h100, v100 = (load_cluster(name).device for name in ("dgx-h100", "p3.16xlarge"))
    assert h100.kernels is not None and v100.kernels is not None
    actual = [stands_for(name, h100.kernels) for name in ("float16", "float8", "float32", "int")]
    assert actual == ["bfloat16", "float8", "bfloat16", "bfloat16"]
    assert [stands_for(name, v100.kernels) for name in ("bfloat16", "float32")] == [
        "float16",
        "float16",
    ]
    assert (
        experts_kernel("float16", h100.kernels)
        == experts_kernel("bfloat16", h100.kernels)
        is not None
    )
    assert (
        experts_kernel("float32", h100.kernels) is None
        and experts_kernel("float16", v100.kernels) is None
    )
    batch, m, n, k = (np.array([size]) for size in (8.0, 2048.0, 4096.0, 2048.0))
    each = Product(batch=batch, m=m, n=n, k=k)
    assert grouped_seconds(each, "float16", h100) == grouped_seconds(each, "bfloat16", h100)
    form = replace(h100.kernels, products={"float64": h100.kernels.products["bfloat16"]})
    assert stands_for("float32", form) == "float64"
    one = Product(
        batch=np.ones(1), m=np.array([4096.0]), n=np.array([4096.0]), k=np.array([4096.0])
    )
    single, double = (
        float(product_seconds(one, dtype, h100, itemsize=4)[0]) for dtype in ("bfloat16", "float32")
    )
    assert double > 5 * single


def test_a_rank_of_a_shared_host_has_its_share_of_everything() -> None:
    device = replace(load_cluster("dgx-h100").device, host_bandwidth=3e10, host_memory=2e11)
    half = device.shared(0.5)
    scaled = ("memory_bandwidth", "memory_capacity", "reserved", "host_bandwidth", "host_memory")
    assert [getattr(half, name) for name in scaled] == pytest.approx(
        [0.5 * getattr(device, name) for name in scaled]
    )
    assert half.peak == {family: 0.5 * value for family, value in device.peak.items()}
    assert half.usable_memory == 0.5 * device.usable_memory
    assert (half.launch, half.memory_fraction, half.kernels) == (
        device.launch,
        device.memory_fraction,
        device.kernels,
    )
    bare = replace(device, host_bandwidth=None, host_memory=None).shared(2.0)
    assert bare.host_bandwidth is None and bare.host_memory is None


@pytest.mark.parametrize("reserved", [8e10, 9e10])
def test_memory_that_is_all_reserved_is_refused(reserved: float) -> None:
    with pytest.raises(ClusterError, match="nothing is left"):
        replace(load_cluster("dgx-h100").device, memory_capacity=8e10, reserved=reserved)
