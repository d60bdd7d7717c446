"""Kernels of a device that nobody measured: one form for all measured devices.

Its constants are fractions of the peak and of the memory's rate, fitted to rows of every device at
once, where each generation of chips has the same weight. A data sheet tells what they are fractions
of. The form is judged by leaving out one device after another as a whole.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autopar.costmodel.cluster.residual import Residual
from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.grouped_products import GroupedForm
from autopar.costmodel.device.measured_kernels import (
    ITEMSIZE,
    SHEET,
    Fitted,
    Generation,
    Kernels,
    kernels_of,
    measured,
)
from autopar.costmodel.device.products import ProductForm, Speed

from .boxes import (
    ATTENTION,
    CLOCK,
    GROUPED,
    HELD,
    LIBRARY,
    PRODUCT,
    WARM,
    WIDTH,
    Box,
    Floats,
    attention_form,
    grouped_form,
    product_form,
)
from .fits import (
    PLAIN,
    PRIOR,
    SCALE,
    START,
    log_error,
    priced_attention,
    priced_layers,
    sustained_beside,
)
from .libraries import seconds_in
from .names import attention_kernel, layer_kernel
from .rows import DTYPES, Rows, devices_in, layer_of, product_of, read

Form = ProductForm | AttentionForm | GroupedForm

CHIPS = {
    "h100_sxm": "hopper",
    "h200_sxm": "hopper",
    "b200_sxm": "blackwell",
    "b300_sxm": "blackwell",
    "gb200": "blackwell",
    "gb300": "blackwell",
}
"""Devices that share a generation of chips."""
EACH = 120
"""Rows of a generation that a fit looks at, drawn by their checksum."""
PRODUCTS_OF = ("bfloat16", "float8", "float8_block", "float4")
"""Dtypes whose products several devices ran."""
READY = ("fp8_static",)
"""Dtypes of rows whose left operand came quantised."""
CAST = "cast"
"""The library of products that quantise their left operand first."""
WIDE_HEADS = (64, 192, 256)
"""Sizes of heads, besides 128, whose rate is fitted."""
BEST = "best"
"""The attention kernel that the maker's libraries have on a device."""
GENERATIONS = {
    "cudnn": Generation(kernel=BEST, source="assumed: the libraries of the maker"),
    "flash3": Generation(kernel=BEST, source="assumed: the libraries of the maker"),
    "flash2": Generation(kernel=BEST, source="assumed: the libraries of the maker"),
    "flash1": Generation(
        kernel=BEST,
        slower=2.0,
        source="assumed: half as fast as later kernels (arXiv:2307.08691, section 4.1)",
    ),
}
SOURCE = "ai-dynamo/aiconfigurator@095f58a5, {table} of {count} devices, each left out as a whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Rows of a device that ran one kind of kernels, and the rates of its data sheet."""

    device: str
    rows: Rows
    speed: Speed

    def drawn(self, count: int) -> Ran:
        """At most so many rows, always the same ones."""
        marks = np.array([zlib.crc32(f"{row}".encode()) for row in self.rows.rows])
        if len(marks) <= count:
            return self
        chosen = self.rows.part(marks <= np.sort(marks)[count - 1])
        return Ran(device=self.device, rows=chosen, speed=self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How to fit one form to the rows of several devices, and its prices of a device's rows."""

    fit: Callable[[Sequence[Ran]], Form]
    priced: Callable[[Form, Ran], Floats]


def _products(form: Form, ran: Ran) -> Floats:
    """Seconds of products, those of quantised operands with the cast of the left one."""
    assert isinstance(form, ProductForm)
    seconds = np.zeros(len(ran.rows.rows))
    itemsize = ITEMSIZE[DTYPES[ran.rows.rows[0]["dtype"]]]
    casts = ~ran.rows.equal("dtype", *PLAIN, *READY)
    lasts = ran.rows.equal("mode", "sustained")
    for cast, sustained in itertools.product((True, False), repeat=2):
        mask = (casts == cast) & (lasts == sustained)
        some = product_of(ran.rows.part(mask))
        seconds[mask] = seconds_in(
            form, CAST if cast else "", some, ran.speed, itemsize=itemsize, sustained=sustained
        )
    return seconds


def _fit_products(table: Sequence[Ran]) -> ProductForm:
    dtypes = {row["dtype"] for ran in table for row in ran.rows.rows}
    libraries = () if dtypes <= {*PLAIN} else (CAST,)
    sides = dict(PRODUCT.sides) | {"held": HELD}
    for name, box in LIBRARY.items():
        sides |= {f"{name} {library}": box for library in libraries if name != "factor"}

    def form(constants: Mapping[str, float], clock: Mapping[str, float] | None) -> ProductForm:
        return product_form(constants, libraries, clock)

    burst = [_mode(ran, "burst") for ran in table]
    constants = Box(sides=sides).solve(
        lambda constants: _left(form(constants, None), burst, _products),
        scale=SCALE["gemm"],
        starts=(START["light"],),
        prior=PRIOR,
        evaluations=25,
    )
    sustained = [ran for ran in (_mode(ran, "sustained") for ran in table) if ran.rows.rows]
    if not sustained:
        return form(constants, None)
    first = {"rate": constants["rate"], "heat": max(constants["heat"], 0.1), "warm": WARM}
    clock = Box(sides=CLOCK).solve(
        lambda clock: _left(form(constants, clock), sustained, _products),
        scale=SCALE["gemm"],
        starts=(first,),
        prior=PRIOR,
    )
    return form(constants, clock)


def _mode(ran: Ran, mode: str) -> Ran:
    chosen = ran.rows.part(ran.rows.equal("mode", mode))
    return Ran(device=ran.device, rows=chosen, speed=ran.speed)


def _attention(form: Form, ran: Ran) -> Floats:
    assert isinstance(form, AttentionForm)
    return priced_attention(form, ran.rows, ran.speed)


def _fit_attention(table: Sequence[Ran]) -> AttentionForm:
    sides = dict(ATTENTION.sides) | {f"width {size}": WIDTH for size in WIDE_HEADS}
    return attention_form(
        Box(sides=sides).solve(
            lambda constants: _left(attention_form(constants, WIDE_HEADS), table, _attention),
            scale=SCALE["attention"],
            prior=PRIOR,
        ),
        WIDE_HEADS,
    )


def _layers(form: Form, ran: Ran) -> Floats:
    assert isinstance(form, GroupedForm)
    return priced_layers(form, ran.rows, ran.speed)


def _fit_layers(table: Sequence[Ran]) -> GroupedForm:
    # Uneven routings are drawn once, not for every try of constants.
    drawn = [(layer_of(ran.rows), ran.rows.equal("mode", "sustained"), ran) for ran in table]
    itemsize = ITEMSIZE[DTYPES[table[0].rows.rows[0]["dtype"]]]

    def residuals(constants: Mapping[str, float]) -> Floats:
        form = grouped_form(constants)
        parts = []
        for layer, lasts, ran in drawn:
            both = (
                form.seconds(layer, ran.speed, itemsize=itemsize, sustained=mode)
                for mode in (True, False)
            )
            parts.append(log_error(np.where(lasts, *both), ran.rows))
        return np.concatenate(parts)

    return grouped_form(GROUPED.solve(residuals, scale=SCALE["moe"], prior=PRIOR))


def _left(form: Form, table: Sequence[Ran], priced: Callable[[Form, Ran], Floats]) -> Floats:
    """Logarithms of predicted over measured of all rows."""
    return np.concatenate(
        [log_error(priced(form, ran), ran.rows) for ran in table if ran.rows.rows]
    )


Fit = Callable[[str, "Sequence[Ran]", Method, str], Form]
"""How the form of a kind of kernels comes from rows of several devices."""
PRODUCTS = Method(fit=_fit_products, priced=_products)
ATTENTIONS = Method(fit=_fit_attention, priced=_attention)
LAYERS = Method(fit=_fit_layers, priced=_layers)


class Sheet:
    """The kernels of a device that only its data sheet describes, kind by kind."""

    def __init__(self, folder: Path, told: Callable[[str], None]) -> None:
        """`told` takes a line for each kind of kernels and device left out."""
        self.folder = folder
        self.told = told
        self.names = [name for name in measured() if name in devices_in(folder, "gemm")]
        self.fits: dict[str, Fitted] = {}

    def fitted(self) -> Kernels:
        """All kernels, in fractions of a peak and a memory's rate."""
        return self._kernels(self.fit)

    def left_out(self, device: str) -> Kernels:
        """The same kernels, fitted to all devices but one, and not judged."""

        def fit(what: str, table: Sequence[Ran], method: Method, source: str) -> Form:
            return method.fit(_weighed([ran for ran in table if ran.device != device]))

        return replace(self._kernels(fit), fits={})

    def _kernels(self, fit: Fit) -> Kernels:
        grouped = {dtype: self.grouped(dtype, fit) for dtype in ("bfloat16", "float8")}
        fitted = {dtype: self.products(dtype, fit) for dtype in PRODUCTS_OF}
        wide = fitted["bfloat16"]
        products = {
            dtype: form if form is wide else sustained_beside(form, wide)
            for dtype, form in fitted.items()
        }
        return Kernels(
            name=SHEET,
            units=1,
            memory=1,
            peak={},
            products=products,
            attention={BEST: self.attention(fit)},
            grouped=grouped,
            generations=GENERATIONS,
            experts={dtype: dtype for dtype in grouped},
            fits=self.fits,
        )

    def products(self, dtype: str, fit: Fit) -> ProductForm:
        table = [ran for name in self.names if (ran := _ran_products(self.folder, name, dtype))]
        form = fit(f"products {dtype}", table, PRODUCTS, "gemm")
        assert isinstance(form, ProductForm)
        return form

    def attention(self, fit: Fit) -> AttentionForm:
        table = [_ran_attention(self.folder, name) for name in self.names]
        form = fit(f"attention {BEST}", table, ATTENTIONS, "context_attention")
        assert isinstance(form, AttentionForm)
        return form

    def grouped(self, dtype: str, fit: Fit) -> GroupedForm:
        table = [ran for name in self.names if (ran := _ran_layers(self.folder, name, dtype))]
        form = fit(f"grouped {dtype}", table, LAYERS, "moe")
        assert isinstance(form, GroupedForm)
        return form

    def fit(self, what: str, table: Sequence[Ran], method: Method, source: str) -> Form:
        """The form of all devices; each one left out is priced by a form without it."""
        apart = {}
        for ran in table:
            form = method.fit(_weighed([other for other in table if other is not ran]))
            left = log_error(method.priced(form, ran), ran.rows)
            apart[ran.device] = left
            off = np.abs(np.exp(left) - 1)
            self.told(
                f"{what}, {ran.device} left out: {len(left)} rows, median {np.median(off):.1%}, "
                f"bias {np.exp(np.median(left)) - 1:+.1%}"
            )
        self.fits[what] = _judged(apart, SOURCE.format(table=source, count=len(table)))
        return method.fit(_weighed(table))


def _weighed(table: Sequence[Ran]) -> list[Ran]:
    """Equally many rows of each generation of chips."""
    chips = [CHIPS.get(ran.device, ran.device) for ran in table]
    return [ran.drawn(EACH // chips.count(chip)) for ran, chip in zip(table, chips, strict=True)]


def _judged(apart: Mapping[str, Floats], source: str) -> Fitted:
    """The errors of devices left out, with the same weight for each."""
    least = min(map(len, apart.values()))
    errors = np.concatenate([np.exp(left) - 1 for left in apart.values()])
    # As many quantiles of each device as the one with the fewest rows has rows.
    places = (np.arange(least) + 0.5) / least
    alike = np.concatenate([np.quantile(-left, places) for left in apart.values()])
    left = Residual.of(alike)
    return Fitted(
        kind="fitted",
        source=source,
        rows=len(errors),
        held=len(errors),
        median=round(float(np.median(np.abs(errors))), 4),
        p90=round(float(np.quantile(np.abs(errors), 0.9)), 4),
        bias=round(float(np.median(errors)), 4),
        low=left.low,
        middle=left.middle,
        high=left.high,
    )


def _ran_products(folder: Path, device: str, dtype: str) -> Ran | None:
    kernels = kernels_of(device)
    if dtype not in kernels.products:
        return None
    rows = read(folder, "gemm", device)
    names = [name for name, other in DTYPES.items() if other == dtype]
    own = rows.part(rows.equal("dtype", *names))
    return Ran(device=device, rows=own, speed=kernels.speed(dtype))


def _ran_attention(folder: Path, device: str) -> Ran:
    kernels = kernels_of(device)
    rows = read(folder, "attention", device)
    best = kernels.generations["cudnn"].kernel
    own = rows.part([attention_kernel(row) == best for row in rows.rows])
    return Ran(device=device, rows=own, speed=kernels.speed("bfloat16"))


def _ran_layers(folder: Path, device: str, dtype: str) -> Ran | None:
    kernels = kernels_of(device)
    if dtype not in kernels.experts:
        return None
    rows = read(folder, "moe", device)
    own = rows.part([layer_kernel(row) == kernels.experts[dtype] for row in rows.rows])
    return Ran(device=device, rows=own, speed=kernels.speed(dtype))
