"""The search against its rivals on the same tables, and its scaling.

    benchmarks/search.py [--models DIR] [--quick] [--json] [--plots DIR] [--time-limit S] [--rivals
    ...]
                         [--meshes 8 2x4 2x2x2x2 ...]

Rivals: `highs` (the integer program, by HiGHS), `exhaustive` where it can, and
`recursive_programming` for its gap. Every row is one run: ours from a cold start (no order of
elimination known), then the rival; CPU seconds of one thread, the garbage collector off. A rival
that ran out of time counts with the time it took. A model that cannot be read, and a mesh that
cannot be laid or searched, are named as left out.

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
from benchmarks.searching.models import Model, analysed, built_in, cost_graph, public
from benchmarks.searching.rivals import EQUAL, RIVALS, LeftOut, Row, race

MESHES = ("8", "2x4", "8x8", "2x2x2")
TARGET = 100.0
"""Ratio of HiGHS's time to ours."""


def rows(
    models: Sequence[Model], meshes: Sequence[str], rivals: Sequence[str], seconds: float
) -> Iterator[Row | LeftOut]:
    """Every race; HiGHS is loaded before the first one."""
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
                yield from race(model.name, mesh, graph, seconds=seconds, rivals=rivals)
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
    """Equal optima, ratios and how much dearer the rivals' solutions are, rival by rival."""
    for rival in dict.fromkeys(row.rival for row in table):
        mine = [row for row in table if row.rival == rival]
        done = [row for row in mine if row.rival_cost is not None and row.note != "out of time"]
        ratios = [row.ratio for row in mine if row.ratio is not None]
        equal = sum(row.verdict == "equal" for row in done)
        words = [f"{rival}: {len(done)} of {len(mine)} finished, {equal} of them equal"]
        if ratios:
            words.append(
                f"time ratio {min(ratios):.1f} to {max(ratios):.0f}, median "
                f"{statistics.median(ratios):.0f}"
            )
            words.append(
                f"{sum(ratio >= TARGET for ratio in ratios)} of {len(ratios)} at least {TARGET:.0f}"
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
    for row in () if chosen.no_rows else rows(models, meshes, chosen.rivals, seconds):
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
