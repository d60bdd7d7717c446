"""The search against its rivals on the same tables, and its scaling.

    benchmarks/search.py [--models DIR] [--wide] [--quick] [--json] [--plots DIR] [--time-limit S]
                         [--rivals ...] [--meshes 8 2x4 2x2x2x2 ...] [--in-a-row 125 ...]

Rivals: `highs` (the integer program, by HiGHS), `exhaustive` where it can, and
`recursive_programming`, our near-linear search, for how much faster it is and what it gives away.
`ours` is `dynamic_programming`. Both start cold (no order of elimination known) and are run several
times where they are brief; the other rivals run once. CPU seconds of one thread, the garbage
collector off. A rival that ran out of time counts with the time it took. A model that cannot be
read, and a mesh that cannot be laid or searched, are named as left out.

`--wide` adds models whose graphs are wide: windows of attention, and state space beside attention
and experts. `--in-a-row N ...` repeats the tables of each model so many times in a row.

Curves: CPU seconds of tables and search of Llama-3-8B's shape over layers (`layers`: the whole
graph; `folded`: with its equal layers folded, which is what the planner searches), over devices and
over axes of the mesh.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import unknown
from autopar.report.plot import svg
from benchmarks.searching.curves import Point, panels, points
from benchmarks.searching.models import Model, analysed, built_in, cost_graph, in_a_row, public
from benchmarks.searching.rivals import EQUAL, RIVALS, LeftOut, Row, race
from benchmarks.searching.wide_models import wide

MESHES = ("8", "2x4", "8x8", "2x2x2")
TARGET = 100.0
"""Ratio of HiGHS's time to ours."""
FASTER = "recursive_programming"
"""The rival that is to be faster."""
THRICE = 3.0
"""Ratio of our time to its."""


def rows(
    models: Sequence[Model],
    meshes: Sequence[str],
    rivals: Sequence[str],
    seconds: float,
    copies: Sequence[int] = (1,),
) -> Iterator[Row | LeftOut]:
    """Every race, of so many copies of a model's tables in a row; HiGHS is loaded before."""
    import scipy.optimize  # noqa: F401 - loaded before the first race

    for model in models:
        try:
            analysis = analysed(model.load())
        except Exception as error:  # the models are others' code
            yield LeftOut(model=model.name, mesh="", why=f"{type(error).__name__}: {error}")
            continue
        for mesh in meshes:
            try:
                graph = cost_graph(analysis, tuple(map(int, mesh.split("x"))))
                for count in copies:
                    name = model.name if count == 1 else f"{model.name} x {count}"
                    row = in_a_row(graph, count)
                    yield from race(name, mesh, row, seconds=seconds, rivals=rivals)
            except (ValueError, MemoryError) as error:
                yield LeftOut(model=model.name, mesh=mesh, why=f"{type(error).__name__}: {error}")


def show_row(row: Row | LeftOut) -> None:
    """One line of the table."""
    if isinstance(row, LeftOut):
        print(f"{row.model:22} {row.mesh:8} left out: {row.why}", flush=True)
        return
    rival_s = "-" if row.rival_s is None else f"{row.rival_s:.3f}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.0f}x"
    print(
        f"{row.model:22} {row.mesh:8} {row.rival:22} {row.ours_s:9.3f} {rival_s:>9} {ratio:>7} "
        f"{row.ours_cost:12.6g} {row.ours_gap:8.1e} "
        f"{row.verdict:>9}  {row.note}",
        flush=True,
    )


def show_summary(table: Sequence[Row]) -> None:
    """Equal optima, ratios and how much dearer the rivals' solutions are, by rival and axes."""
    for rival, axes in sorted({(row.rival, row.axes) for row in table}):
        mine = [row for row in table if (row.rival, row.axes) == (rival, axes)]
        done = [row for row in mine if row.rival_cost is not None and row.note != "out of time"]
        ratios = [row.ratio for row in mine if row.ratio is not None]
        equal = sum(row.verdict == "equal" for row in done)
        words = [
            f"{rival}, {axes} {'axis' if axes == 1 else 'axes'}: "
            f"{len(done)} of {len(mine)} finished, {equal} equal"
        ]
        if ratios:
            target = TARGET
            what = "time ratio"
            if rival == FASTER:
                ratios = [1.0 / max(ratio, 1e-9) for ratio in ratios]
                target = THRICE
                what = "times as fast"
            words.append(
                f"{what} {min(ratios):.1f} to {max(ratios):.0f}, median "
                f"{statistics.median(ratios):.1f}"
            )
            words.append(
                f"{sum(ratio >= target for ratio in ratios)} of {len(ratios)} at least {target:.0f}"
            )
        excesses = [row.excess for row in done if row.excess is not None]
        if excesses:
            at_zero = sum(excess <= EQUAL for excess in excesses)
            words.append(
                f"largest gap to ours {max(0.0, *excesses):.4%}, none in {at_zero} of "
                f"{len(excesses)}"
            )
        print("; ".join(words))


def show_points(points: Sequence[Point]) -> None:
    """The curves."""
    print(
        f"\n{'curve':8} {'at':>7} {'mesh':>8} {'variables':>9} {'joins':>6} {'tables s':>9} "
        f"{'first s':>9} {'again s':>9} {'gap':>8}"
    )
    for p in points:
        seconds = f"{p.tables_s:9.3f} {p.cold_s:9.3f} {p.warm_s:9.3f}"
        print(
            f"{p.curve:8} {p.at:7d} {p.mesh:>8} {p.variables:9d} {p.joins:6d} {seconds} "
            f"{p.gap:8.1e}"
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="a folder with public_models.py (default: shapes of transformers)",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only the models of these names")
    parser.add_argument("--wide", action="store_true", help="models of wide graphs, too")
    parser.add_argument(
        "--in-a-row",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="copies of the tables in a row (default: 1)",
    )
    parser.add_argument("--full", action="store_true", help="the folder's ONNX files, too")
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=None,
        metavar="8x8",
        help=f"meshes (default: {' '.join(MESHES)})",
    )
    parser.add_argument(
        "--rivals",
        nargs="+",
        default=list(RIVALS),
        metavar="NAME",
        help=f"of {', '.join(RIVALS)} (default: all)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=None,
        metavar="S",
        help="seconds of HiGHS a row (default: 120, quick 5)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes and short curves: within a minute"
    )
    parser.add_argument("--no-rows", action="store_true", help="leave the races out")
    parser.add_argument("--no-curves", action="store_true", help="leave the scaling curves out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write search.svg into DIR")
    options = parser.parse_args(arguments)
    for name in options.rivals:
        if name not in RIVALS:
            parser.error(unknown("rival", name, RIVALS))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    chosen = parsed(arguments)
    models = (
        public(chosen.models, full=chosen.full) if chosen.models else built_in(quick=chosen.quick)
    )
    if chosen.wide:
        models = models + wide()
    if chosen.only:
        models = [model for model in models if model.name in chosen.only]
    seconds = chosen.time_limit or (5.0 if chosen.quick else 120.0)
    meshes = chosen.meshes or (MESHES[:3] if chosen.quick else MESHES)
    if not chosen.json and not chosen.no_rows:
        print(
            f"{'model':22} {'mesh':8} {'rival':22} {'ours s':>9} {'rival s':>9} {'ratio':>7} "
            f"{'ours cost':>12} {'gap':>8} {'cost':>9}"
        )
    told: list[Row | LeftOut] = []
    races = rows(models, meshes, chosen.rivals, seconds, chosen.in_a_row)
    for row in () if chosen.no_rows else races:
        told.append(row)
        if not chosen.json:
            show_row(row)
    table = [row for row in told if isinstance(row, Row)]
    left_out = [asdict(row) for row in told if isinstance(row, LeftOut)]
    curves = [] if chosen.no_curves else list(points(quick=chosen.quick))
    if chosen.plots:
        chosen.plots.mkdir(parents=True, exist_ok=True)
        (chosen.plots / "search.svg").write_text(svg(panels(table, curves)), encoding="utf-8")
    if chosen.json:
        written = {
            "rows": [row.as_json() for row in table],
            "curves": [p.as_json() for p in curves],
            "left_out": left_out,
        }
        print(json.dumps(written))
    else:
        show_summary(table)
        show_points(curves)


if __name__ == "__main__":
    main()
