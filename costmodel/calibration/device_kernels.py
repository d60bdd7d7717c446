"""A device from repeated measurements on its ranks, in the form of the published devices.

products     constants of `device.products` by least squares on log(predicted / measured);
             neutral if undetermined
attention    rates at which `device.attention` reproduces the seconds of one shape, forward and
             backward
elementwise  the share of the memory's rate that a stream of the usual operators reaches
update       the share that an optimizer's step reaches
residuals    each shape priced by constants that were fitted to the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.device import FAMILIES, Device
from autopar.costmodel.device.attention import BACKWARD_WORK, AttentionForm, Scores
from autopar.costmodel.device.attention_kernels import GENERATIONS
from autopar.costmodel.device.measured_kernels import Fitted, Generation, Kernels
from autopar.costmodel.device.products import Clock, Product, ProductForm, Speed
from autopar.errors import NoisyMeasurement
from autopar.ir import DTYPE_BYTES

from .collective_curves import agreed, spread
from .least_squares import solve

Floats = NDArray[np.float64]
Shape = tuple[int, int, int]

CPU_INTEGERS = 0.2
"""Integer arithmetic as a fraction of float32, which no library tunes; assumed."""
SIDES: Mapping[str, tuple[float, float, float]] = {
    "rate": (0.9, 0.05, 1.5),
    "small": (0.8, 0.1, 1.1),
    "prologue": (8.0, 0.0, 400.0),
    "epilogue": (8.0, 0.0, 400.0),
    "stream": (0.8, 0.1, 4.0),
    "launch": (3e-6, 1e-7, 1e-3),
}
"""Start, least and most of each constant; `small`: rate of the smallest tiles, from which larger
are interpolated.
"""
FEW = 8
"""From fewer shapes no residuals are told."""
FALLS = 0.5
"""A larger product in less than this share of a smaller one's time is noise."""
KERNEL = "measured"
WAVES = 0.5
FIRM = 4.0
CACHE = 1e6
"""Constants neither fitted nor known: wholeness of waves on many units, sharpness of the overlap of
traffic and arithmetic, and a cache that never limits.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRepeats:
    """Repeated measurements on a device, in seconds.

    `products`: by dtype, m, n, k. `copy`, `stream`, `update`: a copy, the usual operators between
    products, and a step of AdamW, which read and write `copied`, `streamed` and `updated` bytes.
    `attention`: causal, "forward", and "backward" including forward, of `attention_shape` (batch,
    heads, sequence, width). `launch`, `dispatch`: of an operator on the device, and on the host of
    a GPU; no `dispatch` where the host computes.
    """

    name: str
    products: Mapping[tuple[str, int, int, int], Sequence[float]]
    copy: Sequence[float]
    copied: float
    stream: Sequence[float]
    streamed: float
    update: Sequence[float]
    updated: float
    attention_shape: tuple[int, int, int, int]
    attention: Mapping[str, Sequence[float]]
    launch: Sequence[float]
    capacity: float
    reserved: float
    units: int = 0
    dispatch: Sequence[float] = ()

    def named(self) -> dict[str, Sequence[float]]:
        """The repeats by a name for people."""
        products = {
            f"{dtype} product {m}x{n}x{k}": times
            for (dtype, m, n, k), times in self.products.items()
        }
        attention = {f"attention {direction}": times for direction, times in self.attention.items()}
        memory = {
            "memory copy": self.copy,
            "operators in a stream": self.stream,
            "step of AdamW": self.update,
        }
        host = {"operator on the host": self.dispatch} if self.dispatch else {}
        return {**products, **memory, **attention, "launch": self.launch, **host}


def product_form(constants: Mapping[str, float], units: float) -> ProductForm:
    """Return the form with the fitted constants.

    On one unit tiles need not fill waves, and no inner side is split.
    """
    clock = Clock(rate=constants["rate"], heat=0.0, warm=1.0)
    # The rates of tiles rise geometrically from the smallest to the largest, so that a few shapes
    # suffice to fit them.
    small = constants["small"]
    return ProductForm(
        burst=clock,
        sustained=clock,
        square=1.0,
        whole=small ** (1 / 3),
        half=small ** (2 / 3),
        quarter=small,
        prologue=constants["prologue"],
        epilogue=constants["epilogue"],
        launch=constants["launch"],
        stream=constants["stream"],
        cache=CACHE,
        quantum=WAVES if units > 1 else 0.0,
        split=1.0,
        blend=FIRM,
    )


def product_of(shapes: Sequence[Shape]) -> Product:
    """Products of these m, n, k."""
    m, n, k = np.array(shapes, dtype=np.float64).T
    return Product(batch=np.ones(len(shapes)), m=m, n=n, k=k)


def fit_products(
    times: Mapping[Shape, float], speed: Speed, dtype: str
) -> tuple[ProductForm, Floats]:
    """Return the form of products of a dtype, and log(measured / predicted) of each shape.

    Each shape is judged by a fit without it.
    """
    shapes = list(times)
    measured = np.array(list(times.values()))
    work = [m * n * k for m, n, k in shapes]
    if measured[np.argmax(work)] < measured[np.argmin(work)] / FALLS:
        raise NoisyMeasurement(
            f"the times of {dtype} products do not grow with their sizes: nothing is written. Stop "
            "what else runs on these machines and "
            "calibrate again."
        )
    itemsize = float(DTYPE_BYTES[dtype])

    def fitted(chosen: Sequence[int]) -> ProductForm:
        some = product_of([shapes[i] for i in chosen])
        took = measured[list(chosen)]

        def residuals(constants: Mapping[str, float]) -> Floats:
            return np.asarray(
                np.log(
                    product_form(constants, speed.units).seconds(some, speed, itemsize=itemsize)
                    / took
                )
            )

        return product_form(solve(residuals, SIDES), speed.units)

    def left(i: int) -> float:
        form = fitted([j for j in range(len(shapes)) if j != i])
        return float(
            np.log(measured[i] / form.seconds(product_of([shapes[i]]), speed, itemsize=itemsize)[0])
        )

    every = range(len(shapes))
    return fitted(every), np.array([left(i) for i in every] if len(shapes) >= FEW else [])


def attention_form(repeats: DeviceRepeats, scores: Scores, speed: Speed) -> AttentionForm:
    """The form that takes as long as was measured."""
    forward, both = (agreed(repeats.attention[direction]) for direction in ("forward", "backward"))
    backward = max(both - forward, 1e-12)
    # A launch as long as all of the attention would leave no time for its arithmetic.
    launch = min(agreed(repeats.launch), 0.5 * forward)

    def form(rate: float, returned: float) -> AttentionForm:
        clock = Clock(rate=rate, heat=0.0, warm=1.0)
        return AttentionForm(
            burst=clock,
            sustained=clock,
            start=0.0,
            edge=0.0,
            quantum=0.0,
            longest=0.0,
            grouped=1.0,
            launch=launch,
            passes=0.0,
            # Nearly the maximum of arithmetic and traffic: one shape cannot tell their overlap.
            blend=12.0,
            backward_rate=returned,
        )

    # Arithmetic takes seconds in proportion to 1 / rate, so one evaluation gives the rate.
    ideal = float(form(1.0, 1.0).seconds(scores, speed)[0]) - launch
    rate = ideal / (forward - launch)
    # The backward pass launches three kernels (`AttentionForm.backward`).
    busy = max(backward - 3 * launch, 0.1 * backward)
    return form(rate, BACKWARD_WORK * (forward - launch) / busy)


def fitted_to(products: Floats, count: int) -> Fitted:
    """The provenance of the constants of products."""
    if not len(products):
        return Fitted(kind="measured", source="measured on all ranks at once", rows=count)
    # From log(measured / predicted) to the relative error of the prediction.
    errors = np.expm1(-products)
    left = Residual.of(products)
    size = np.abs(errors)
    median, p90, bias = (
        round(float(value), 4)
        for value in (np.median(size), np.quantile(size, 0.9), np.median(errors))
    )
    return Fitted(
        kind="measured",
        source="measured on all ranks at once; errors of each shape by a fit to the others",
        rows=count,
        held=len(products),
        median=median,
        p90=p90,
        bias=bias,
        low=left.low,
        middle=left.middle,
        high=left.high,
    )


def fit_kernels(measured: DeviceRepeats, device: Device, dtype: str) -> Kernels:
    """The kernels of a device whose products of `dtype` were measured in many shapes."""
    units = max(measured.units, 1)
    speed = Speed(
        flops=device.flops(dtype),
        memory=device.memory_bandwidth,
        reference=device.memory_bandwidth,
        units=units,
    )
    shaped = {
        (m, n, k): agreed(repeats)
        for (name, m, n, k), repeats in measured.products.items()
        if name == dtype
    }
    form, left = fit_products(shaped, speed, dtype)
    attention = attention_form(measured, measured_scores(measured), speed)
    family = FAMILIES[dtype]
    apart = spread(measured.attention["forward"])
    runs = f"causal attention as torch runs it here, repeats within {apart:.1%}"
    fits = {
        f"products {family}": fitted_to(left, len(shaped)),
        f"attention {KERNEL}": Fitted(kind="measured", source=runs, rows=1),
    }
    return Kernels(
        name=measured.name,
        units=units,
        memory=device.memory_bandwidth,
        peak={family: speed.flops},
        products={family: form},
        attention={KERNEL: attention},
        fits=fits,
        generations={
            name: Generation(kernel=KERNEL, source=f"measured: {runs}") for name in GENERATIONS
        },
    )


def measured_scores(repeats: DeviceRepeats) -> Scores:
    """The attention that was measured."""
    batch, heads, sequence, width = (np.array([float(size)]) for size in repeats.attention_shape)
    return Scores(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        queries=sequence,
        keys=sequence,
        width=width,
        causal=True,
    )


def fit_device(measured: DeviceRepeats) -> tuple[Device, dict[str, str]]:
    """Return the device, and the source of each of its figures."""
    rates: dict[str, float] = {}
    for (dtype, m, n, k), repeats in measured.products.items():
        rates[dtype] = max(rates.get(dtype, 0.0), 2.0 * m * n * k / agreed(repeats))
    rates.setdefault("int", CPU_INTEGERS * rates["float32"])
    bandwidth = measured.copied / agreed(measured.copy)
    # Caches can make the stream faster than the copy, but a device's share is at most 1.
    reached = min(measured.streamed / agreed(measured.stream) / bandwidth, 1.0)
    device = Device(
        name=measured.name,
        peak=rates,
        memory_bandwidth=bandwidth,
        memory_fraction=reached,
        memory_capacity=measured.capacity,
        launch=agreed(measured.launch),
        dispatch=agreed(measured.dispatch) if measured.dispatch else 0.0,
        reserved=measured.reserved,
        units=measured.units,
        update_fraction=measured.updated / agreed(measured.update) / bandwidth,
    )
    # The type whose products were measured in many shapes: bfloat16 on GPUs, float32 on CPUs.
    device = replace(
        device, kernels=fit_kernels(measured, device, "bfloat16" if measured.units else "float32")
    )
    sources = {f"device.peak.{family}": "measured: its largest product" for family in rates}
    sources["device.peak.int"] = f"assumed: {CPU_INTEGERS:g} of float32"
    sources["device.memory_bandwidth"] = (
        f"measured: a copy of {measured.copied / 2 / 2**20:g} MiB, repeats within "
        f"{spread(measured.copy):.1%}"
    )
    sources["device.memory_fraction"] = (
        "measured: addition, GELU and normalisation, forward and backward"
    )
    sources["device.update_fraction"] = (
        f"measured: a step of AdamW by default, repeats within {spread(measured.update):.1%}"
    )
    sources["device.memory_capacity"] = (
        "read: memory of the device, or of the host divided by its ranks"
    )
    sources["device.reserved"] = "read: bytes in use before any tensor was made"
    sources["device.launch"] = (
        f"measured: one of a chain of small operators, repeats within {spread(measured.launch):.1%}"
    )
    if measured.dispatch:
        sources["device.dispatch"] = (
            "measured: one of a chain of small operators as the host starts them, repeats within "
            f"{spread(measured.dispatch):.1%}"
        )
    return device, sources
