"""Scores of a device's kernels on the shapes held back.

Products are scored by dtype and mode, attention by mask, layers of experts by dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.device.measured_kernels import Kernels, kernels_of

from .fits import as_planned, priced_attention, priced_layers, priced_products
from .names import attention_kernel, layer_kernel
from .rows import DTYPES, Floats, Rows, devices_in, read
from .scores import Prices, Score, scored


class Judged:
    """Rows with their predictions and the bounds of their intervals, kernel by kernel."""

    def __init__(self, rows: Rows, kernels: Kernels) -> None:
        self.rows = rows
        self.kernels = kernels
        predicted, planned, low, high = np.full((4, len(rows.rows)), np.nan)
        self.prices = Prices(predicted=predicted, planned=planned, low=low, high=high)

    def put(
        self, mask: NDArray[np.bool_], what: str, predicted: Floats, planned: Floats | None = None
    ) -> None:
        """The rows of one fit."""
        fit = self.kernels.fits[what]
        self.prices.predicted[mask] = predicted
        self.prices.planned[mask] = predicted if planned is None else planned
        self.prices.low[mask] = np.exp(fit.low)
        self.prices.high[mask] = np.exp(fit.high)

    def score(self, kind: str, mask: NDArray[np.bool_]) -> Iterator[Score]:
        """The score of the rows in `mask`, if two or more of them are priced."""
        prices = self.prices.part(mask)
        if np.isfinite(prices.predicted).sum() > 1:
            yield scored(self.kernels.name, kind, self.rows.seconds[mask], prices)


def products(rows: Rows, kernels: Kernels) -> Iterator[Score]:
    """Products by dtype, burst and sustained."""
    judged = Judged(rows, kernels)
    for dtype, form in kernels.products.items():
        own = rows.equal("dtype", *(name for name, other in DTYPES.items() if other == dtype))
        if own.any():
            some = rows.part(own)
            speed = kernels.speed(dtype)
            judged.put(
                own,
                f"products {dtype}",
                priced_products(form, some, speed),
                as_planned(form, some, speed),
            )
        for mode in ("burst", "sustained"):
            yield from judged.score(f"products {dtype} {mode}", own & rows.equal("mode", mode))


def attention(rows: Rows, kernels: Kernels) -> Iterator[Score]:
    """Attention, with a causal mask and without."""
    judged = Judged(rows, kernels)
    names = np.array([attention_kernel(row) for row in rows.rows])
    for name, form in kernels.attention.items():
        own = names == name
        if own.any():
            judged.put(
                own,
                f"attention {name}",
                priced_attention(form, rows.part(own), kernels.speed("bfloat16")),
            )
    for kind, value in (("causal", "1"), ("unmasked", "0")):
        yield from judged.score(f"attention {kind}", rows.equal("causal", value))


def layers(rows: Rows, kernels: Kernels) -> Iterator[Score]:
    """Layers of experts, in 16 bits and in fewer."""
    judged = Judged(rows, kernels)
    names = np.array([layer_kernel(row) for row in rows.rows])
    for name, form in kernels.grouped.items():
        own = names == name
        if own.any():
            some = rows.part(own)
            judged.put(
                own,
                f"grouped {name}",
                priced_layers(form, some, kernels.speed(DTYPES[some.rows[0]["dtype"]])),
            )
    yield from judged.score("grouped bfloat16", rows.equal("dtype", "bfloat16"))
    yield from judged.score("grouped 8 and 4 bits", ~rows.equal("dtype", "bfloat16"))


KINDS = (("gemm", products), ("attention", attention), ("moe", layers))


def kernel_scores(folder: Path, device: str) -> list[Score]:
    """The scores of one device, of every kind of kernels that the folder has a table of."""
    scores: list[Score] = []
    for kind, judge in KINDS:
        if device in devices_in(folder, kind):
            rows = read(folder, kind, device)
            scores += judge(rows.part(rows.held), kernels_of(device))
    return scores
