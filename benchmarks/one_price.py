"""Published runs by the price of plans, beside the price by sums over parts of their models.

    benchmarks/one_price.py --data DIR [--rows N] [--groups NAME ...] [--json]

For each group, of at most N runs evenly spaced: the mean errors of both, their mean ratio, and that
of the bytes of the fullest device. A run that a plan cannot have is counted by its reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError
from autopar.plan import Plan
from benchmarks.validating.by_plan import defined, rows_of
from benchmarks.validating.rows import Row, Run, thinned
from benchmarks.validating.summed import Priced

HEADINGS = ("group", "runs", "by sums", "by plan", "plan / sums", "bytes", "no plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """The prices of a run: by sums and by its plan, or the reason why it has none."""

    measured: float | None
    summed: Priced
    plan: Plan | None
    reason: str = ""


def priced(row: Row, run: Run) -> Both | None:
    """Both prices of a row; None if it does not define its run."""
    if (one := defined(row, run)) is None:
        return None
    try:
        return Both(measured=one.measured, summed=one.summed, plan=one.plan())
    except AutoparError as error:
        return Both(measured=one.measured, summed=one.summed, plan=None, reason=str(error))


def groups(rows: list[tuple[Row, Run]]) -> Iterator[tuple[str, list[Both]]]:
    """The runs of each group, priced."""
    for name in dict.fromkeys(run.group for _, run in rows):
        both = (priced(row, run) for row, run in rows if run.group == name)
        yield name, [one for one in both if one is not None]


def figures(members: list[Both]) -> dict[str, float | int | None]:
    """The figures of a group; None where nothing is compared."""
    with_plan = [(one, one.plan.predicted) for one in members if one.plan is not None]
    told = [(one.measured, one.summed.step, p.step) for one, p in with_plan if one.measured]

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    return {
        "n": len(told),
        "summed_error": mean([abs(summed / seconds - 1) for seconds, summed, _ in told]),
        "plan_error": mean([abs(step / seconds - 1) for seconds, _, step in told]),
        "ratio": mean([p.step / one.summed.step for one, p in with_plan]),
        "bytes": mean([p.memory / max(one.summed.allocated) for one, p in with_plan]),
        "without": len(members) - len(with_plan),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of published runs")
    parser.add_argument("--rows", type=int, default=6, help="runs of a group")
    parser.add_argument("--groups", nargs="*", default=(), help="names of groups (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    rows = rows_of(arguments.data, arguments.groups)
    table = Table(*HEADINGS)
    told = {}
    reasons: Counter[str] = Counter()
    for name, members in groups(thinned(rows, arguments.rows)):
        reasons.update(one.reason for one in members if one.reason)
        told[name] = row = figures(members)
        shown = {"summed_error": ".1%", "plan_error": ".1%", "ratio": ".3f", "bytes": ".2f"}
        cells = ["-" if row[key] is None else format(row[key], form) for key, form in shown.items()]
        table.add_row(name, str(row["n"]), *cells, str(row["without"]))
    if arguments.json:
        print(json.dumps({"groups": told}))
        return
    console = Console()
    console.print(table)
    for reason, count in reasons.most_common():
        console.print(f"{count} x {reason}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
