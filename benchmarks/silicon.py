"""How far the constants of measured devices can be trusted: predicted beside measured seconds of kernels that no fit saw.

Reads the tables of products, attention and layers of experts of a folder, takes the shapes that `fit_devices.py` held back, and prices
each row with the committed constants: as the library that ran it runs such products, and (`bare`) as a plan prices them, which does not
know the library. Rows of kernels that were not fitted are counted beside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from kernels.fits import bare, priced_attention, priced_layers, priced_products
from kernels.names import attention_kernel, layer_kernel
from kernels.rows import DTYPES, Floats, Rows, devices_in, read
from rich.console import Console
from rich.table import Table

from autopar.costmodel.device.kernels import Kernels, kernels_of, measured
from autopar.errors import AutoparError

QUICK = ("h100_sxm", "b200_sxm")
"""The devices that --quick looks at."""
HEADINGS = ("n", "median", "90 %", "bias", "within 10 %", "within 15 %", "within 20 %", "bare median", "not priced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of predicted over measured seconds, as fractions; `bare_median`: with the library of no row known."""

    device: str
    kind: str
    n: int
    median: float
    p90: float
    bias: float
    within_10: float
    within_15: float
    within_20: float
    bare_median: float
    not_priced: int


def scored(device: str, kind: str, predicted: Floats, plain: Floats, rows: Rows) -> Score:
    """The score of rows whose prediction is a number."""
    known = np.isfinite(predicted)
    error = predicted[known] / rows.seconds[known] - 1
    size, other = np.abs(error), np.abs(plain[known] / rows.seconds[known] - 1)
    shares = {f"within_{percent}": float((size <= percent / 100).mean()) for percent in (10, 15, 20)}
    return Score(
        device=device, kind=kind, n=int(known.sum()), median=float(np.median(size)), p90=float(np.quantile(size, 0.9)),
        bias=float(np.median(error)), bare_median=float(np.median(other)), not_priced=int((~known).sum()), **shares,
    )  # fmt: skip


def products(folder: Path, device: str, kernels: Kernels) -> Iterator[Score]:
    """Products by dtype, the 16-bit ones by mode too."""
    rows = read(folder, "gemm", device)
    rows = rows.part(rows.held)
    for dtype, form in kernels.products.items():
        names = tuple(name for name, other in DTYPES.items() if other == dtype)
        for mode in ("burst", "sustained"):
            own = rows.part(rows.equal("dtype", *names) & rows.equal("mode", mode))
            if len(own.rows) > 1:
                speed = kernels.speed(dtype)
                found, plain = priced_products(form, own, speed), priced_products(bare(form), own, speed, known=False)
                yield scored(device, f"products {dtype} {mode}", found, plain, own)


def attention(folder: Path, device: str, kernels: Kernels) -> Iterator[Score]:
    """Attention, with a causal mask and without."""
    rows = read(folder, "attention", device)
    rows = rows.part(rows.held)
    names = np.array([attention_kernel(row) for row in rows.rows])
    found = np.full(len(rows.rows), np.nan)
    for name, form in kernels.attention.items():
        if (names == name).any():
            found[names == name] = priced_attention(form, rows.part(names == name), kernels.speed("bfloat16"))
    for kind, mask in (("causal", rows.equal("causal", "1")), ("unmasked", rows.equal("causal", "0"))):
        if np.isfinite(found[mask]).sum() > 1:
            yield scored(device, f"attention {kind}", found[mask], found[mask], rows.part(mask))


def layers(folder: Path, device: str, kernels: Kernels) -> Iterator[Score]:
    """Layers of experts, in 16 bits and in fewer."""
    rows = read(folder, "moe", device)
    rows = rows.part(rows.held)
    names = np.array([layer_kernel(row) for row in rows.rows])
    found = np.full(len(rows.rows), np.nan)
    for name, form in kernels.grouped.items():
        own = rows.part(names == name)
        if own.rows:
            found[names == name] = priced_layers(form, own, kernels.speed(DTYPES[own.rows[0]["dtype"]]))
    for kind, mask in (("bfloat16", rows.equal("dtype", "bfloat16")), ("8 and 4 bits", ~rows.equal("dtype", "bfloat16"))):
        if np.isfinite(found[mask]).sum() > 1:
            yield scored(device, f"grouped {kind}", found[mask], found[mask], rows.part(mask))


def all_scores(folder: Path, *, quick: bool = False) -> list[Score]:
    """Every device with constants and rows."""
    found: list[Score] = []
    for device in (name for name in measured() if not quick or name in QUICK):
        for kind, score in (("gemm", products), ("attention", attention), ("moe", layers)):
            if device in devices_in(folder, kind):
                found += score(folder, device, kernels_of(device))
    return found


def shown(scores: list[Score]) -> None:
    """Print the table."""
    table = Table(title="Predicted against measured seconds, shapes held back")
    table.add_column("device", no_wrap=True)
    table.add_column("kernels", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for one in scores:
        shares = (f"{value:.0%}" for value in (one.within_10, one.within_15, one.within_20))
        table.add_row(
            one.device, one.kind, str(one.n), f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}", *shares, f"{one.bare_median:.1%}",
            str(one.not_priced or "-"),
        )  # fmt: skip
    Console(width=max(Console().width, 150), highlight=False).print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder of tables of kernels")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        scores = all_scores(arguments.data, quick=arguments.quick)
    except AutoparError as error:
        print(f"silicon: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    if arguments.json:
        print(json.dumps({"rows": [asdict(one) for one in scores]}, allow_nan=False))
    else:
        shown(scores)


if __name__ == "__main__":
    main()
