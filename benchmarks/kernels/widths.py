"""Rates of head sizes beyond those that an attention kernel's rows have, from other kernels.

The share of such a size is the median of that of the device's other causal kernels, or else that
of all devices together (the form of a data sheet). Between measured sizes a kernel's own shares
tell more. Of 78 shares that rows do have, left out one by
one, the first are 8 % off in the median; the rate of heads of 128, taken for them, is 19 % off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.costmodel.device.attention import AttentionForm

USUAL = 128.0
"""The size whose rate others are shares of."""
UNMASKED = "unmasked"
"""The end of the names of kernels without a mask."""


def widened(
    forms: Mapping[str, AttentionForm], everywhere: Mapping[str, float]
) -> dict[str, AttentionForm]:
    """Kernels of a device with a rate for every larger or smaller size that any other one has.

    `everywhere`: the shares of all devices together.
    """
    causal = [form for name, form in forms.items() if not name.endswith(UNMASKED)]
    measured: dict[str, list[float]] = {}
    for form in causal:
        for size, share in form.widths.items():
            measured.setdefault(size, []).append(share)
    shares = {**everywhere, **{size: float(np.median(own)) for size, own in measured.items()}}
    return {
        name: form
        if name.endswith(UNMASKED)
        else replace(form, widths=_with_beyond(form.widths, shares))
        for name, form in forms.items()
    }


def _with_beyond(own: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """A kernel's own shares, and others' below and above them, by size."""
    sizes = [USUAL, *map(float, own)]
    beyond = {
        size: float(f"{share:.5g}")
        for size, share in shares.items()
        if not min(sizes) <= float(size) <= max(sizes)
    }
    return dict(sorted({**beyond, **own}.items(), key=lambda item: float(item[0])))
