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
from benchmarks.validating import steps
from benchmarks.validating.by_plan import free_plan_of_run, plan_of_run
from benchmarks.validating.missing import Missing
from benchmarks.validating.rows import Row, Run, read_tables, training_rows
from benchmarks.validating.summed import Configuration, Priced
from benchmarks.validating.training import stated_seconds

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


def fastest(rows: list[tuple[Row, Run]]) -> Iterator[tuple[Row, Run]]:
    """The run of each group, model and number of devices that takes least for a sample."""
    best: dict[tuple[str, str, str], tuple[float, Row, Run]] = {}
    for row, run in rows:
        try:
            shape, _ = steps.predict(row)
            seconds = run.seconds or stated_seconds(run, shape)
            each = seconds / float(row["global_batch"] or 1) if seconds else None
        except (AutoparError, Missing, KeyError, ValueError):
            continue
        key = (run.group, str(run.model), row["gpus"])
        if each is not None and (key not in best or each < best[key][0]):
            best[key] = (each, row, run)
    yield from ((row, run) for _, row, run in best.values())


def certified(row: Row, run: Run, seconds: float) -> Certified | None:
    """The run beside its certificate; None where its plan or the search has none."""
    seen: list[tuple[Configuration, Priced]] = []
    clusters = []

    def noting(shape, c, cluster):  # type: ignore[no-untyped-def]
        seen.append((c, steps.price(shape, c, cluster)))
        clusters.append(cluster)
        return seen[-1][1]

    try:
        shape, best = steps.predict(row, noting)
        number = next(i for i, (_, one) in enumerate(seen) if one is best)
        c, _ = seen[number]
        cluster = clusters[number]
        name = steps.framework(row).name
        own = plan_of_run(shape, c, cluster, name)
        free = free_plan_of_run(shape, c, cluster, name, seconds=seconds)
    except (AutoparError, Missing):
        return None
    measured = run.seconds or stated_seconds(run, shape)
    assert measured is not None
    return Certified(
        group=run.group,
        model=str(run.model),
        devices=c.devices,
        measured=measured,
        priced=own.predicted.step,
        bound=free.provenance.lower_bound,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of published runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of a search")
    parser.add_argument("--groups", nargs="*", default=(), help="names of groups (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    arguments = parser.parse_args()
    tables, _ = read_tables(arguments.data)
    rows = [
        (row, run)
        for row, run in training_rows(tables)
        if not arguments.groups or run.group in arguments.groups
    ]
    table = Table(*HEADINGS)
    for row, run in fastest(rows):
        if (one := certified(row, run, arguments.seconds)) is None:
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
