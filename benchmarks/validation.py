"""Accuracy of the cost model.

Its predictions beside published measurements and a null model that knows only a rate.

Reads every CSV file of a folder that has the columns of a known kind
(`benchmarks/validating/rows.py`) and scores each group in it (formulas:
`benchmarks/validating/scores.py`). Rows that do not say fully what was run are left out, and
counted by reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError, UsageError, unknown
from benchmarks.validating.groups import all_groups
from benchmarks.validating.held_out import HeldOut, of_memory, of_steps
from benchmarks.validating.page import write_page
from benchmarks.validating.pairs import LARGE, Pair, pairs, within
from benchmarks.validating.plots import leaderboard, write_plots
from benchmarks.validating.record import RECORD, SAMPLED, read_record, write_record, write_sampled
from benchmarks.validating.rows import read_tables, thinned, training_rows
from benchmarks.validating.scores import Group, Score, score
from benchmarks.validating.seen import saw
from benchmarks.validating.tables import tables
from benchmarks.validating.variants import variants

ALL = 120
"""Rows of a group that are priced, evenly spaced."""
QUICK = 8
"""Rows of a group that --quick prices."""

TARGETS = {
    "simumax_b200": {"mean_error": 0.06, "max_error": 0.15, "memory_error": 0.03},
    "nemo_2407": {"mean_error": 0.10},
    "mlm_h100": {"mean_error": 0.10},
    "mpt": {"mean_error": 0.10},
    "torchtitan": {"mean_error": 0.10},
    "megatron_golden": {"mean_error": 0.12, "memory_error": 0.05},
    "korth_t5 dp 1": {"mean_error": 0.03, "max_error": 0.06},
    "sc21_t1": {"mean_error": 0.05},
    "vtrain_single": {"mean_error": 0.08},
    "bloom": {"mean_error": 0.08},
    "collectives from 1 MiB": {"mean_error": 0.15},
    "collectives below 1 MiB": {"mean_error": 0.25},
    "alephalpha 13B 2048": {
        "mean_error": 0.10,
        "worst_spearman": 0.9,
        "worst_regret": 0.05,
        "oom_accuracy": 0.95,
    },
    "alephalpha 13B 8192": {
        "mean_error": 0.10,
        "worst_spearman": 0.9,
        "worst_regret": 0.05,
        "oom_accuracy": 0.95,
    },
}
"""Targets of a group's figures.

Lower bounds of `worst_spearman` and `oom_accuracy`, upper bounds of the others.
"""
PEERS = {
    "vtrain_single": ("vTrain", 0.0837),
    "korth_t5 dp 1": ("Calculon", 0.0365),
    "sc21_t1": ("Calculon", 0.103),
    "bloom": ("Calculon", 0.31),
}
"""Mean errors that other authors state of their own models on a whole group.

vTrain: on all of its 1,440 runs on a node, of which these are every fourth
(VIA-Research/vTrain@f8dda847). Calculon: on the eight rows that it ships, and on rows that it does
not.
"""
AT_LEAST = ("worst_spearman", "oom_accuracy")
OF_NULL = 0.6
ENOUGH = 0.05
"""Every mean error should be at most OF_NULL times the null model's, or at most ENOUGH."""
HEADINGS = (
    "n",
    "mean",
    "max",
    "bias",
    "null mean",
    "peer",
    "fitted",
    "sweeps",
    "Spearman",
    "worst",
    "regret",
    "worst",
    "OOM right",
    "memory",
    "left out",
)


def named(groups: Sequence[Group], name: str) -> Group:
    """The group named `name`."""
    match = next((group for group in groups if group.name == name), None)
    if match is None:
        raise UsageError(unknown("group", name, [group.name for group in groups]))
    return match


def missed(name: str, score: Score) -> list[str]:
    """The targets that a group misses."""
    told = []
    for figure, limit in TARGETS.get(name, {}).items():
        value = getattr(score, figure)
        if value is None or (value < limit if figure in AT_LEAST else value > limit):
            shown = "none" if value is None else f"{value:.3f}"
            told.append(f"{figure} {shown}, target {limit}")
    if (
        score.null_error is not None
        and score.mean_error is not None
        and score.mean_error > max(OF_NULL * score.null_error, ENOUGH)
    ):
        told.append(
            f"mean_error {score.mean_error:.3f}, {OF_NULL} of the null model's is "
            f"{OF_NULL * score.null_error:.3f}"
        )
    return told


def percent(value: float | None, sign: str = "") -> str:
    """A fraction for the table."""
    return "-" if value is None else f"{value:{sign}.1%}"


def peer(name: str, score: Score) -> str:
    """The error of the source's own model on its rows, or the error that other authors state."""
    if score.peer_error is not None:
        return f"{'SimuMax' if name.startswith('simumax') else 'Aceso'} {score.peer_error:.1%}"
    who, error = PEERS.get(name, ("", None))
    return f"{who} {error:.1%}" if error is not None else "-"


def plain(value: float | None) -> str:
    """A correlation for the table."""
    return "-" if value is None else f"{value:.3f}"


def shown(groups: Sequence[Group], scores: Sequence[Score], others: Sequence[str]) -> None:
    """Print the table, the rows left out and the targets missed."""
    console = Console(width=max(Console().width, 170), highlight=False)
    table = Table(title="Predicted against measured")
    table.add_column("group", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for group, scored in zip(groups, scores, strict=True):
        table.add_row(
            escape(group.name),
            str(scored.n),
            percent(scored.mean_error),
            percent(scored.max_error),
            percent(scored.bias, "+"),
            percent(scored.null_error),
            peer(group.name, scored),
            saw(group.name),
            str(scored.sweeps or "-"),
            plain(scored.spearman),
            plain(scored.worst_spearman),
            percent(scored.regret),
            percent(scored.worst_regret),
            percent(scored.oom_accuracy),
            percent(scored.memory_error),
            str(sum(scored.left_out.values()) or "-"),
        )
    console.print(table)
    for group, scored in zip(groups, scores, strict=True):
        if scored.oom:
            both, told, was, neither = scored.oom
            text = f"told and found {both}, told only {told}, found only {was}, neither {neither}"
            console.print(
                f"{escape(group.name)}: out of memory: {text}; chosen in {scored.chosen_oom} of "
                f"{scored.sweeps} sweeps"
            )
        for reason, count in scored.left_out.items():
            console.print(f"{escape(group.name)}: {count} left out, {escape(reason)}")
        for text in missed(group.name, scored):
            console.print(f"{escape(group.name)}: missed: {escape(text)}")
    for what, held in intervals(groups).items():
        console.print(held_out_line(what, held))
    shown_pairs(console, pairs(groups))
    if others:
        console.print(f"not scored: {escape(', '.join(others))}")


def shown_pairs(console: Console, pairs: Sequence[Pair]) -> None:
    """Print the comparison of devices: one line for all pairs, then each pair of large models."""
    if not pairs:
        return
    table = Table(
        title=(
            f"Devices beside one another, models of {LARGE}: tokens a second and device, the "
            "second over the first"
        )
    )
    for heading in ("runs of", "devices", "runs", "measured", "predicted", "error"):
        table.add_column(heading, justify="left" if heading in ("runs of", "devices") else "right")
    for one in pairs:
        if LARGE in one.model.upper():
            names = f"{one.devices[1]} / {one.devices[0]}"
            table.add_row(
                escape(one.what),
                names,
                str(one.runs),
                f"{one.measured:.2f}",
                f"{one.predicted:.2f}",
                percent(one.error, "+"),
            )
    console.print(table)
    middle = sorted(abs(one.error) for one in pairs)[len(pairs) // 2]
    console.print(
        f"{len(pairs)} pairs of devices: median error of the ratio {middle:.1%}, "
        f"{within(pairs):.0%} within 15 %"
    )


def intervals(groups: Sequence[Group]) -> dict[str, HeldOut]:
    """Intervals of measured over predicted, for steps by kind of run, and for memory."""
    held = {f"step, {kind}": one for kind, one in of_steps(groups).items()}
    memory = of_memory(groups)
    return held if memory is None else {**held, "memory": memory}


def held_out_line(what: str, held: HeldOut) -> str:
    """A sentence for people."""
    low, middle, high = (
        math.exp(x) for x in (held.residual.low, held.residual.middle, held.residual.high)
    )
    worst = min(held.inside, key=held.inside.__getitem__)
    return (
        f"{what}: nine in ten of {held.residual.rows} rows lie between {low:.2f} and {high:.2f} "
        "times what is predicted, half below "
        f"{middle:.2f}; of a group left out {held.coverage:.0%} (least: {escape(worst)}, "
        f"{held.inside[worst]:.0%})"
    )


def shown_rows(group: Group) -> None:
    """Print every timed row of a group, the worst first."""
    console = Console(width=max(Console().width, 170), highlight=False)
    table = Table(title=f"Rows of {escape(group.name)}")
    for heading in ("row", f"measured ({group.unit})", f"predicted ({group.unit})", "error"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    errors = [
        (s.predicted / s.measured - 1, s)
        for s in group.samples
        if s.predicted is not None and s.measured is not None
    ]
    for error, s in sorted(errors, key=lambda pair: -abs(pair[0])):
        table.add_row(
            escape(s.label), f"{s.measured:.4g}", f"{s.predicted:.4g}", percent(error, "+")
        )
    console.print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="a folder of CSV files"
    )
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK} rows of each group")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write a plot of each group there"
    )
    parser.add_argument(
        "--leaderboard", type=Path, metavar="FILE", help="write a picture of all groups there"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page of all groups, and its figures"
    )
    parser.add_argument(
        "--rows", metavar="GROUP", help="print every row of a group instead, the worst first"
    )
    arguments = parser.parse_args()
    try:
        groups, others = all_groups(arguments.data, most=QUICK if arguments.quick else ALL)
        if arguments.rows:
            shown_rows(named(groups, arguments.rows))
            return
    except AutoparError as error:
        print(f"validation: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    scores = [score(group) for group in groups]
    if arguments.plots:
        for path in write_plots(arguments.plots, groups, scores):
            print(path, file=sys.stderr)
    if arguments.page:
        rows = [(g, s, peer(g.name, s)) for g, s in zip(groups, scores, strict=True)]
        runs = thinned(training_rows(read_tables(arguments.data)[0]), ALL)
        priced = variants(groups, runs)
        write_record(RECORD, priced)
        write_sampled(SAMPLED, runs, priced)
        write_page(arguments.page, rows, tables(read_record()))
    if arguments.leaderboard:
        arguments.leaderboard.write_text(leaderboard(groups, scores), encoding="utf-8")
    if arguments.json:
        results = {group.name: score.as_json() for group, score in zip(groups, scores, strict=True)}
        held = {
            what: {
                **dataclasses.asdict(one.residual),
                "coverage": one.coverage,
                "inside": dict(one.inside),
            }
            for what, one in intervals(groups).items()
        }
        results = {
            name: {**score, "fitted": saw(name), "stated": PEERS.get(name)}
            for name, score in results.items()
        }
        told = {
            "groups": results,
            "intervals": held,
            "pairs": [dataclasses.asdict(one) for one in pairs(groups)],
            "not_scored": others,
        }
        print(json.dumps({**told, "targets": TARGETS}, allow_nan=False))
    else:
        shown(groups, scores, others)


if __name__ == "__main__":
    main()
