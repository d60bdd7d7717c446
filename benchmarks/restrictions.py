"""Plans under every subset of a few restrictions: one of more should not be faster.

    benchmarks/restrictions.py [--first SEED] [--rounds N] [--only CASE ...] [--jobs N]

In each round a case is given three restrictions drawn by chance, of micro-batches, ZeRO, recompute,
stages, mesh and schedule, and is planned under each of their eight subsets. A set that an earlier
round planned is not planned again. Any two plans of a case of which one's restrictions contain the
other's are a pair, whatever rounds they come from.

A line tells for each case how many plans and pairs there were, and the CPU seconds of a search; one
more each pair in which a plan of more restrictions is faster by more than 1 %, and the exit code
whether there is any. The cases are those of `benchmarks/restricted/cases.py`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.analysis.searches.side_by_side import side_by_side
from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.order.schedules import SCHEDULES
from autopar.planning.model.request import ZEROS, Request
from autopar.planning.planner import search_plan
from autopar.planning.space.candidates import divisors, meshes
from benchmarks.restricted.cases import CASES, CASES_BY_NAME, Case

DRAWN = 3
"""Restrictions of a round."""
ROUNDS = 8
"""Rounds of a case: with all cases some 1,000 plans under restrictions."""
FASTER = 1e-2
"""The share by which a plan of more restrictions may be faster."""

Restriction = Mapping[str, Any]
"""The fields of a request that a restriction fixes, with their values."""
Fixed = frozenset[tuple[str, Any]]
"""All fields that a set of restrictions fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A plan's step under the fields fixed in `fewer`, and under the larger set `more`."""

    fewer: Fixed
    more: Fixed
    step: float
    restricted: float

    @property
    def gained(self) -> float:
        """The share by which the plan of more restrictions is faster (negative: slower)."""
        return 1 - self.restricted / self.step

    def __str__(self) -> str:
        return f"{self.gained:+.3%} by [{told(self.more)}] beside [{told(self.fewer)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The steps of a case by what was fixed (infinite: there is no plan), and CPU seconds."""

    case: str
    steps: Mapping[Fixed, float]
    seconds: float

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of which one's restrictions contain the other's."""
        return pairs(self.steps)

    def __str__(self) -> str:
        planned = sum(step < math.inf for step in self.steps.values())
        each = self.seconds / max(len(self.steps), 1)
        return f"{self.case:20} {planned:3d} plans {len(self.pairs):4d} pairs, {each:.2f} s each"


def drawn(rng: random.Random, request: Request, batch: int) -> list[Restriction]:
    """Restrictions that can hold together."""
    cluster = request.cluster
    stages = rng.choice([count for count in (1, 2, 4, 8) if cluster.devices % count == 0])
    restrictions: dict[str, Restriction] = {
        "micro_batches": {"micro_batches": rng.choice(divisors(batch))},
        "zero": {"zero": rng.choice(ZEROS)},
        "recompute": {"recompute": rng.choice(("none", "selective", "full"))},
        "stages": {"stages": stages},
        "mesh": {"stages": stages, "mesh": rng.choice(meshes(cluster, stages))},
        "schedule": {"schedule": rng.choice(sorted(SCHEDULES))},
    }
    return [restrictions[name] for name in rng.sample(sorted(restrictions), DRAWN)]


def step_under(graph: Graph, request: Request, fixed: Fixed) -> float:
    """The step of the plan with some fields fixed; infinite where there is none."""
    try:
        return search_plan(graph, replace(request, **dict(fixed))).predicted.step
    except (NoPlanFits, UsageError):
        return math.inf


def subsets(restrictions: Iterable[Restriction]) -> Iterator[Fixed]:
    """The fields fixed by all subsets, the smaller ones first."""
    every = tuple(restrictions)
    for count in range(len(every) + 1):
        for some in itertools.combinations(every, count):
            yield frozenset(entry for one in some for entry in one.items())


def pairs(steps: Mapping[Fixed, float]) -> list[Pair]:
    """All pairs of plans of which one has all that is fixed in the other, and more."""
    planned = {fixed: step for fixed, step in steps.items() if step < math.inf}
    # Where more restrictions have a plan and fewer have none, that one is infinitely slower.
    return [
        Pair(fewer=fewer, more=more, step=steps[fewer], restricted=restricted)
        for more, restricted in planned.items()
        for fewer in steps
        if fewer < more
    ]


def looked_at(case: Case, seeds: Iterable[int]) -> Looked:
    """The steps of a case under all subsets of the restrictions of each seed."""
    begun = time.process_time()
    graph = case.graph
    request = case.request(graph)
    steps: dict[Fixed, float] = {}
    for seed in seeds:
        restrictions = drawn(random.Random(f"{case.name} {seed}"), request, case.batch)
        for fixed in subsets(restrictions):
            if fixed not in steps:
                steps[fixed] = step_under(graph, request, fixed)
    return Looked(case=case.name, steps=steps, seconds=time.process_time() - begun)


def told(fixed: Fixed) -> str:
    """The fixed fields, in a line."""
    return ", ".join(
        f"{name} {'x'.join(map(str, value.shape)) if name == 'mesh' else value}"
        for name, value in sorted(fixed, key=lambda entry: entry[0])
    )


def main(arguments: list[str] | None = None) -> int:
    """Look at a range of seeds of each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each case")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES_BY_NAME)
    parser.add_argument("--jobs", type=int, default=1, help="cases looked at side by side")
    args = parser.parse_args(arguments)
    cases = [CASES_BY_NAME[name] for name in args.only] if args.only else CASES
    work = functools.partial(looked_at, seeds=range(args.first, args.first + args.rounds))
    plans = 0
    compared = 0
    faster = 0
    for looked in side_by_side(work, cases, args.jobs):
        print(looked, flush=True)
        plans += len(looked.steps)
        compared += len(looked.pairs)
        for pair in sorted(looked.pairs, key=lambda one: -one.gained):
            if pair.gained > FASTER:
                faster += 1
                print(f"    {pair}", flush=True)
    print(
        f"{plans} searches, {compared} pairs, {faster} in which more restrictions are faster by "
        f"{FASTER:.1%}"
    )
    return int(faster > 0)


if __name__ == "__main__":
    raise SystemExit(main())
