"""Predicted and measured seconds of plans, and their order, on forked Gloo ranks.

    benchmarks/measured_order.py [--ranks 1 2 4 8] [--models tiny wide ...] [--quick] [--rounds N]
                                 [--repeats N] [--tolerance F] [--json]

For each number of ranks `autopar calibrate` measures this machine with as many ranks at work (two
for one rank, which keeps its half of the machine); then GPT-2 models from one that only the host
bounds to one that products bound are planned under five schemes (data parallel, ZeRO 3, tensor
parallel, stages, stages of data parallel), and all plans of a model are run in the same ranks, a
step of each in turn, so that what else the machine does meets all alike. Of several repeats each
begins with a calibration of its own. Reported: predicted and measured seconds (the median of the
rounds, and of the repeats), how many are within 15 %, the rank correlation of the two (Spearman),
and the pairs in the wrong order, those aside whose measured times are closer than 15 %. The load of
the machine is told with them: a calibration and steps under different loads are no fair test.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from autopar.analysis.measurements.calibration import Calibration, calibrate
from autopar.api import plan as planned
from autopar.costmodel import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from benchmarks.running.contenders import MICRO_BATCHES, ours
from benchmarks.running.gpt2 import Shape, batch
from benchmarks.running.models import model
from benchmarks.running.races import TIMEOUT, step_seconds
from benchmarks.validating.scores import spearman

SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(width=128, layers=2, batch=8, sequence=8, vocabulary=256),
    "small": Shape(width=128, layers=4, batch=16, sequence=64, vocabulary=512),
    "short": Shape(width=384, layers=8, batch=16, sequence=16, vocabulary=1024),
    "wide": Shape(width=512, layers=8, batch=8, sequence=16, vocabulary=1024),
    "long": Shape(width=384, layers=8, batch=8, sequence=128, vocabulary=1024),
}
"""Models of which five plans with their optimizer states fit into eight ranks of one machine."""
QUICK = ("tiny", "short")
ASKED: Mapping[str, dict[str, Any]] = {
    "data": {"scheme": "data"},
    "zero3": {"scheme": "zero3"},
    "tensor": {"scheme": "megatron"},
    "stages": {"stages": -1, "micro_batches": MICRO_BATCHES, "schedule": "1f1b"},
    "stages x data": {
        "stages": 2,
        "micro_batches": MICRO_BATCHES // 2,
        "schedule": "1f1b",
        "scheme": "data",
    },
}
"""Arguments of the plans; stages -1: one a rank."""
ALONE: Mapping[str, dict[str, Any]] = {"one rank": {}, "micro-batches": {"micro_batches": 4}}
"""Those of one rank."""
WARM = 2
TIE = 0.15
NEAR = 0.15
"""The error within which a prediction is meant to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan of a model; seconds."""

    ranks: int
    model: str
    plan: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A model's plans in order.

    Spearman's rank correlation, pairs of differing times, pairs ordered wrongly.
    """

    ranks: int
    model: str
    correlation: float | None
    pairs: int
    wrong: tuple[str, ...]


def plans_of(shape: Shape, ranks: int, cluster: Cluster) -> dict[str, Plan]:
    """The plans that there are."""
    plans = {}
    for name, asked in (ASKED if ranks > 1 else ALONE).items():
        wanted = {**asked, "stages": ranks} if asked.get("stages") == -1 else asked
        try:
            plans[name] = planned(
                model(shape), batch(shape), devices=ranks, cluster=cluster, **wanted
            )
        except AutoparError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return plans


def _timed(shape: Shape, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[float]]:
    """On a rank: seconds of the steps of every plan, in turn."""
    torch.set_num_threads(1)
    steps = {name: ours(shape, plan, on_shards=True) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(WARM + rounds):
        for name in list(plans)[:: 1 if number % 2 else -1]:
            taken, _ = step_seconds(steps[name], number)
            if number >= WARM:
                seconds[name].append(taken)
    return seconds


def rows(ranks: int, shapes: Mapping[str, Shape], cluster: Cluster, rounds: int) -> Iterator[Row]:
    """Every plan of every model, predicted and measured."""
    for name, shape in shapes.items():
        plans = plans_of(shape, ranks, cluster)
        timings = run_ranks(_timed, ranks, shape, plans, rounds, timeout=TIMEOUT)[0]
        for plan, seconds in timings.items():
            predicted = plans[plan].predicted.step
            measured = statistics.median(seconds)
            print(
                f"{ranks} ranks, {name}, {plan}: {predicted:.4f} s predicted, {measured:.4f} s "
                "measured",
                file=sys.stderr,
            )
            yield Row(
                ranks=ranks, model=name, plan=plan, predicted_s=predicted, measured_s=measured
            )


def middle(repeats: tuple[Row, ...]) -> Row:
    """The row of the repeat whose error is the middle one."""
    return sorted(repeats, key=lambda row: row.predicted_s / row.measured_s)[len(repeats) // 2]


def orders(table: list[Row]) -> Iterator[Order]:
    """The order of the plans of each model."""
    for ranks, name in dict.fromkeys((row.ranks, row.model) for row in table):
        mine = [row for row in table if (row.ranks, row.model) == (ranks, name)]
        pairs = [
            (a, b)
            for a, b in itertools.permutations(mine, 2)
            if a.measured_s * (1 + TIE) < b.measured_s
        ]
        wrong = tuple(f"{a.plan} < {b.plan}" for a, b in pairs if a.predicted_s >= b.predicted_s)
        correlation = spearman([row.predicted_s for row in mine], [row.measured_s for row in mine])
        yield Order(ranks=ranks, model=name, correlation=correlation, pairs=len(pairs), wrong=wrong)


def show(table: list[Row], ordered: list[Order], loads: Mapping[int, tuple[float, ...]]) -> None:
    """Print the tables."""
    print(f"{'ranks':>5} {'model':8} {'plan':14} {'predicted':>11} {'measured':>11} {'error':>8}")
    errors = [row.predicted_s / row.measured_s - 1 for row in table]
    for row, error in zip(table, errors, strict=True):
        print(
            f"{row.ranks:5} {row.model:8} {row.plan:14} {1e3 * row.predicted_s:9.1f}ms "
            f"{1e3 * row.measured_s:9.1f}ms {error:+8.0%}"
        )
    near = sum(abs(error) <= NEAR for error in errors)
    print(f"{near} of {len(errors)} within {NEAR:.0%}; median {statistics.median(errors):+.0%}")
    for order in ordered:
        said = "; ".join(order.wrong) or "all as predicted"
        correlation = "-" if order.correlation is None else f"{order.correlation:.2f}"
        print(
            f"{order.ranks:5} {order.model:8} rank correlation {correlation}, {order.pairs} pairs "
            f"apart, in the wrong order: {said}"
        )
    for ranks, load in loads.items():
        told = ", ".join(f"{one:.1f}" for one in load)
        print(f"{ranks:5} ranks on {os.cpu_count()} cores; load before and after: {told}")


def main() -> int:
    """Calibrate, plan, run and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--quick", action="store_true", help=f"two ranks, {' and '.join(QUICK)}")
    parser.add_argument(
        "--repeats", type=int, default=1, help="calibrations, each with its steps (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="steps of each plan (default: 9)")
    parser.add_argument(
        "--tolerance", type=float, default=1.0, help="of the calibration's repeats (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    table: list[Row] = []
    loads: dict[int, tuple[float, ...]] = {}
    shapes = {name: SHAPES[name] for name in (QUICK if args.quick else args.models)}
    wanted = Calibration(name="here", quick=args.quick, tolerance=args.tolerance)
    for ranks in [2] if args.quick else args.ranks:
        before = os.getloadavg()[0]
        repeated = []
        for _ in range(args.repeats):
            cluster = calibrate(wanted, nproc=max(ranks, 2), backend="gloo")
            assert cluster is not None, "this process speaks for its forked ranks"
            # One rank alone has the threads of one of two, and so its share of the machine.
            own = cluster if ranks > 1 else cluster.part(0, 1)
            repeated.append(list(rows(ranks, shapes, own, args.rounds)))
        table += map(middle, zip(*repeated, strict=True))
        loads[ranks] = before, os.getloadavg()[0]
    ordered = list(orders(table))
    if args.json:
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in table],
                    "orders": [asdict(order) for order in ordered],
                    "loads": loads,
                }
            )
        )
    else:
        show(table, ordered, loads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
