"""The best measured rates of a device's kernels, as fractions of its peak.

No plan on it can be faster.

Products by dtype, burst and sustained (a second of the same product, at the power limit), and the
forward pass of causal attention, of which a mask hides half. Fractions are those of the tables,
whose peaks are dense and of data sheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .rows import Row, devices_in, read

PLAUSIBLE = 1.05
"""A fraction beyond it tells of another peak, or of less work than was counted."""
WHAT = (
    ("gemm", "bfloat16", "burst"),
    ("gemm", "bfloat16", "sustained"),
    ("gemm", "fp8_static", "burst"),
    ("attention", "bfloat16", "burst"),
)
"""Kind of table, dtype and mode of the figures shown.

In the rows of fp8_static nothing is quantised.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The largest fraction of the peak in the rows of a device, and how many these are."""

    device: str
    kind: str
    dtype: str
    mode: str
    fraction: float
    rows: int


def bounds(folder: Path, device: str) -> list[Bound]:
    """The bounds of a device, as far as there are rows."""
    bounds_of_rows = []
    for kind, dtype, mode in WHAT:
        if device not in devices_in(folder, kind):
            continue
        fractions = [
            fraction
            for row in read(folder, kind, device).rows
            if (fraction := _fraction(row, kind, dtype, mode))
        ]
        if fractions:
            bounds_of_rows.append(
                Bound(
                    device=device,
                    kind=kind,
                    dtype=dtype,
                    mode=mode,
                    fraction=max(fractions),
                    rows=len(fractions),
                )
            )
    return bounds_of_rows


def _fraction(row: Row, kind: str, dtype: str, mode: str) -> float:
    """The fraction of a row of this sort; 0 for other rows."""
    if (
        row["dtype"] != dtype
        or row["mode"] != mode
        or (kind == "attention" and (row["causal"] != "1" or row["window"] not in ("", "0")))
    ):
        return 0.0
    fraction = float(row.get("frac_of_peak") or 0)
    return fraction if fraction <= PLAUSIBLE else 0.0


def shown_bounds(bounds: Sequence[Bound]) -> None:
    """Print a line for each device."""
    table = Table(title="The best fractions of the peak that were measured")
    table.add_column("device", no_wrap=True)
    for kind, dtype, mode in WHAT:
        table.add_column(
            f"{'products' if kind == 'gemm' else 'attention'} {dtype} {mode}", justify="right"
        )
    for device in dict.fromkeys(one.device for one in bounds):
        own = {
            (one.kind, one.dtype, one.mode): one.fraction for one in bounds if one.device == device
        }
        table.add_row(device, *(f"{own[what]:.1%}" if what in own else "-" for what in WHAT))
    Console(width=max(Console().width, 130), highlight=False).print(table)
