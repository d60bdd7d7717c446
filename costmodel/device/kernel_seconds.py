"""Seconds of kernels on a device: by its measured kernels, or else by fractions of its peak.

A training step meets a device at its power limit, so measured kernels are priced at their sustained
clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention import BACKWARD_WORK, Scores
from .attention_kernels import alike, standing_for
from .device import FAMILIES, ITEMSIZE, Device
from .elementwise import memory_seconds, with_launch
from .grouped_products import Dealt, GroupedProduct
from .measured_kernels import Kernels
from .products import Product, Speed
from .unmeasured_kernels import attention_arithmetic, plain_arithmetic

Floats = NDArray[np.float64]

TENSOR = ("bfloat16", "float16")
"""Families of dtypes that tensor units run alike. If one was measured, its constants price the
other, at the other's peak; if neither was, those of any measured family do.
"""
SCALAR = 0.92
"""Share of the peak that float32 products reach on units that are no tensor units.

Such units do not wait for operands: layers of OPT-30B take 7.94 TFLOP in 0.441 s on an A100
(eth-easl/sailor@cf2c8e3c, profiled). Assumed of other devices, where a low power limit (an L4) or a
locked clock may leave less.
"""
ALIGNMENT_BYTES = 16
"""Rows of operands whose bytes are no multiple of it are loaded piece by piece, where tensor units
wait for them...
"""
TENSOR_BYTES = 2
"""... which is for elements of at most so many bytes."""


def product_seconds(
    product: Product,
    dtype: str,
    device: Device,
    *,
    itemsize: float,
    nbytes: Floats | None = None,
    launches: float = 1.0,
) -> Floats:
    """Seconds of a matrix product of operands with elements of `itemsize` bytes.

    `nbytes`: the bytes that it moves (None: both operands and the result in their own dtype, each
    once).
    """
    moved = product.traffic(itemsize, itemsize) if nbytes is None else nbytes
    packed = itemsize if itemsize >= 1 else 0.5  # the scales of narrower elements lie apart
    n = product.n * packed
    k = product.k * packed
    ragged = (np.mod(n, ALIGNMENT_BYTES) + np.mod(k, ALIGNMENT_BYTES) > 0) & (
        itemsize <= TENSOR_BYTES
    )
    slower = np.where(ragged, 1 / device.ragged_fraction, 1.0)
    scalar = _scalar(dtype, device)
    if device.kernels is None or scalar:
        arithmetic = plain_arithmetic(product, dtype, device) * slower / (SCALAR if scalar else 1.0)
        return with_launch(arithmetic, memory_seconds(moved, device), device, launches=launches)
    form = device.kernels.products[stands_for(FAMILIES[dtype], device.kernels)]
    return form.seconds(
        product, speed_of(device, dtype), itemsize=itemsize, nbytes=moved, slower=slower
    )


def stands_for(family: str, kernels: Kernels) -> str:
    """The measured family of dtypes that prices products of `family`."""
    return next(name for name in (family, *TENSOR, *kernels.products) if name in kernels.products)


def experts_kernel(family: str, kernels: Kernels) -> str | None:
    """The measured kernel that prices grouped products of `family`."""
    alike = TENSOR if family in TENSOR else (family,)
    return next((kernels.experts[name] for name in alike if name in kernels.experts), None)


def speed_of(device: Device, dtype: str) -> Speed:
    """The rates that the constants of a device's kernels are fractions of."""
    kernels = _kernels(device)
    return Speed(
        flops=device.flops(dtype) * device.clock,
        memory=device.memory_bandwidth,
        reference=kernels.memory,
        units=device.units or kernels.units,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Attention to be priced: its local sizes, FLOPs of its forward pass, and bytes moved."""

    scores: Scores
    flops: Floats
    nbytes: Floats


def attention_seconds(
    work: AttentionWork, kernel: str, direction: str, dtype: str, device: Device
) -> Floats:
    """Return the seconds of attention in one `kernel` (flash1, triton, flash2, flash3, cudnn).

    The kernel has a framework's name; the nearest one stands for a kernel that the device lacks.
    `direction`: forward or backward.
    """
    kernel, share = alike(kernel, direction)
    scalar = _scalar(dtype, device)
    if device.kernels is None or scalar:
        flops = work.flops * (BACKWARD_WORK if direction == "backward" else 1.0)
        arithmetic = (
            flops / (device.flops(dtype) * SCALAR)
            if scalar
            else attention_arithmetic(flops, kernel, direction, dtype, device)
        )
        return with_launch(share * arithmetic, memory_seconds(work.nbytes, device), device)
    known = device.kernels.generations
    entry = known[standing_for(kernel, known, f"device {device.name!r}")]
    form = device.kernels.attention[entry.kernel]
    speed = speed_of(device, dtype)
    if direction == "backward":
        seconds = form.backward(work.scores, speed)
    else:
        seconds = form.seconds(work.scores, speed)
    return np.asarray(entry.slower * share * seconds)


def grouped_seconds(
    product: Product, dtype: str, device: Device, *, nbytes: Floats | None = None
) -> Floats:
    """Return the seconds of a product for each expert of a rank, in the kernel of its layers.

    `nbytes`: the bytes that they move (None: both operands and the result, each once).
    """
    kernel = experts_kernel(FAMILIES[dtype], device.kernels) if device.kernels else None
    return batched_seconds(product, kernel, dtype, device, nbytes=nbytes)


def batched_seconds(
    product: Product,
    kernel: str | None,
    dtype: str,
    device: Device,
    *,
    nbytes: Floats | None = None,
) -> Floats:
    """Return the seconds of many products in one grouped kernel, of which [m, k] holds the rows.

    Where the kernel was not measured (None), they take as long as a library's products.
    """
    itemsize = ITEMSIZE[dtype]
    form = device.kernels.grouped.get(kernel or "") if device.kernels else None
    if form is None:
        return product_seconds(product, dtype, device, itemsize=itemsize, nbytes=nbytes)
    dealt = Dealt.evenly(product.batch * product.m, product.batch)
    each = GroupedProduct(dealt=dealt, n=product.n, k=product.k)
    # The form's own launch is that of a whole layer, of which this is one product.
    return device.launch + form.product(
        each, speed_of(device, dtype), itemsize=itemsize, nbytes=nbytes
    )


def large_product_rate(device: Device, dtype: str, side: float = 8192.0) -> float:
    """FLOP/s that a large product reaches: by it devices are compared."""
    # Of this side, tiles and launches hardly count on any device.
    one = np.full(1, side)
    return float(
        2
        * side**3
        / product_seconds(
            Product(batch=np.ones(1), m=one, n=one, k=one), dtype, device, itemsize=2
        )[0]
    )


def _scalar(dtype: str, device: Device) -> bool:
    """Whether float32 runs on other units than the kernels that were measured in 16 bits."""
    return (
        device.kernels is not None
        and FAMILIES[dtype] == "float32"
        and "float32" not in device.kernels.products
    )


def _kernels(device: Device) -> Kernels:
    assert device.kernels is not None, "asked only where kernels were measured"
    return device.kernels
