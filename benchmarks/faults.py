"""Trainings that are killed, stopped, cut off and moved, and their losses.

    benchmarks/faults.py [--quick] [--json] [--parts faults moves saves cost long] [--seed N]
    [--steps N] [--kills N]

A small language model on forked ranks reads a text that comes with Python. Parts:

    faults   a rank killed, a rank stopped, the launcher killed, SIGTERM, two in a row, a full disk,
             a damaged file:
             each step's loss and samples equal an undisturbed run's bit for bit, and nothing is
             left behind
    moves    saved on 8 ranks, resumed on 6, 4, 2, 1 and 8, under two kinds of plan in turn: weights
             and state are
             bit-equal, losses within 1e-5
    saves    killed inside a save, again and again: the latest checkpoint is whole, and never an
             older one
    cost     the cost of a save for the steps during it: pairs of blocks with and without one, in
             turn
    long     the search's plan on 4 ranks with two kills, compared with one device

Ranks that are stopped are given up after 5 seconds here.
"""

from __future__ import annotations

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import unknown
from benchmarks.faulting.disturbing import FAULTS, Row, disturbed
from benchmarks.faulting.moving import CHAINS, SHORT, Long, Moved, long, moved
from benchmarks.faulting.saves import Cost, Kills, cost_of, killed_saves
from benchmarks.running.gpt2 import Shape

PARTS = ("faults", "moves", "saves", "cost", "long")
PLANS = (("data", 2), ("zero3", 2), ("megatron", 2), ("1f1b", 2), ("3d", 8))
TIMES = {
    "rank killed": 20,
    "rank stopped": 10,
    "launcher killed": 5,
    "SIGTERM": 5,
    "two in a row": 3,
    "disk full": 3,
    "file damaged": 5,
}
"""The number of each fault, over the plans in turn."""
QUICK = ("rank killed", "SIGTERM", "file damaged")


def faults(given: argparse.Namespace) -> list[Row]:
    """Every fault under the plans in turn."""
    rows = []
    for place, fault in enumerate(QUICK if given.quick else FAULTS):
        for number in range(1 if given.quick else TIMES[fault]):
            scheme, ranks = PLANS[(number + place) % (3 if given.quick else len(PLANS))]
            row = disturbed(fault, scheme, ranks, given.seed + number)
            told(given, f"{fault:16} {scheme:10} {ranks} ranks  {row.wrong or 'as undisturbed'}")
            rows.append(row)
    return rows


def moves(given: argparse.Namespace) -> list[Moved]:
    """Every chain of plans; a quick run has a short one."""
    rows = []
    for name, chain in {"short": SHORT}.items() if given.quick else CHAINS.items():
        row = moved(name, *chain)
        told(
            given,
            f"{name:18} "
            f"{row.wrong or f'bit-equal; losses within {row.difference:.1g} of one rank'}",
        )
        rows.append(row)
    return rows


def saves(given: argparse.Namespace) -> list[Kills]:
    """Kills at random moments."""
    row = killed_saves(given.kills or (3 if given.quick else 100), given.seed)
    told(
        given,
        f"{row.kills} kills, {row.inside} of them inside a save: "
        f"{row.wrong or 'the latest was always whole'}",
    )
    return [row]


def costs(given: argparse.Namespace) -> list[Cost]:
    """One rank of this machine, and two."""
    rows = []
    for ranks in (1,) if given.quick else (1, 2):
        shape = Shape(width=128, layers=2) if given.quick else Shape(width=512, layers=4, batch=32)
        row = cost_of(shape, ranks, 3 if given.quick else 15)
        text = (
            f"{row.megabytes:.0f} MB beside {row.steps} steps of {row.step_s:.2f} s; the copy "
            f"{row.copy_s:.3f} s"
        )
        cost = (
            f"{row.ratio - 1:+.1%} (half of the pairs within {row.spread:.1%}), computing "
            f"{row.computed - 1:+.1%}"
        )
        told(given, f"{row.ranks} ranks: {cost}; {text}")
        rows.append(row)
    return rows


def longs(given: argparse.Namespace) -> list[Long]:
    """Train long in float32, and in float64, where the order of additions matters much less."""
    rows = []
    for model in ("dense",) if given.quick else ("dense", "double"):
        row = long(
            model,
            given.steps or (60 if given.quick else 2000),
            2 if given.quick else 4,
            1 if given.quick else 2,
            given.seed,
        )
        differences = (
            f"losses differ by {row.largest:.1g} at most, means of 50 steps by {row.of_means:.1g}"
        )
        differences += "; bit-equal to the same ranks without kills" if row.equal else ""
        what = f"{row.model}: {row.steps} steps, {row.kills} kills, {row.plan}"
        told(given, f"{what}: {row.wrong or differences}; loss {row.first:.3f} to {row.last:.3f}")
        rows.append(row)
    return rows


RUNS: dict[str, Callable[[argparse.Namespace], Sequence[Any]]] = dict(
    zip(PARTS, (faults, moves, saves, costs, longs), strict=True)
)


def told(given: argparse.Namespace, text: str) -> None:
    """A line of the table."""
    print(text, file=sys.stderr if given.json else sys.stdout, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The table, or one JSON object on stdout; 1 where something went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    for name in ("seed", "steps", "kills"):
        parser.add_argument(f"--{name}", type=int, default=0)
    given = parser.parse_args(arguments)
    if strange := [part for part in given.parts if part not in PARTS]:
        parser.error(unknown("part", strange[0], PARTS))
    results = {}
    for part in given.parts:
        began = time.perf_counter()
        results[part] = [asdict(row) for row in RUNS[part](given)]
        told(given, f"-- {part}: {time.perf_counter() - began:.0f} s")
    if given.json:
        print(json.dumps(results))
    return int(any(row.get("wrong") for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
