"""The measured kernels of a device, for `autopar cluster show`.

Each constant has its source and its error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from autopar.costmodel import Device
from autopar.costmodel.device.measured_kernels import Fitted, Kernels

from .tables import Table

DIGITS = 4


def kernel_tables(device: Device) -> list[Table]:
    """The kernels with their errors, and the constants of those used in prices.

    There are no tables without measured kernels.
    """
    return [] if device.kernels is None else [_fits(device.kernels), _constants(device.kernels)]


def _fits(kernels: Kernels) -> Table:
    rows = tuple(
        (what, fit.kind, str(fit.rows), str(fit.held), *_errors(fit), fit.source)
        for what, fit in kernels.fits.items()
    )
    used = tuple(
        (
            f"attention called {name}",
            "",
            "",
            "",
            "",
            "",
            "",
            "",
            f"{entry.kernel}, {entry.slower:g} times as long; {entry.source}",
        )
        for name, entry in kernels.generations.items()
    )
    columns = (
        "kernels",
        "kind",
        ">rows",
        ">held back",
        ">median error",
        ">90 %",
        ">bias",
        ">interval",
        "source",
    )
    return Table(
        title="Kernels, with errors on shapes held back and the interval of nine in ten rows",
        columns=columns,
        rows=rows + used,
    )


def _errors(fit: Fitted) -> tuple[str, str, str, str]:
    """The errors of a kernel: median, 90th percentile and bias, and the ratio to the prediction."""
    interval = f"{math.exp(fit.low):.2f} to {math.exp(fit.high):.2f}" if fit.low < fit.high else "-"
    return (
        (f"{fit.median:.1%}", f"{fit.p90:.1%}", f"{fit.bias:+.1%}", interval)
        if fit.held
        else ("-", "-", "-", interval)
    )


def _constants(kernels: Kernels) -> Table:
    attention = dict.fromkeys(entry.kernel for entry in kernels.generations.values())
    forms: dict[str, object] = {
        f"products {dtype}": form for dtype, form in kernels.products.items()
    }
    forms |= {f"attention {name}": kernels.attention[name] for name in attention}
    forms |= {
        f"grouped {name}": kernels.grouped[name] for name in dict.fromkeys(kernels.experts.values())
    }
    peaks = (
        ("all", "units", f"{kernels.units:g}"),
        ("all", "memory", f"{kernels.memory:.{DIGITS}g} B/s"),
    )
    rates = tuple(
        (f"products {dtype}", "peak", f"{value:.{DIGITS}g} FLOP/s")
        for dtype, value in kernels.peak.items()
    )
    rows = tuple(
        (what, name, value) for what, form in forms.items() for name, value in _named(form)
    )
    title = (
        "Constants of the kernels that prices are made of (s, bytes, fractions of peak and memory)"
    )
    return Table(
        title=title, columns=("kernels", "constant", ">value"), rows=(*peaks, *rates, *rows)
    )


def _named(form: object, before: str = "") -> Iterator[tuple[str, str]]:
    """The constants of a form by name; a part's name and a point stand before theirs."""
    assert is_dataclass(form), "the forms of kernels are dataclasses"
    for each in fields(form):
        value = getattr(form, each.name)
        name = f"{before}{each.name}"
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from (
                    _named(inner, f"{name}.{key}.")
                    if is_dataclass(inner)
                    else [(f"{name}.{key}", f"{inner:.{DIGITS}g}")]
                )
        elif is_dataclass(value):
            yield from _named(value, f"{name}.")
        else:
            yield name, f"{value:.{DIGITS}g}"
