"""Forms of measured kernels: tiles and waves, what a mask skips, uneven experts, and constants that
say how good they are.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import dump, load_cluster
from autopar.costmodel.device.attention import BACKWARD_RATE, BACKWARD_WORK, AttentionForm, Scores
from autopar.costmodel.device.grouped_products import Dealt, GroupedForm, GroupedProduct
from autopar.costmodel.device.kernel_seconds import (
    AttentionWork,
    attention_seconds,
    large_product_rate,
    product_seconds,
)
from autopar.costmodel.device.measured_kernels import (
    Kernels,
    dumped,
    kernels_from,
    kernels_of,
    measured,
)
from autopar.costmodel.device.products import Clock, Product, ProductForm, Speed, heated
from autopar.errors import ClusterError
from tests.costmodel.device.shapes import product

SPEED = Speed(flops=1e15, memory=2e12, reference=2e12, units=100)
COLD = Clock(rate=0.8, heat=0.0, warm=1.0)
FORM = ProductForm(
    burst=COLD,
    sustained=replace(COLD, heat=0.25, warm=1e-5),
    square=1.0,
    whole=0.9,
    half=0.7,
    quarter=0.5,
    prologue=0.0,
    epilogue=0.0,
    launch=3e-6,
    stream=0.8,
    cache=50.0,
    quantum=1.0,
    split=0.0,
    blend=12.0,
)
ATTENTION = AttentionForm(
    burst=COLD,
    sustained=COLD,
    start=0.0,
    edge=0.0,
    quantum=0.0,
    longest=0.2,
    grouped=1.0,
    launch=5e-6,
    passes=0.0,
    blend=12.0,
    widths={"64": 0.6, "256": 1.1},
)
GROUPED = GroupedForm(
    burst=COLD,
    sustained=COLD,
    small=0.5,
    prologue=0.0,
    quantum=1.0,
    stream=0.8,
    blend=12.0,
    passes=0.0,
    tokens=0.0,
    expert=0.0,
    others=0.0,
    uneven=0.0,
    launch=1e-5,
)


def seconds(
    m: float,
    n: float,
    k: float,
    batch: float = 1.0,
    form: ProductForm = FORM,
    *,
    sustained: bool = False,
) -> float:
    return float(form.seconds(product(m, n, k, batch), SPEED, itemsize=2, sustained=sustained)[0])


SIZES = {"batch": 64, "heads": 16, "kv_heads": 16, "width": 128, "window": 0}


def scores(sequence: float, *, causal: bool = False, **sizes: float) -> Scores:
    """Attention of a sequence to itself; `sizes`: those that are not of `SIZES`."""
    assert sizes.keys() <= SIZES.keys()
    all_sizes = {**SIZES, **sizes, "queries": sequence, "keys": sequence}
    arrays = {name: np.array([float(value)]) for name, value in all_sizes.items()}
    return Scores(**arrays, causal=np.array([causal]))


# --- products ---


def test_whole_waves_of_the_largest_tiles_reach_the_rate() -> None:
    """100 tiles of 256 x 256 on 100 units are one wave."""
    assert seconds(2560, 2560, 16384) == pytest.approx(
        FORM.launch + 2 * 2560**2 * 16384 / 0.8e15, rel=1e-3
    )


@pytest.mark.parametrize(("quantum", "waves"), [(1.0, 2.0), (0.0, 1.1), (0.5, 1.55)])
def test_a_tenth_of_a_wave_more_costs_what_the_units_cannot_share(
    quantum: float, waves: float
) -> None:
    """110 tiles: 11 rows of tiles for 10; with smaller tiles out of the question."""
    form = replace(FORM, quantum=quantum, square=1.0, whole=1e-3, half=1e-3, quarter=1e-3)
    one = 2 * 2560**2 * 16384 / 0.8e15
    actual = seconds(2560 + 256, 2560, 16384, form=form) - form.launch
    assert actual <= waves * one * 1.001
    assert actual >= 1.1 * one * 0.999


def test_long_inner_sides_are_split_over_idle_units() -> None:
    """Where sums cost too much, 16 tiles of 64 x 64 at half the rate are what is left."""
    unsplit = 2 * 64 * 64 * 2**17 / (0.8e15 / 100 * FORM.quarter)
    assert seconds(256, 256, 2**17, form=replace(FORM, split=1.0)) == pytest.approx(
        unsplit, rel=0.02
    )
    assert seconds(256, 256, 2**17) < unsplit / 3


def test_narrow_products_are_bound_by_memory() -> None:
    nbytes = 2 * (2**20 * 64 + 64 * 64 + 2**20 * 64)
    assert seconds(2**20, 64, 64) == pytest.approx(nbytes / (0.8 * 2e12), rel=0.1)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 64))
def test_no_product_beats_its_rate_and_operands_may_change_places(
    m: int, n: int, k: int, batch: int
) -> None:
    assert seconds(m, n, k, batch) >= 2.0 * batch * m * n * k / 0.8e15
    assert seconds(m, n, k, batch) == pytest.approx(seconds(n, m, k, batch), rel=1e-9)


def test_power_slows_long_products_down() -> None:
    assert seconds(64, 64, 64, sustained=True) == pytest.approx(seconds(64, 64, 64), rel=0.01)
    assert seconds(8192, 8192, 8192, sustained=True) == pytest.approx(
        1.25 * seconds(8192, 8192, 8192), rel=0.01
    )
    half = heated(np.array([1.0]), np.array([1e-3]), Clock(rate=1.0, heat=0.4, warm=1e-3))
    assert float(half[0]) == pytest.approx(1.2)


def test_the_products_of_the_backward_pass_have_the_same_work() -> None:
    forward = product(96, 160, 224, 3)
    for turned in forward.turned():
        sides = [float(side[0]) for side in (turned.batch, turned.m, turned.n, turned.k)]
        assert math.prod(sides) == 3 * 96 * 160 * 224
        assert sides[0] == 3


# --- attention ---


def test_half_of_the_square_is_skipped_but_for_the_diagonal() -> None:
    whole, causal = (
        float(ATTENTION.seconds(scores(4096, causal=c), SPEED)[0]) - ATTENTION.launch
        for c in (False, True)
    )
    assert whole == pytest.approx(64 * 16 * 4 * 128 * 4096**2 / 0.8e15, rel=1e-3)
    assert causal / whole == pytest.approx((4096 + 128) / 8192, rel=1e-3)


def test_a_window_is_what_a_block_sees() -> None:
    wide, narrow = (
        float(ATTENTION.seconds(scores(8192, causal=True, window=w), SPEED)[0]) - ATTENTION.launch
        for w in (0, 896)
    )
    assert narrow / wide == pytest.approx(1024 / (8192 + 128) * 2, rel=0.01)


def test_heads_of_other_sizes_have_rates_of_their_own() -> None:
    rates = ATTENTION.rate(np.array([64.0, 96.0, 128.0, 256.0, 512.0]))
    assert rates.tolist() == pytest.approx([0.6, 0.8, 1.0, 1.1, 1.1])


def test_a_single_block_takes_as_long_as_its_keys() -> None:
    form = replace(ATTENTION, longest=1.0)
    one = scores(16384, batch=1, heads=1, kv_heads=1, causal=True)
    assert float(form.seconds(one, SPEED)[0]) >= 4 * 128 * 128 * 16384 * 100 / 0.8e15
    assert float(ATTENTION.seconds(one, SPEED)[0]) < float(form.seconds(one, SPEED)[0])


def test_backward_follows_forward() -> None:
    sizes = scores(4096, causal=True)
    forward = ATTENTION.seconds(sizes, SPEED)
    backward = ATTENTION.backward(sizes, SPEED)
    ratio = (backward - 3 * ATTENTION.launch) / (forward - ATTENTION.launch)
    assert float(ratio[0]) == pytest.approx(BACKWARD_WORK / BACKWARD_RATE)


# --- grouped products ---


def test_experts_share_rows_evenly() -> None:
    dealt = Dealt.evenly(np.array([1000.0, 3.0]), np.array([8.0, 8.0]))
    assert dealt.active.tolist() == [8, 3]
    assert dealt.tiles[:, 0].tolist() == [
        8 * math.ceil(125 / rows) for rows in (16, 32, 64, 128, 256)
    ]


def test_many_small_experts_are_slower_than_few_large_ones() -> None:
    n = np.array([4096.0])
    k = np.array([2048.0])
    rows = np.array([16384.0])
    products = [
        GroupedProduct(dealt=Dealt.evenly(rows, np.array([e])), n=n, k=k)
        for e in (8.0, 256.0, 1024.0)
    ]
    actual = [float(GROUPED.product(product, SPEED, itemsize=2)[0]) for product in products]
    assert actual[0] < actual[1] < actual[2]
    assert actual[0] >= 2 * 16384 * 4096 * 2048 / (0.8e15 * 2 ** (0.1 * GROUPED.small))


# --- the constants ---

BARS = {"a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200"}


@pytest.mark.parametrize("name", measured())
def test_constants_say_where_they_come_from_and_how_good_they_are(name: str) -> None:
    kernels = kernels_of(name)
    every = [f"products {key}" for key in kernels.products] + [
        f"attention {key}" for key in kernels.attention
    ]
    every += [f"grouped {key}" for key in kernels.grouped]
    assert sorted(every) == sorted(set(kernels.fits) - {"elementwise"})
    assert all(
        fit.source and (fit.kind == "assumed" or (fit.rows >= 20 and fit.kind == "fitted"))
        for fit in kernels.fits.values()
    )
    assert kernels.fits[f"products {next(iter(kernels.products))}"].kind == "fitted"
    assert {"flash1", "flash2", "flash3", "cudnn"} <= set(kernels.generations)
    assert all(entry.source for entry in kernels.generations.values())
    if name in BARS:
        products = kernels.fits["products bfloat16"]
        assert products.median <= 0.05 and products.p90 <= 0.15
    assert (
        json.loads(json.dumps(dumped(kernels))) and kernels_from(dumped(kernels), name) == kernels
    )


@pytest.mark.parametrize("name", measured())
def test_every_price_is_finite_and_below_the_peak(name: str) -> None:
    kernels = kernels_of(name)
    sides = np.array(list(itertools.product((1.0, 100.0, 5000.0), repeat=3))).T
    shapes = Product(batch=np.ones(27), m=sides[0], n=sides[1], k=sides[2])
    for dtype, form in kernels.products.items():
        for sustained in (False, True):
            actual = form.seconds(shapes, kernels.speed(dtype), itemsize=2, sustained=sustained)
            assert np.isfinite(actual).all() and (actual >= form.launch).all()
            assert (actual >= 2 * sides.prod(axis=0) / (1.05 * kernels.peak[dtype])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": 3}, "unknown constant 'unit': valid are"),
        ({"units": "many"}, "units is 'many'; it must be a finite number"),
        ({"products": {"bfloat16": {"blend": 1}}}, "products.bfloat16: burst, sustained, square"),
        ({"products": 3}, "products is 3; it must be a table"),
        ({"generations": {"flash2": {"kernel": "fa9"}}}, "unknown attention kernel 'fa9'"),
        ({"experts": {"bfloat16": "fa9"}}, "unknown grouped kernel 'fa9'"),
    ],
)
def test_bad_constants_are_named(change: dict[str, object], message: str) -> None:
    data = {**dumped(kernels_of("h100_sxm")), **change}
    with pytest.raises(ClusterError) as caught:
        kernels_from(data, "here")
    assert message in str(caught.value)


def test_an_unknown_device_lists_those_measured() -> None:
    with pytest.raises(ClusterError, match=r"unknown measured device 'h101'.*h100_sxm"):
        kernels_of("h101")


def test_kernels_are_values() -> None:
    assert isinstance(hash(kernels_of("h100_sxm")), int)
    assert isinstance(kernels_of("h100_sxm"), Kernels)


# --- devices that have them ---

PRESETS = {
    "dgx-a100-80g": "a100_sxm",
    "dgx-h100": "h100_sxm",
    "hgx-h200": "h200_sxm",
    "dgx-b200": "b200_sxm",
    "p5": "h100_sxm",
    "p3.16xlarge": "v100_sxm2",
    "g5": "a10g",
    "l4": "l4",
}
FAMILY = {"float8": "float8_e4m3fn"}


@pytest.mark.parametrize(("preset", "name"), PRESETS.items())
def test_presets_have_the_figures_that_constants_are_fractions_of(preset: str, name: str) -> None:
    device = load_cluster(preset).device
    assert device.kernels is kernels_of(name)
    assert device.memory_bandwidth == pytest.approx(device.kernels.memory, rel=1e-3)
    for dtype in set(device.kernels.products) & set(device.peak):
        assert device.flops(FAMILY.get(dtype, dtype)) == pytest.approx(
            device.kernels.peak[dtype], rel=1e-3
        )


def test_large_products_of_devices_compare_as_their_data_sheets_nearly_do() -> None:
    """At the power limit the newer devices reach less of their peaks."""
    rates = {name: large_product_rate(load_cluster(name).device, "float16") for name in PRESETS}
    shares = {name: rates[name] / load_cluster(name).device.flops("float16") for name in rates}
    assert 0.3 < shares.pop("l4") < 0.5, "its profile was taken at half of its highest clock"
    assert rates["dgx-a100-80g"] < rates["hgx-h200"] < rates["dgx-b200"]
    assert all(0.55 < share < 1 for share in shares.values())
    assert shares["dgx-a100-80g"] > shares["hgx-h200"] > shares["dgx-b200"]


def test_memory_of_another_rate_slows_what_memory_bounds() -> None:
    small, large = (load_cluster(name).device for name in ("dgx-a100", "dgx-a100-80g"))
    thin = product(2**18, 64, 64)
    thick = product(8192, 8192, 8192)
    ratio = [
        float(
            product_seconds(one, "bfloat16", small, itemsize=2)[0]
            / product_seconds(one, "bfloat16", large, itemsize=2)[0]
        )
        for one in (thin, thick)
    ]
    assert ratio[0] == pytest.approx(2039 / 1555, rel=0.1)
    assert ratio[1] == pytest.approx(1, abs=0.02)


def test_attention_of_a_framework_is_a_measured_kernel() -> None:
    device = load_cluster("dgx-h100").device
    sizes = scores(2048, batch=4, causal=True)
    work = AttentionWork(scores=sizes, flops=np.ones(1), nbytes=np.ones(1))
    actual = {
        kernel: float(attention_seconds(work, kernel, "forward", "bfloat16", device)[0])
        for kernel in ("flash1", "flash2", "flash3", "cudnn")
    }
    assert actual["flash1"] > actual["flash2"] > actual["flash3"] == actual["cudnn"]
    triton = [
        float(attention_seconds(work, kernel, direction, "bfloat16", device)[0])
        for direction in ("forward", "backward")
        for kernel in ("triton", "flash1")
    ]
    assert triton[0] == pytest.approx(0.7 * triton[1]) and triton[2] == triton[3]
    with pytest.raises(ClusterError, match="unknown attention kernel 'flash9'"):
        attention_seconds(work, "flash9", "forward", "bfloat16", device)


def test_attention_in_float32_is_priced_as_its_products() -> None:
    """Constants measured on tensor units say nothing of the units that float32 runs on."""
    device = load_cluster("dgx-h100").device
    sizes = replace(scores(4096, batch=4, heads=8, kv_heads=8, width=64), itemsize=4.0)
    flops = 4 * 32 * np.square(sizes.queries) * sizes.width
    work = AttentionWork(scores=sizes, flops=flops, nbytes=sizes.traffic)
    products = 2 * product_seconds(product(4096, 4096, 64, 32), "float32", device, itemsize=4)
    forward = attention_seconds(work, "flash2", "forward", "float32", device)
    assert flops / device.flops("float32") < forward <= products
    assert attention_seconds(work, "flash2", "backward", "float32", device) <= 2.5 * products


def test_kernels_written_out_are_read_again(tmp_path: Path) -> None:
    """A device with constants of its own keeps them in its file; one whose kernels are known names
    them.
    """
    cluster = load_cluster("dgx-h100")
    own = replace(kernels_of("h100_sxm"), name="ours", units=100)
    changed = replace(cluster, device=replace(cluster.device, kernels=own))
    for one in (cluster, changed):
        (tmp_path / "cluster.json").write_text(dump(one), encoding="utf-8")
        assert load_cluster(tmp_path / "cluster.json").device == one.device
    assert json.loads(dump(cluster))["device"]["kernels"]["name"] == "h100_sxm"
    assert json.loads(dump(changed))["device"]["kernels"]["units"] == 100
