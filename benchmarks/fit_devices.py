"""Fits the constants of measured devices to tables of kernels.

They are written with their errors on shapes held back.

    python benchmarks/fit_devices.py --data DIR [--device h100_sxm ...] [--sheet] [--out
    costmodel/device/data]
    python benchmarks/fit_devices.py --data DIR --left-out --out
    benchmarks/validating/data/left_out

Each device gets one file. Nothing is drawn at random: the same tables give the same files.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.grouped_products import GroupedForm
from autopar.costmodel.device.measured_kernels import SHEET, Fitted, Kernels, dumped, kernels_of
from autopar.costmodel.device.products import ProductForm
from autopar.errors import AutoparError
from benchmarks.kernels.fits import (
    FEW,
    as_planned,
    crossed,
    fit_attention,
    fit_layers,
    fit_products,
    judged,
    lasting_as,
    log_error,
    priced_attention,
    priced_layers,
    priced_products,
    sustained_beside,
)
from benchmarks.kernels.generations import experts_of, generations_of
from benchmarks.kernels.names import attention_kernel, layer_kernel
from benchmarks.kernels.rows import DTYPES, Floats, Rows, devices_in, read
from benchmarks.kernels.sheet import BEST, Sheet
from benchmarks.kernels.transfer import transferred
from benchmarks.kernels.widths import widened

Form = TypeVar("Form", ProductForm, AttentionForm, GroupedForm)
HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "costmodel" / "device" / "data"
SOURCE = "ai-dynamo/aiconfigurator@095f58a5, {table} of {device}"
UNITS = {
    "a100_sxm": 108,
    "h100_sxm": 132,
    "h200_sxm": 132,
    "b200_sxm": 148,
    "b300_sxm": 148,
    "gb200": 152,
    "gb300": 152,
    "l40s": 142,
    "rtx_pro_6000_server": 188,
}
"""Multiprocessors, from NVIDIA's data sheets and architecture papers.

A device that is not listed is not fitted.
"""
SAME_CHIP = {"h100_sxm": "h200_sxm"}
"""Devices without rows of sustained products, each with a device of the same chip and power limit.
"""
PEAKS = {
    "bfloat16": "bf16_dense_tflops",
    "float8": "fp8_dense_tflops",
    "float8_block": "fp8_dense_tflops",
    "float4": "fp4_dense_tflops",
}


def hardware(folder: Path, device: str) -> tuple[dict[str, float], float]:
    """Peak FLOP/s by dtype, and B/s of memory."""
    with (folder / "hardware.csv").open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["gpu"] == device)
    peaks = {dtype: float(row[column]) * 1e12 for dtype, column in PEAKS.items() if row[column]}
    return peaks, float(row["mem_bw_GBps"]) * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[Form]):
    """The way to fit a form to rows, and its prices of rows.

    `priced` as rows ran, `planned` as a plan prices them, where that differs.
    """

    fit: Callable[[Rows], Form]
    priced: Callable[[Form, Rows], Floats]
    planned: Callable[[Form, Rows], Floats] | None = None


class Device:
    """The constants of one device, kind by kind."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        peak, memory = hardware(folder, name)
        self.bare = Kernels(name=name, units=UNITS[name], memory=memory, peak=peak, products={})
        self.fits: dict[str, Fitted] = {}

    def fitted(self) -> Kernels:
        """All fitted kernels."""
        products = self.products()
        attention = self.attention()
        grouped = self.grouped()
        return Kernels(
            name=self.name,
            units=self.bare.units,
            memory=self.bare.memory,
            peak=self.bare.peak,
            products=products,
            attention=attention,
            grouped=grouped,
            generations=generations_of(attention),
            experts=experts_of(grouped),
            fits=self.fits,
        )

    def judge(self, what: str, table: str, rows: Rows, form: Form, method: Method[Form]) -> None:
        """Record and print the errors of a `form`."""
        planned = method.planned or method.priced

        def left(folded: Rows) -> Floats:
            own = folded.part(folded.held)
            if not own.rows:
                return np.zeros(0)
            return -log_error(planned(method.fit(folded), own), own)

        source = SOURCE.format(table=table, device=self.name)
        held = rows.part(rows.held)
        self.fits[what] = residual = judged(
            method.priced(form, held), held, source, crossed(rows, left)
        )
        print(
            f"{self.name}: {what}: {residual.rows} rows, {residual.held} held back: median "
            f"{residual.median:.1%}, "
            f"90th percentile {residual.p90:.1%}, bias {residual.bias:+.1%}",
            file=sys.stderr,
            flush=True,
        )

    def products(self) -> dict[str, ProductForm]:
        rows = read(self.folder, "gemm", self.name)
        forms = {}
        for dtype in dict.fromkeys(DTYPES.values()):
            own = rows.part(
                rows.equal("dtype", *(name for name, other in DTYPES.items() if other == dtype))
            )
            if dtype not in self.bare.peak or len(own.rows) < FEW["gemm"]:
                continue
            speed = self.bare.speed(dtype)
            fit = partial(fit_products, speed=speed)
            priced = partial(priced_products, speed=speed)
            forms[dtype] = fit(own)
            if dtype == "bfloat16" and self.name in SAME_CHIP:
                forms[dtype] = lasting_as(
                    forms[dtype], kernels_of(SAME_CHIP[self.name]).products[dtype]
                )
            elif dtype != "bfloat16":
                forms[dtype] = sustained_beside(forms[dtype], forms["bfloat16"])
            self.judge(
                f"products {dtype}",
                "gemm",
                own,
                forms[dtype],
                Method(fit=fit, priced=priced, planned=partial(as_planned, speed=speed)),
            )
        return forms

    def attention(self) -> dict[str, AttentionForm]:
        rows = read(self.folder, "attention", self.name)
        forms = {}
        speed = self.bare.speed("bfloat16")
        names = np.array([attention_kernel(row) for row in rows.rows])
        for name in sorted(set(names)):
            own = rows.part(names == name)
            if len(own.rows) >= FEW["attention"]:
                fit = partial(fit_attention, speed=speed)
                priced = partial(priced_attention, speed=speed)
                forms[name] = fit(own)
                self.judge(
                    f"attention {name}",
                    "context_attention",
                    own,
                    forms[name],
                    Method(fit=fit, priced=priced),
                )
        return widened(forms, kernels_of(SHEET).attention[BEST].widths)

    def grouped(self) -> dict[str, GroupedForm]:
        rows = read(self.folder, "moe", self.name)
        forms = {}
        names = np.array([layer_kernel(row) for row in rows.rows])
        for name in sorted(set(names)):
            own = rows.part(names == name)
            dtype = DTYPES[own.rows[0]["dtype"]]
            if len(own.rows) >= FEW["moe"] and dtype in self.bare.peak:
                speed = self.bare.speed(dtype)
                fit = partial(fit_layers, speed=speed)
                priced = partial(priced_layers, speed=speed)
                forms[name] = fit(own)
                self.judge(
                    f"grouped {name}", "moe", own, forms[name], Method(fit=fit, priced=priced)
                )
        return forms


def plain(value: object) -> object:
    """A whole number as one."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return int(value)
    return value


def write(folder: Path, name: str, kernels: Kernels) -> None:
    """The constants of a device as the file that bears its name."""
    text = json.dumps(plain({"version": 1, **dumped(kernels)}), indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="a folder of tables of kernels"
    )
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="one device of the tables (default: all)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--transfer",
        action="store_true",
        help="only say how far off each device's constants are on the others' rows",
    )
    parser.add_argument(
        "--sheet",
        action="store_true",
        help="fit the one form of a device that only its data sheet describes, to all devices",
    )
    parser.add_argument(
        "--left-out",
        action="store_true",
        help="fit the same form without each device, for prices of runs on it as if nobody had "
        "measured it",
    )
    given = parser.parse_args(arguments)
    try:
        if given.left_out:
            sheets = Sheet(given.data, partial(print, file=sys.stderr, flush=True))
            for name in sheets.names:
                write(given.out, name, sheets.left_out(name))
            return
        if given.sheet:
            sheet = Sheet(given.data, partial(print, file=sys.stderr, flush=True)).fitted()
            write(given.out, SHEET, sheet)
            return
        if given.transfer:
            for kind, left in transferred(given.data).items():
                low, high = np.exp((left.low, left.high))
                print(
                    f"{kind}: nine in ten of {left.rows} rows take {low:.2f} to {high:.2f} of the "
                    "price"
                )
            return
        for name in given.device or [
            name for name in devices_in(given.data, "gemm") if name in UNITS
        ]:
            start = time.process_time()
            write(given.out, name, Device(given.data, name).fitted())
            print(f"{name}: {time.process_time() - start:.0f} s", file=sys.stderr)
    except AutoparError as error:
        print(f"fit_devices: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
