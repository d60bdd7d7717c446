"""Constants of a device, fitted to its rows by least squares on log(predicted / measured seconds).

The shapes held back are left out.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.grouped_products import GroupedForm
from autopar.costmodel.device.measured_kernels import ITEMSIZE, Fitted
from autopar.costmodel.device.products import Clock, ProductForm, Speed

from .boxes import (
    ATTENTION,
    CLOCK,
    GROUPED,
    HELD,
    LIBRARY,
    PRODUCT,
    SLOW,
    VERSION,
    WARM,
    WIDTH,
    Box,
    attention_form,
    grouped_form,
    product_form,
)
from .libraries import seconds_in
from .rows import DTYPES, FOLDS, Rows, layer_of, product_of, scores_of

Floats = NDArray[np.float64]

SCALE = {"gemm": 0.05, "attention": 0.07, "moe": 0.1}
"""Beyond such a residual a row counts by its size, not by its square."""
PRIOR = 0.02
FEW = {"attention": 30, "moe": 60, "gemm": 60}
"""The least rows for which a kernel is fitted."""
PLAIN = ("bfloat16", "float16")
"""Dtypes of rows that nothing is quantised to."""
FEW_ROWS = 10
"""The least rows for which a version of a kernel gets a factor of its own."""
MOST = 2500
"""Rows that a fit looks at, drawn by their checksum."""
START: Mapping[str, Mapping[str, float]] = {
    "busy": {
        "rate": 0.9,
        "square": 0.9,
        "quantum": 0.9,
        "prologue": 60.0,
        "epilogue": 180.0,
        "blend": 4.0,
        "heat": 0.15,
        "warm": 1.5e-3,
    },
    "light": {"rate": 0.7, "epilogue": 45.0, "blend": 2.5, "heat": 0.3, "warm": 1e-3},
}
"""Two places to start a fit of products from.

Whole waves of few tile sizes, and tiles of many sizes.
"""


def log_error(predicted: Floats, rows: Rows) -> Floats:
    """Logarithm of predicted over measured."""
    return np.asarray(np.log(predicted / rows.seconds))


def judged(predicted: Floats, rows: Rows, source: str, crossed: Floats) -> Fitted:
    """The errors of a fit on rows that it did not see.

    These are the rows held back, and (`crossed`: log(measured / predicted)) the others, each judged
    by a fit without it.
    """
    errors = predicted / rows.seconds - 1
    size = np.abs(errors)
    if len(size):
        figures = (np.median(size), np.quantile(size, 0.9), np.median(errors))
    else:
        figures = (0.0, 0.0, 0.0)
    median, p90, bias = (round(float(value), 4) for value in figures)
    left = {name: value for name, value in asdict(Residual.of(crossed)).items() if name != "rows"}
    return Fitted(
        kind="fitted",
        source=source,
        rows=len(crossed),
        held=len(size),
        median=median,
        p90=p90,
        bias=bias,
        **left,
    )


def crossed(rows: Rows, left: Callable[[Rows], Floats]) -> Floats:
    """Residuals of every fold but the one held back, each by a fit without that fold.

    `left` gives a fold's.
    """
    return np.concatenate([left(rows.leaving(fold)) for fold in range(1, FOLDS)])


def fewer(rows: Rows) -> Rows:
    """At most `MOST` rows, always the same ones."""
    if len(rows.rows) <= MOST:
        return rows
    marks = np.array([zlib.crc32(f"{row}".encode()) for row in rows.rows])
    return rows.part(marks <= np.sort(marks)[MOST - 1])


def library_of(row: Mapping[str, str]) -> str:
    """The library and dtype of a product.

    The dtype says whether the activation is quantised before.
    """
    return f"{row['framework']} {row['dtype']}"


def priced_products(form: ProductForm, rows: Rows, speed: Speed, *, known: bool = True) -> Floats:
    """Seconds of the rows of one dtype, each in its mode; `known`: as its own library runs it."""
    seconds = np.zeros(len(rows.rows))
    itemsize = ITEMSIZE[DTYPES[rows.rows[0]["dtype"]]]
    groups = Counter((library_of(row) if known else "", row["mode"]) for row in rows.rows)
    names = np.array([library_of(row) if known else "" for row in rows.rows])
    for library, mode in groups:
        mask = (names == library) & rows.equal("mode", mode)
        some = product_of(rows.part(mask))
        seconds[mask] = seconds_in(
            form, library, some, speed, itemsize=itemsize, sustained=mode == "sustained"
        )
    return seconds


def fit_products(
    rows: Rows,
    speed: Speed,
    *,
    starts: Sequence[Mapping[str, float]] = tuple(START.values()),
    prior: float = PRIOR,
) -> ProductForm:
    """The form of one dtype: burst constants, libraries and the sustained clock.

    The libraries are neutral together if nothing is quantised.
    """
    seen = rows.part(~rows.held)
    burst = fewer(seen.part(seen.equal("mode", "burst")))
    libraries = tuple(sorted({library_of(row) for row in rows.rows}))
    sides = dict(PRODUCT.sides) | ({"held": HELD} if speed.memory < SLOW else {})
    for library in libraries:
        plain = library.split()[-1] in PLAIN
        sides |= {
            f"{name} {library}": box
            for name, box in LIBRARY.items()
            if name == "factor" or not plain
        }
    ones = [f"factor {library}" for library in libraries]

    def residuals(constants: Mapping[str, float]) -> Floats:
        form = product_form(constants, libraries)
        neutral = 20 * np.array([np.mean(np.log([constants[name] for name in ones]))])
        return np.concatenate([log_error(priced_products(form, burst, speed), burst), neutral])

    constants = Box(sides=sides).solve(
        residuals, scale=SCALE["gemm"], starts=starts, prior=prior, evaluations=30
    )
    lasting = seen.part(seen.equal("mode", "sustained"))
    if len(lasting.rows) < FEW["gemm"]:
        return product_form(constants, libraries)
    return product_form(constants, libraries, _sustained(constants, libraries, lasting, speed))


def _sustained(
    constants: Mapping[str, float], libraries: Sequence[str], rows: Rows, speed: Speed
) -> dict[str, float]:
    """The clock of products that repeat for a second."""
    first = {"rate": constants["rate"], "heat": max(constants["heat"], 0.1), "warm": WARM}

    def residuals(clock: Mapping[str, float]) -> Floats:
        return log_error(
            priced_products(product_form(constants, libraries, clock), rows, speed), rows
        )

    return Box(sides=CLOCK).solve(residuals, scale=SCALE["gemm"], starts=(first,), prior=PRIOR)


def lasting_as(form: ProductForm, other: ProductForm) -> ProductForm:
    """The form of a device without sustained rows.

    The clock is that of another with the same chip and power limit.
    """
    rate = form.burst.rate * other.sustained.rate / other.burst.rate
    heat = (1 + form.burst.heat) * (1 + other.sustained.heat) / (1 + other.burst.heat) - 1
    return replace(form, sustained=Clock(rate=rate, heat=heat, warm=other.sustained.warm))


def sustained_beside(form: ProductForm, wide: ProductForm) -> ProductForm:
    """The form of narrow operands of which no sustained rows exist.

    The power limit takes from them what it takes from products of 16 bits on the same device. What
    a fit to a few replays says of long products is no measure of it.
    """
    rate = form.burst.rate * wide.sustained.rate / wide.burst.rate
    return replace(
        form, sustained=Clock(rate=rate, heat=wide.sustained.heat, warm=wide.sustained.warm)
    )


def priced_attention(form: AttentionForm, rows: Rows, speed: Speed) -> Floats:
    """Seconds of the rows of one kernel."""
    scores = scores_of(rows)
    lasting = rows.equal("mode", "sustained")
    longer = np.array([form.versions.get(version_of(row), 1.0) for row in rows.rows])
    return longer * np.where(
        lasting,
        form.seconds(scores, speed, sustained=True),
        form.seconds(scores, speed, sustained=False),
    )


def version_of(row: Mapping[str, str]) -> str:
    """The framework of a row, with its version."""
    return f"{row['framework']} {row['version']}"


def fit_attention(rows: Rows, speed: Speed) -> AttentionForm:
    """The form of one kernel."""
    seen = fewer(rows.part(~rows.held))
    widths = tuple(sorted({int(row["head_dim"]) for row in rows.rows} - {128}))
    counts = Counter(version_of(row) for row in seen.rows)
    versions = tuple(
        sorted(
            name
            for name in counts
            if name != counts.most_common(1)[0][0] and counts[name] >= FEW_ROWS
        )
    )
    sides = (
        dict(ATTENTION.sides)
        | {f"width {size}": WIDTH for size in widths}
        | {f"version {name}": VERSION for name in versions}
    )

    def residuals(constants: Mapping[str, float]) -> Floats:
        return log_error(
            priced_attention(attention_form(constants, widths, versions), seen, speed), seen
        )

    return attention_form(
        Box(sides=sides).solve(residuals, scale=SCALE["attention"], prior=PRIOR), widths, versions
    )


def priced_layers(form: GroupedForm, rows: Rows, speed: Speed) -> Floats:
    """Seconds of the layers of experts of one kernel and dtype."""
    layer = layer_of(rows)
    lasting = rows.equal("mode", "sustained")
    itemsize = ITEMSIZE[DTYPES[rows.rows[0]["dtype"]]]
    both = (form.seconds(layer, speed, itemsize=itemsize, sustained=mode) for mode in (True, False))
    return np.where(lasting, *both)


def fit_layers(rows: Rows, speed: Speed) -> GroupedForm:
    """The form of one kernel and dtype."""
    seen = fewer(rows.part(~rows.held))
    layer = layer_of(seen)
    lasting = seen.equal("mode", "sustained")
    itemsize = ITEMSIZE[DTYPES[rows.rows[0]["dtype"]]]
    modes = [mode for mode in (True, False) if (lasting == mode).any()]

    def residuals(constants: Mapping[str, float]) -> Floats:
        form = grouped_form(constants)
        seconds = [form.seconds(layer, speed, itemsize=itemsize, sustained=mode) for mode in modes]
        return log_error(seconds[0] if len(seconds) == 1 else np.where(lasting, *seconds), seen)

    return grouped_form(GROUPED.solve(residuals, scale=SCALE["moe"], prior=PRIOR))


def as_planned(form: ProductForm, rows: Rows, speed: Speed) -> Floats:
    """Seconds of one dtype's rows as a plan prices them.

    With the library only if rows include quantising.
    """
    plain = all(row["dtype"] in PLAIN for row in rows.rows)
    return priced_products(bare(form) if plain else form, rows, speed, known=not plain)


def bare(form: ProductForm) -> ProductForm:
    """The form without libraries: the average product."""
    return replace(form, libraries={})
