"""The layout that the cost model would choose in each published sweep, and what it costs.

A sweep has three or more timed layouts of one model on one cluster, with the same global batch.

    regret      measured seconds of the layout that is predicted to be the fastest, over the best
                measured, minus 1
    mean error  of the predicted seconds of its layouts
    Spearman    rank correlation of predicted and measured seconds

    benchmarks/regret.py [--data DIR] [--layouts] [--json]

Runs of mixtures of experts come from `benchmarks/validating/data/expert_runs.json`, all others from
the files of DIR (`benchmarks/validation.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.validating.expert_runs import expert_runs
from benchmarks.validating.groups import all_groups
from benchmarks.validating.scores import (
    Group,
    Sample,
    measured_pairs,
    regret,
    relative,
    spearman,
    swept,
)

CHOSEN = 60
"""Characters of a layout's name in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sweep: its figures as fractions, and its layouts from the fastest as measured."""

    group: str
    layouts: int
    regret: float
    mean_error: float
    spearman: float | None
    chosen: str
    order: tuple[tuple[str, float, float], ...]


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """The sweeps of all groups, each once."""
    rows = []
    seen: set[object] = set()
    for group in groups:
        for members in swept(group.samples):
            if members[0].sweep not in seen:
                seen.add(members[0].sweep)
                rows.append(_row(group.name, [s for s in members if s.timed]))
    return rows


def _row(name: str, members: Sequence[Sample]) -> Row:
    predicted, measured = measured_pairs(members)
    order = sorted(
        zip((s.label for s in members), measured, predicted, strict=True), key=lambda one: one[1]
    )
    errors = relative(predicted, measured)
    return Row(
        group=name,
        layouts=len(members),
        regret=regret(predicted, measured),
        mean_error=float(abs(errors).mean()),
        spearman=spearman(predicted, measured),
        chosen=min(order, key=lambda one: one[2])[0],
        order=tuple(order),
    )


def table_of(rows: Sequence[Row]) -> Table:
    """The sweeps as a table."""
    table = Table("sweep", "layouts", "regret", "mean error", "Spearman")
    table.add_column("chosen", no_wrap=True, max_width=CHOSEN)
    for row in rows:
        rank = "" if row.spearman is None else f"{row.spearman:.2f}"
        figures = (f"{row.regret:.1%}", f"{row.mean_error:.1%}", rank)
        table.add_row(row.group, str(row.layouts), *figures, row.chosen)
    return table


def layouts_of(rows: Sequence[Row]) -> Table:
    """The layouts of all sweeps, from the fastest as measured."""
    table = Table("layout", "measured, s", "predicted, s", "error")
    for row in rows:
        for label, measured, predicted in row.order:
            figures = (f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured - 1:+.1%}")
            table.add_row(label, *figures)
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of published runs")
    parser.add_argument("--layouts", action="store_true", help="print every layout, too")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    groups = expert_runs()
    if args.data is not None:
        groups += all_groups(args.data)[0]
    rows = rows_of(groups)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    console = Console()
    console.print(table_of(rows))
    if args.layouts:
        console.print(layouts_of(rows))


if __name__ == "__main__":
    main()
