"""The scores of kernels and the fit behind them, on tables small enough to work out."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.costmodel.device.measured_kernels import SHEET, kernels_of
from autopar.costmodel.device.products import Clock, Product, ProductForm, Speed
from autopar.errors import UsageError
from benchmarks.kernels.bounds import bounds
from benchmarks.kernels.boxes import PRODUCT, product_form
from benchmarks.kernels.fits import (
    bare,
    crossed,
    fit_products,
    judged,
    lasting_as,
    priced_products,
    sustained_beside,
)
from benchmarks.kernels.rows import Rows, devices_in, layer_of, product_of, read
from benchmarks.kernels.scores import Prices, held_in, scored
from benchmarks.kernels.sheet import EACH, Ran, _judged, _weighed
from benchmarks.kernels.widths import widened

COLUMNS = ("framework", "version", "kernel", "dtype", "m", "n", "k", "seconds", "mode", "trap")
TRUTH = ProductForm(
    burst=Clock(rate=0.8, heat=0.2, warm=1e-3),
    sustained=Clock(rate=0.8, heat=0.2, warm=2e-5),
    square=1.0,
    whole=0.9,
    half=0.8,
    quarter=0.6,
    prologue=20.0,
    epilogue=60.0,
    launch=3e-6,
    stream=0.75,
    cache=6.0,
    quantum=0.5,
    split=4e-6,
    blend=3.0,
)
SPEED = Speed(flops=1e15, memory=3e12, reference=3e12, units=132)


def rows_of(form: ProductForm, count: int = 300) -> Rows:
    """Products of sizes by chance that take exactly what a form says."""
    sides = 2.0 ** np.random.default_rng(3).integers(6, 14, (3, count))
    product = Product(batch=np.ones(count), m=sides[0], n=sides[1], k=sides[2])
    seconds = form.seconds(product, SPEED, itemsize=2, sustained=False)
    rows = tuple(
        dict(
            zip(
                COLUMNS,
                (
                    "a",
                    "1",
                    "x",
                    "bfloat16",
                    f"{m:.0f}",
                    f"{n:.0f}",
                    f"{k:.0f}",
                    f"{s!r}",
                    "burst",
                    "",
                ),
                strict=True,
            )
        )
        for m, n, k, s in zip(*sides, seconds.tolist(), strict=True)
    )
    return Rows(kind="gemm", rows=rows, seconds=seconds, fold=np.arange(count) % 4)


def test_a_fit_prices_rows_that_it_did_not_see() -> None:
    rows = rows_of(TRUTH)
    form = fit_products(rows, SPEED)
    held = rows.part(rows.held)
    actual = judged(
        priced_products(form, held, SPEED), held, "made up", np.linspace(-0.1, 0.3, 225)
    )
    assert (actual.rows, actual.held) == (225, 75)
    assert actual.median < 0.03 and actual.p90 < 0.1
    assert (actual.low, actual.middle, actual.high) == pytest.approx((-0.08, 0.1, 0.28), abs=0.002)
    assert list(form.libraries) == ["a bfloat16"] and form.libraries[
        "a bfloat16"
    ].factor == pytest.approx(1, abs=0.01)
    assert bare(form).libraries == {}


def test_the_start_of_a_search_lies_in_its_box() -> None:
    assert all(least <= start <= most for start, least, most in PRODUCT.sides.values())
    made = product_form({name: side[0] for name, side in PRODUCT.sides.items()}, ())
    assert made.sustained.rate == made.burst.rate and made.sustained.warm < made.burst.warm


def write(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_rows_with_a_trap_are_left_out_and_whole_shapes_are_held_back(tmp_path: Path) -> None:
    made = [dict(row) for row in rows_of(TRUTH, 40).rows]
    made[0]["trap"] = "slow_outlier"
    write(tmp_path, "gemm_a100_sxm", made)
    rows = read(tmp_path, "gemm", "a100_sxm")
    assert (len(rows.rows), devices_in(tmp_path, "gemm")) == (39, ("a100_sxm",))
    shapes = {}
    for row, held in zip(rows.rows, rows.held, strict=True):
        assert shapes.setdefault((row["m"], row["n"], row["k"]), held) == held
    assert 0 < rows.held.sum() < 39
    assert product_of(rows).m.tolist() == [float(row["m"]) for row in rows.rows]
    with pytest.raises(
        UsageError, match=r"has no table gemm_h100_sxm\.csv\.gz; it has those of a100_sxm"
    ):
        read(tmp_path, "gemm", "h100_sxm")


def test_experts_get_their_rows_evenly_or_as_drawn() -> None:
    common = {
        "tokens": "4096",
        "hidden": "2048",
        "inter": "768",
        "experts": "64",
        "topk": "8",
        "tp": "2",
        "ep": "4",
        "kernel": "nongated",
    }
    rows = tuple(
        {**common, "distribution": name} for name in ("balanced", "power_law_1.2", "power_law_1.2")
    )
    layer = layer_of(
        Rows(kind="moe", rows=rows, seconds=np.ones(3), fold=np.ones(3, dtype=np.int64))
    )
    assert (layer.dealt.rows[0], layer.dealt.active[0], layer.inner[0]) == (4096 * 8 / 4, 16, 384)
    assert layer.dealt.rows[1] == layer.dealt.rows[2] > layer.dealt.rows[0], (
        "the rank that has most, drawn alike"
    )
    assert layer.even.tolist() == [True, False, False] and not layer.gated.any()


def test_the_benchmark_scores_a_folder(tmp_path: Path) -> None:
    """Rows that take exactly what the committed constants say have no error."""
    kernels = kernels_of("a100_sxm")
    made = rows_of(TRUTH, 60)
    product = product_of(made)
    seconds = bare(kernels.products["bfloat16"]).seconds(
        product, kernels.speed("bfloat16"), itemsize=2, sustained=False
    )
    rows = [
        {**row, "seconds": repr(float(s)), "framework": "nobody"}
        for row, s in zip(made.rows, seconds, strict=True)
    ]
    write(tmp_path, "gemm_a100_sxm", rows)
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "silicon.py"
    process = subprocess.run(
        [sys.executable, script, "--data", tmp_path, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(process.stdout)["rows"]
    assert [(row["table"], row["device"], row["kind"]) for row in rows] == [
        ("kernels", "a100_sxm", "products bfloat16 burst")
    ]
    assert rows[0]["median"] == 0 and rows[0]["inside"] == 1 and rows[0]["n"] > 5


def test_a_folder_without_tables_is_a_mistake(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "silicon.py"
    process = subprocess.run(
        [sys.executable, script, "--data", tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2 and "has no tables gemm_*" in process.stderr


def test_every_fold_is_judged_by_fits_that_leave_it_out() -> None:
    rows = rows_of(TRUTH, 40)
    asked: list[Rows] = []

    def left(folded: Rows) -> NDArray[np.float64]:
        asked.append(folded)
        return np.full(int(folded.held.sum()), float(len(asked)))

    assert sorted(crossed(rows, left)) == [1.0] * 10 + [2.0] * 10 + [3.0] * 10
    for folded, fold in zip(asked, (1, 2, 3), strict=True):
        assert (folded.held == (rows.fold == fold)).all(), "never the fold that is held back"


def test_a_score_counts_what_lies_inside_and_what_has_no_price() -> None:
    seconds = np.array([1.0, 1.0, 1.0, 1.0])
    predicted = np.array([1.05, 0.8, 1.3, np.nan])
    low = np.full(4, 0.9)
    high = np.full(4, 1.2)
    prices = Prices(predicted=predicted, planned=predicted, low=low, high=high)
    one = scored("d", "k", seconds, prices)
    assert (one.n, one.not_priced, one.within_10) == (3, 1, pytest.approx(1 / 3))
    assert one.inside == pytest.approx(1 / 3), (
        "1 / 1.05 lies between 0.9 and 1.2, 1 / 0.8 and 1 / 1.3 do not"
    )
    assert held_in([one, replace(one, inside=1.0, n=9)]) == pytest.approx(10 / 12)


def test_the_best_fractions_are_those_of_plausible_rows(tmp_path: Path) -> None:
    made = [dict(row) for row in rows_of(TRUTH, 12).rows]
    for row, fraction in zip(made, (0.5, 0.93, 1.4, 0.9), strict=False):
        row["frac_of_peak"] = str(fraction)
    made[3]["trap"] = "slow_outlier"
    write(
        tmp_path,
        "gemm_a100_sxm",
        [{**row, "frac_of_peak": row.get("frac_of_peak", "")} for row in made],
    )
    assert [
        (one.kind, one.mode, one.fraction, one.rows) for one in bounds(tmp_path, "a100_sxm")
    ] == [("gemm", "burst", 0.93, 2)]


def test_a_device_without_rows_that_last_slows_down_as_another_of_its_chip() -> None:
    h100, h200 = (kernels_of(name).products["bfloat16"] for name in ("h100_sxm", "h200_sxm"))
    actual = lasting_as(h100, h200)

    def large(clock: Clock) -> float:
        return clock.rate / (1 + clock.heat)

    assert large(actual.sustained) / large(actual.burst) == pytest.approx(
        large(h200.sustained) / large(h200.burst)
    )
    assert large(actual.sustained) == pytest.approx(large(h100.sustained), rel=1e-3), (
        "as the committed constants are"
    )
    assert actual.burst == h100.burst


@pytest.mark.parametrize("name", ["h200_sxm", "b200_sxm", "gb200"])
def test_narrow_products_slow_down_as_those_of_16_bits(name: str) -> None:
    products = kernels_of(name).products
    wide = products["bfloat16"]
    for dtype, form in products.items():
        if dtype == "bfloat16":
            continue
        actual = sustained_beside(form, wide).sustained
        assert (actual.heat, actual.warm) == (wide.sustained.heat, wide.sustained.warm)
        assert actual.rate / form.burst.rate == pytest.approx(wide.sustained.rate / wide.burst.rate)
        assert actual.rate == pytest.approx(form.sustained.rate, rel=1e-4), "as committed"


def ran(device: str, count: int) -> Ran:
    return Ran(device=device, rows=rows_of(TRUTH, count), speed=SPEED)


def test_generations_of_chips_weigh_as_much_in_the_form_of_a_data_sheet() -> None:
    table = _weighed([ran(name, 400) for name in ("a100_sxm", "h100_sxm", "h200_sxm")])
    assert [len(one.rows.rows) for one in table] == [EACH, EACH // 2, EACH // 2]
    few = ran("a100_sxm", 30)
    assert _weighed([few])[0] is few


def test_devices_left_out_weigh_as_much() -> None:
    apart = {"a": np.full(1000, 0.1), "b": np.full(10, -0.3)}
    actual = _judged(apart, "made up")
    assert (actual.rows, actual.kind) == (1010, "fitted")
    assert -0.1 < actual.middle < 0.3, "half of the residuals are those of each"
    assert (actual.low, actual.high) == pytest.approx((-0.1, 0.3))


LEFT_OUT = {
    "products bfloat16": 0.0895,
    "products float8": 0.1976,
    "products float8_block": 0.1919,
    "products float4": 0.2188,
    "attention best": 0.106,
    "grouped bfloat16": 0.1294,
    "grouped float8": 0.1492,
}
"""Median errors of kernels on devices that were left out as a whole."""
HELD_BACK = {
    "a100_sxm": (0.0293, 0.0473, 0.0672),
    "b200_sxm": (0.0483, 0.057, 0.0749),
    "b300_sxm": (0.0607, 0.0596, 0.0843),
    "gb200": (0.0475, 0.0706, 0.0628),
    "gb300": (0.0426, 0.0419, 0.0731),
    "h100_sxm": (0.0414, 0.0499, 0.0829),
    "h200_sxm": (0.0394, 0.0705, 0.0745),
    "l40s": (0.0716, 0.0655, 0.1017),
    "rtx_pro_6000_server": (0.0302, 0.0669, 0.0689),
}
"""Median errors on shapes that were held back: 16-bit products, attention, layers of experts."""
POINT = 0.01


def test_devices_left_out_are_priced_as_well_as_before() -> None:
    fits = kernels_of(SHEET).fits
    assert fits.keys() == LEFT_OUT.keys()
    for what, median in LEFT_OUT.items():
        assert fits[what].median < median + POINT, what
        assert "each left out as a whole" in fits[what].source


@pytest.mark.parametrize("name", HELD_BACK)
def test_shapes_held_back_are_priced_as_well_as_before(name: str) -> None:
    kernels = kernels_of(name)
    attention = kernels.generations["cudnn"].kernel
    trained = kernels.experts["bfloat16"]
    kinds = ("products bfloat16", f"attention {attention}", f"grouped {trained}")
    for what, median in zip(kinds, HELD_BACK[name], strict=True):
        assert 0 < kernels.fits[what].median < median + POINT, what


def test_head_sizes_beyond_a_kernel_s_rows_are_those_of_other_kernels() -> None:
    form = kernels_of("b300_sxm").attention["trtllm_mha"]
    given = {
        "own": replace(form, widths={"256": 1.1}),
        "other": replace(form, widths={"64": 0.5, "192": 0.3, "512": 0.7}),
        "third": replace(form, widths={"64": 0.7}),
        "own unmasked": replace(form, widths={"64": 0.1}),
    }
    actual = widened(given, {"64": 0.9, "80": 0.95})
    assert actual["own"].widths == {"64": 0.6, "80": 0.95, "256": 1.1, "512": 0.7}
    assert actual["own unmasked"] is given["own unmasked"]
    assert form.widths["64"] < 0.7, "no row has this size on the device, but other kernels do"
