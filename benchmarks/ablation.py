"""The numbers that limit the work of planning: what each costs, and what it earns.

    benchmarks/ablation.py [--quick] [--json] [--numbers NAME,...] [--only CASE ...]

Every case is planned with the numbers of `Effort`, and once more for each number with a weaker
setting of it (`benchmarks/ablated/weaker.py`), all else equal.

read      cases whose planning reads the number; the others are not planned again, as their plans
          cannot change
step      the change of the predicted step without the number: the largest, and the mean of all
          cases; where it is above 0, the weaker plan is slower
gap       the largest change of the gap, in points
CPU s     of planning all cases, with the number and without
earns     "earns" where the number changes a step by 0.1 % or a gap by 0.1 points, else "nothing"

A case for which no plan fits has no step and no gap; where that is so with or without a number
alone, its change is endless ("inf", null in JSON) and not in the mean. Every graph is planned once
before it is timed, for what is made once.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import NoPlanFits, unknown
from autopar.ir import Graph
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from benchmarks.ablated.cases import CASES, CASES_BY_NAME
from benchmarks.ablated.weaker import WEAKER, Watched, patched
from benchmarks.planned.cases import Case, graph_of, request_of

EARNED = 1e-3
"""The change of a step, as a share, or of a gap, from which a number earns something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The step and the gap of a plan (infinite where none fits), and what planning took."""

    step: float
    gap: float
    cpu_s: float

    def as_json(self) -> dict[str, float | None]:
        """The figures, with none for what is infinite."""
        return {"step_s": finite(self.step), "gap": finite(self.gap), "cpu_s": self.cpu_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A case planned with a number and without it; `read`: planning asks for the number at all."""

    case: str
    number: str
    full: Outcome
    weaker: Outcome
    read: bool

    @property
    def step_change(self) -> float:
        """How much longer the step is without the number, as a share."""
        if self.weaker.step == self.full.step:
            return 0.0
        return math.inf if math.isinf(self.full.step) else self.weaker.step / self.full.step - 1

    @property
    def gap_change(self) -> float:
        """How much wider the gap is without the number."""
        return 0.0 if self.weaker.gap == self.full.gap else self.weaker.gap - self.full.gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A number over all cases."""

    number: str
    ablations: tuple[Ablation, ...]

    @property
    def largest(self) -> Ablation:
        """The case whose step changes most."""
        return max(self.ablations, key=lambda one: abs(one.step_change))

    @property
    def mean_step(self) -> float:
        """The mean change of the step, of the cases that have a plan both times."""
        changes = [one.step_change for one in self.ablations if math.isfinite(one.step_change)]
        return math.fsum(changes) / len(changes) if changes else 0.0

    @property
    def largest_gap(self) -> float:
        """The largest change of the gap."""
        return max((one.gap_change for one in self.ablations), key=abs)

    @property
    def earns(self) -> bool:
        """Whether the number changes what is planned, or what is proven of it."""
        return max(abs(self.largest.step_change), abs(self.largest_gap)) >= EARNED

    @property
    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of all cases, with the number and without."""
        return (
            math.fsum(one.full.cpu_s for one in self.ablations),
            math.fsum(one.weaker.cpu_s for one in self.ablations),
        )

    def as_json(self) -> dict[str, Any]:
        """The row, with the cases that read the number."""
        full, weaker = self.cpu_s
        return {
            "number": self.number,
            "value": getattr(EFFORT, self.number),
            "weaker": WEAKER[self.number],
            "read": sum(one.read for one in self.ablations),
            "largest_step": finite(self.largest.step_change),
            "largest_step_of": self.largest.case,
            "mean_step": self.mean_step,
            "largest_gap": finite(self.largest_gap),
            "cpu_s": full,
            "cpu_s_without": weaker,
            "earns": self.earns,
            "cases": {one.case: one.weaker.as_json() for one in self.ablations if one.read},
        }


def finite(value: float) -> float | None:
    """The value, or none where it is infinite."""
    return value if math.isfinite(value) else None


def outcome(graph: Graph, request: Request) -> Outcome:
    """Plan once, with the numbers that are in force."""
    start = time.process_time()
    try:
        plan = search_plan(graph, request)
    except NoPlanFits:
        return Outcome(step=math.inf, gap=math.inf, cpu_s=time.process_time() - start)
    cpu_s = time.process_time() - start
    gap = math.inf if plan.provenance.gap is None else plan.provenance.gap
    return Outcome(step=plan.predicted.step, gap=gap, cpu_s=cpu_s)


def ablated(case: Case, numbers: Iterable[str]) -> tuple[Outcome, list[Ablation]]:
    """A case with all numbers as they are, and without each one of `numbers`."""
    graph = graph_of(case, Path())
    request = request_of(case, graph)
    watched = Watched(EFFORT)
    with patched(watched):
        outcome(graph, request)
    full = outcome(graph, request)
    ablations = []
    for number in numbers:
        weaker = full
        if number in watched.read:
            with patched(replace(EFFORT, **{number: WEAKER[number]})):
                weaker = outcome(graph, request)
        ablations.append(
            Ablation(
                case=case.name, number=number, full=full, weaker=weaker, read=number in watched.read
            )
        )
    return full, ablations


def rows(numbers: Sequence[str], ablations: Sequence[Ablation]) -> list[Row]:
    """The ablations by number."""
    return [
        Row(number=number, ablations=tuple(one for one in ablations if one.number == number))
        for number in numbers
    ]


def show_case(case: Case, full: Outcome) -> None:
    """Print a case with all numbers as they are."""
    print(
        f"{case.name:24} {case.devices:7d} {full.step:10.5f} {full.gap:8.2%} {full.cpu_s:8.2f}",
        flush=True,
    )


def show_rows(table: Sequence[Row]) -> None:
    """Print the table of numbers."""
    print(
        f"\n{'number':11} {'value':>10} {'weaker':>7} {'read':>4} {'step':>9} {'mean':>9} "
        f"{'gap':>8} {'CPU s':>8} {'without':>8} earns    largest step of"
    )
    for row in table:
        value = getattr(EFFORT, row.number)
        full, weaker = row.cpu_s
        read = sum(one.read for one in row.ablations)
        changes = f"{row.largest.step_change:+9.3%} {row.mean_step:+9.4%} {row.largest_gap:+8.2%}"
        told = f"{'earns' if row.earns else 'nothing':8}"
        where = row.largest.case if row.largest.step_change else "-"
        print(
            f"{row.number:11} {value!s:>10} {WEAKER[row.number]!s:>7} {read:4d} {changes} "
            f"{full:8.2f} {weaker:8.2f} {told} {where}"
        )


def numbers_of(text: str) -> list[str]:
    """The names of numbers in a list with commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in WEAKER:
            raise argparse.ArgumentTypeError(unknown("number", name, WEAKER))
    return names


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="four small cases: within a minute or so"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--numbers",
        type=numbers_of,
        default=list(WEAKER),
        metavar="NAME,...",
        help=f"of {', '.join(WEAKER)} (default: all)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CASE",
        choices=CASES_BY_NAME,
        help="only the cases of these names",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    chosen = parsed(arguments)
    wanted = chosen.only or [case.name for case in CASES if case.quick or not chosen.quick]
    if not chosen.json:
        print(f"{'case':24} {'devices':>7} {'step s':>10} {'gap':>8} {'CPU s':>8}")
    cases: list[dict[str, Any]] = []
    ablations: list[Ablation] = []
    for case in (CASES_BY_NAME[name] for name in wanted):
        full, of_case = ablated(case, chosen.numbers)
        ablations += of_case
        cases.append({"case": case.name, "devices": case.devices, **full.as_json()})
        if not chosen.json:
            show_case(case, full)
    table = rows(chosen.numbers, ablations)
    if chosen.json:
        print(json.dumps({"cases": cases, "numbers": [row.as_json() for row in table]}))
        return
    show_rows(table)


if __name__ == "__main__":
    main()
