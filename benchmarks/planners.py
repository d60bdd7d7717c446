"""Planners of others beside ours: CPU seconds, memory and predicted steps for the same models.

    benchmarks/planners.py [--simumax DIR] [--galvatron DIR] [--hyper-parallel DIR]
                           [--autoparallel DIR] [--autoparallel-branch DIR] [--highs]
                           [--python FILE] [--limit S] [--only TEXT] [--rows FILE] [--json]
                           [--page FILE]

DIR: a checkout of MooreThreads/SimuMax, PKU-DAIR/Hetu-Galvatron (with its `galvatron_dp_core` built
in DIR by `setup.py build_ext --inplace`), mindspore-ai/hyper-parallel, meta-pytorch/autoparallel,
or of autoparallel's branch with a relaxation and TRW-S (`approximate_sharding.py`). Where it is no
clone, its file COMMIT names its state. FILE: the Python that has what they import (default: this
one). Each runs its own search, unchanged, over its own figures of the machine, by a program of
`planners_of_others/programs`; `planners_of_others/ours.py` has the models that ours plans: of
autoparallel's Llama the very module, elsewhere the same sizes.

CPU seconds and peaks are of whole processes with their imports, on one thread, one process after
the other. Steps are each planner's own predictions, which differ in what they count. `--highs`:
HiGHS and our search on our own tables, seconds of the searches alone. A row of a rival that fails
says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planners_of_others.races import RACES, Row, rows, rows_of_highs
from benchmarks.planners_of_others.table import markdown, section, with_section

LIMIT = 600.0
"""Seconds of a process."""
HIGHS = (("2x4", "8x8", "2x2x2"), "llama3-8b/2 layers")
"""The meshes and the model of the races on the same tables."""
HIGHS_LIMIT = 120.0
"""Seconds of HiGHS for a row, whose bound and best solution then count."""
CHECKOUTS = {
    "simumax": "a checkout of SimuMax",
    "galvatron": "a checkout of Hetu-Galvatron",
    "hyper-parallel": "a checkout of hyper-parallel",
    "autoparallel": "a checkout of autoparallel",
    "autoparallel-branch": "a checkout of its branch with other solvers",
}


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, words in CHECKOUTS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=words)
    parser.add_argument("--highs", action="store_true", help="race HiGHS on the same tables")
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="the Python that runs them"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="S", help="seconds of a process"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name has it")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="add rows to FILE; those that it has are not run"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into a page")
    options = parser.parse_args()
    if not options.highs and not any(map(vars(options).get, map(attribute, CHECKOUTS))):
        parser.error(f"give --highs or a checkout: {', '.join(f'--{name}' for name in CHECKOUTS)}")
    return options


def attribute(name: str) -> str:
    """The attribute of an option."""
    return name.replace("-", "_")


def rows_of(path: Path | None) -> dict[tuple[str, ...], Row]:
    """The rows of a file, by their keys; none where there is no file."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {row.key: row for row in map(Row.of_json, lines)}


def remember(path: Path | None, row: Row, known: Mapping[tuple[str, ...], Row]) -> None:
    """Add a row that is not known to the file."""
    if path is not None and row.key not in known:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_json()) + "\n")


def main() -> int:
    """Print the table, and write it into the page."""
    options = parsed()
    checkouts = {
        name: path.resolve() for name in CHECKOUTS if (path := getattr(options, attribute(name)))
    }
    races = [race for race in RACES if options.only in race.model]
    known = rows_of(options.rows)
    table = []
    for row in rows(races, checkouts, options.python, options.limit, known):
        table.append(row)
        remember(options.rows, row, known)
    highs = [row for row in known.values() if row.rival == "highs"]
    for row in rows_of_highs(*HIGHS, HIGHS_LIMIT) if options.highs and not highs else highs:
        table.append(row)
        remember(options.rows, row, known)
    if options.json:
        print(json.dumps({"rows": [row.as_json() for row in table]}))
    else:
        print(markdown(table))
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_section(page, section(table, checkouts)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
