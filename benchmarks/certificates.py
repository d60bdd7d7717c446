"""Certificates of free searches beside published runs of the same model, batch and cluster.

    benchmarks/certificates.py --data DIR [--seconds N] [--groups NAME ...] [--json]

One run of each model and cluster, the fastest for its batch. A certificate says that no plan takes
less: a measured run below it refutes the price, unless the price of the run's own plan is more than
15 % off, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError
from benchmarks.validating.by_plan import Defined, defined, rows_of
from benchmarks.validating.rows import Row, Run

OFF = 0.15
"""The error of a price within which a measurement below a certificate refutes it."""
HEADINGS = ("group", "model", "devices", "measured", "own plan", "certificate", "above")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A run with its price, and the bound of the free question: seconds of a step."""

    group: str
    model: str
    devices: int
    measured: float
    priced: float
    bound: float

    @property
    def verdict(self) -> str:
        """Empty where the measurement is above the bound."""
        if self.bound <= self.measured:
            return ""
        close = abs(self.priced / self.measured - 1) <= OFF
        return "refuted" if close else "the price is off, too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run by its group, model and number of devices."""

    group: str
    model: str
    devices: int
    run: Defined


def fastest(rows: list[tuple[Row, Run]]) -> Iterator[Asked]:
    """The run of each group, model and number of devices that takes least for a sample."""
    best: dict[tuple[str, str, int], tuple[float, Defined]] = {}
    for row, run in rows:
        one = defined(row, run)
        if one is None or one.measured is None:
            continue
        key = (run.group, str(run.model), one.configuration.devices)
        each = one.measured / one.configuration.global_batch
        if key not in best or each < best[key][0]:
            best[key] = (each, one)
    for (group, model, devices), (_, one) in best.items():
        yield Asked(group=group, model=model, devices=devices, run=one)


def certified(asked: Asked, seconds: float) -> Certified | None:
    """The run beside its certificate; None where its plan or the search has none."""
    run = asked.run
    try:
        free = run.free_plan(seconds)
    except AutoparError:
        return None
    assert run.measured is not None
    return Certified(
        group=asked.group,
        model=asked.model,
        devices=asked.devices,
        measured=run.measured,
        priced=run.priced.step,
        bound=free.provenance.lower_bound,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of published runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of a search")
    parser.add_argument("--groups", nargs="*", default=(), help="names of groups (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    arguments = parser.parse_args()
    rows = rows_of(arguments.data, arguments.groups)
    table = Table(*HEADINGS)
    for asked in fastest(rows):
        if (one := certified(asked, arguments.seconds)) is None:
            continue
        figures = (one.measured, one.priced, one.bound)
        if arguments.json:
            names = ("measured", "own_plan", "certificate")
            told = dict(zip(names, figures, strict=True))
            known = {"group": one.group, "model": one.model, "devices": one.devices}
            print(json.dumps({**known, **told, "verdict": one.verdict}), flush=True)
        shown = [f"{value:.3f}" for value in figures]
        table.add_row(one.group, one.model, str(one.devices), *shown, one.verdict)
    if not arguments.json:
        Console().print(table)


if __name__ == "__main__":
    main()
