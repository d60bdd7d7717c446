"""A device from measurements of its own: it prices what it was fitted to in the form of measured
devices, and a file keeps that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.costmodel import Level, dump, load_cluster
from autopar.costmodel.calibration.collective_curves import Links, calibrated
from autopar.costmodel.calibration.device_kernels import (
    DeviceRepeats,
    fit_device,
    fit_products,
    measured_scores,
    product_form,
    product_of,
)
from autopar.costmodel.calibration.intervals import WIDE, kernel_interval
from autopar.costmodel.calibration.least_squares import solve
from autopar.costmodel.device import Device
from autopar.costmodel.device.kernel_seconds import (
    AttentionWork,
    attention_seconds,
    product_seconds,
)
from autopar.costmodel.device.products import Speed
from autopar.errors import NoisyMeasurement

Floats = NDArray[np.float64]
SHAPES = [
    (32, 32, 32),
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (1024, 256, 256),
    (1024, 1024, 64),
    (1024, 64, 1024),
    (64, 1024, 1024),
    (16, 1024, 1024),
    (2048, 256, 1024),
]
TRUTH = {
    "rate": 0.93,
    "small": 0.7,
    "prologue": 15.0,
    "epilogue": 25.0,
    "stream": 0.6,
    "launch": 4e-6,
}
RATE = 40e9
MEMORY = 1e10


def repeats(value: float) -> tuple[float, ...]:
    return (value, value, value)


def measured(units: int = 0, noise: float = 0.0) -> DeviceRepeats:
    """The measurement that a device of known constants would give."""
    dtype = "bfloat16" if units else "float32"
    speed = Speed(flops=RATE, memory=MEMORY, reference=MEMORY, units=max(units, 1))
    seconds = product_form(TRUTH, speed.units).seconds(
        product_of(SHAPES), speed, itemsize=2 if units else 4
    )
    seconds = seconds * np.random.default_rng(5).uniform(1 - noise, 1 + noise, len(SHAPES))
    products = {
        (dtype, *shape): repeats(float(s)) for shape, s in zip(SHAPES, seconds, strict=True)
    }
    other = "float32" if units else "bfloat16"
    return DeviceRepeats(
        name="rank",
        products={**products, (other, 512, 512, 512): repeats(2 * 512**3 / 80e9)},
        copy=repeats(0.01),
        copied=1e8,
        stream=repeats(0.02),
        streamed=1e8,
        update=repeats(0.005),
        updated=1e8,
        attention_shape=(4, 4, 256, 64),
        attention={"forward": repeats(5e-3), "backward": repeats(1.6e-2)},
        launch=repeats(3e-6),
        capacity=1e10,
        reserved=1e8,
        units=units,
    )


@functools.cache
def fitted(units: int = 0) -> tuple[Device, dict[str, str]]:
    return fit_device(measured(units))


def seconds_of(device: Device, dtype: str, itemsize: float) -> Floats:
    return product_seconds(product_of(SHAPES), dtype, device, itemsize=itemsize)


@pytest.mark.parametrize(("units", "dtype", "itemsize"), [(0, "float32", 4), (108, "bfloat16", 2)])
def test_a_device_prices_the_products_that_it_was_fitted_to(
    units: int, dtype: str, itemsize: float
) -> None:
    actual = measured(units)
    device, _ = fitted(units)
    expected = [actual.products[dtype, *shape][0] for shape in SHAPES]
    assert seconds_of(device, dtype, itemsize) == pytest.approx(expected, rel=0.03)
    assert device.kernels is not None and device.kernels.units == max(units, 1)


def test_the_other_figures_are_what_was_measured() -> None:
    device, sources = fitted()
    assert (device.memory_bandwidth, device.memory_fraction, device.launch) == pytest.approx(
        (1e10, 0.5, 3e-6)
    )
    assert device.update_fraction == pytest.approx(2.0), (
        "a step of the optimizer finds in caches what a copy does not"
    )
    assert device.flops("bfloat16") == pytest.approx(80e9) and device.flops(
        "int32"
    ) == pytest.approx(0.2 * device.flops("float32"))
    assert all(
        f"device.{name}" in sources for name in ("peak.float32", "memory_bandwidth", "launch")
    )
    assert float(seconds_of(device, "bfloat16", 4)[5]) < 0.7 * float(
        seconds_of(device, "float32", 4)[5]
    ), "at its own peak"


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "flash3", "cudnn"])
def test_attention_takes_what_it_took_in_both_directions(kernel: str) -> None:
    measurement = measured()
    device, _ = fitted()
    scores = measured_scores(measurement)
    work = AttentionWork(scores=scores, flops=np.zeros(1), nbytes=np.zeros(1))
    times = [
        float(attention_seconds(work, kernel, way, "float32", device)[0])
        for way in ("forward", "backward")
    ]
    assert times == pytest.approx([5e-3, 1.1e-2], rel=1e-3)


def test_a_file_keeps_the_kernels_and_prices_alike(tmp_path: Path) -> None:
    level = Level(name="loopback", size=2, latency=1e-4, bandwidth=1e9)
    cluster = calibrated(
        "mine", "gloo", fit_device(measured(noise=0.05)), Links(levels=[(level, {})])
    )
    path = tmp_path / "mine.json"
    path.write_text(dump(cluster), encoding="utf-8")
    loaded = load_cluster(path)
    assert loaded == cluster and loaded.device.kernels == cluster.device.kernels
    assert (
        seconds_of(loaded.device, "float32", 4).tolist()
        == seconds_of(cluster.device, "float32", 4).tolist()
    )
    actual = kernel_interval(loaded, "products", "float32")
    assert (
        not actual.assumed
        and actual.rows == len(SHAPES)
        and 0.6 < actual.low < 1 < actual.high < 1.6
    )
    assert kernel_interval(loaded, "attention", "flash2").low == WIDE["attention"][0], (
        "one shape says nothing of others"
    )


def test_few_shapes_tell_no_residuals() -> None:
    measurement = measured()
    few = replace(measurement, products=dict(itertools.islice(measurement.products.items(), 6)))
    device, _ = fit_device(few)
    assert device.kernels is not None and device.kernels.fits["products float32"].held == 0


def test_products_that_do_not_grow_are_refused() -> None:
    times = {(32, 32, 32): 3e-4, (64, 64, 64): 2e-4, (512, 512, 512): 1e-4}
    with pytest.raises(NoisyMeasurement, match="float32 products do not grow with their sizes"):
        fit_products(times, Speed(flops=RATE, memory=MEMORY, reference=MEMORY, units=1), "float32")


@pytest.mark.parametrize("seed", range(4))
def test_least_squares_in_a_box(seed: int) -> None:
    """The solver beside scipy's, on a curved problem of which some optima lie on a bound."""
    rng = np.random.default_rng(seed)
    x = np.linspace(0.1, 3, 30)
    truth = rng.uniform(0.2, 2.0, 3)
    sides = {"a": (1.0, 0.5, 1.5), "b": (1.0, 0.1, 3.0), "c": (0.5, 0.0, 3.0)}

    def curve(a: float, b: float, c: float) -> Floats:
        return np.asarray(a * np.exp(-b * x) + c)

    aim = curve(*truth) * rng.uniform(0.97, 1.03, len(x))

    def residuals(at: Mapping[str, float]) -> Floats:
        return curve(at["a"], at["b"], at["c"]) - aim

    solution = solve(residuals, sides)
    bounds = tuple(zip(*((low, high) for _, low, high in sides.values()), strict=True))
    best = least_squares(
        lambda p: curve(*p) - aim,
        [start for start, _, _ in sides.values()],
        bounds=bounds,
        xtol=1e-12,
        ftol=1e-12,
    )
    assert float((residuals(solution) ** 2).sum()) <= 2 * best.cost * 1.001 + 1e-12


def test_the_host_of_a_gpu_has_its_own_time_for_an_operator() -> None:
    device, sources = fit_device(replace(measured(108), dispatch=repeats(2e-5)))
    assert (device.dispatch, device.launch) == (2e-5, 3e-6)
    assert "as the host starts them" in sources["device.dispatch"]
    assert "operator on the host" in replace(measured(108), dispatch=repeats(2e-5)).named()
    alone, told = fitted()
    assert alone.dispatch == 0.0 and "device.dispatch" not in told
