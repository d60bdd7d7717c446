"""Errors of an unmeasured device.

The rows held back of each device, priced with the constants of every other one.

The others' constants are fractions of the peak and of the memory's rate, so only the device's data
sheet is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.device.measured_kernels import Kernels, kernels_of, measured

from .fits import bare, priced_attention, priced_layers, priced_products
from .names import attention_kernel, layer_kernel
from .rows import Floats, Rows, devices_in, read

GENERATIONS = ("flash2", "flash3")


def transferred(folder: Path) -> dict[str, Residual]:
    """Residuals over all pairs of devices, for 16-bit products, attention and layers of experts."""
    residuals: dict[str, list[Floats]] = {}
    names = [name for name in measured() if name in devices_in(folder, "gemm")]
    for name in names:
        tables = {kind: read(folder, kind, name) for kind in ("gemm", "attention", "moe")}
        held = {kind: rows.part(rows.held) for kind, rows in tables.items()}
        for other in (other for other in names if other != name):
            for kind, left in _pair(held, kernels_of(name), kernels_of(other)):
                residuals.setdefault(kind, []).append(left)
    return {kind: Residual.of(np.concatenate(parts)) for kind, parts in residuals.items()}


def _pair(held: dict[str, Rows], own: Kernels, other: Kernels) -> Iterator[tuple[str, Floats]]:
    """Logarithms of measured over predicted, for each kind of kernels that both have."""
    speed = own.speed("bfloat16")
    products = held["gemm"].part(held["gemm"].equal("dtype", "bfloat16"))
    yield (
        "products",
        np.log(
            products.seconds
            / priced_products(bare(other.products["bfloat16"]), products, speed, known=False)
        ),
    )
    names = np.array([attention_kernel(row) for row in held["attention"].rows])
    for generation in GENERATIONS:
        mine = own.generations[generation]
        theirs = other.generations[generation]
        rows = held["attention"].part(names == mine.kernel)
        if rows.rows:
            predicted = (
                priced_attention(other.attention[theirs.kernel], rows, speed) * theirs.slower
            )
            yield "attention", np.log(rows.seconds * mine.slower / predicted)
    kernel = own.experts.get("bfloat16")
    stands = other.experts.get("bfloat16")
    if kernel and stands:
        rows = held["moe"].part([layer_kernel(row) == kernel for row in held["moe"].rows])
        yield "grouped", np.log(rows.seconds / priced_layers(other.grouped[stands], rows, speed))
