"""Plans under every subset of a few restrictions: one of more should not be faster.

    benchmarks/restrictions.py [--first SEED] [--rounds N] [--only CASE ...]

The cases are those of the ablation. In each round a case is given three restrictions drawn by
chance, of micro-batches, ZeRO, recompute, stages, mesh and schedule, and is planned under each of
their eight subsets. Any two plans of which one's restrictions contain the other's are a pair: 19 of
them, if there is a plan under every subset.

A line tells for each round how many pairs there were, and the pair in which a plan of more
restrictions is the fastest beside that of fewer. The exit code says whether any is faster by more
than 0.1 %.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.order.schedules import SCHEDULES
from autopar.planning.model.request import ZEROS, Request
from autopar.planning.planner import search_plan
from autopar.planning.space.candidates import meshes
from benchmarks.ablated.cases import CASES, CASES_BY_NAME
from benchmarks.planned.cases import Case, graph_of, request_of

DRAWN = 3
"""Restrictions of a round."""
FASTER = 1e-3
"""The share by which a plan of more restrictions may be faster."""

Restriction = Mapping[str, Any]
"""The fields of a request that a restriction fixes, with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A plan's step under the restrictions named `fewer`, and under the larger set `more`."""

    fewer: tuple[str, ...]
    more: tuple[str, ...]
    step: float
    restricted: float

    @property
    def gained(self) -> float:
        """The share by which the plan of more restrictions is faster (negative: slower)."""
        return 1 - self.restricted / self.step


def drawn(rng: random.Random, request: Request, batch: int) -> dict[str, Restriction]:
    """Restrictions by their names, which can hold together."""
    cluster = request.cluster
    stages = rng.choice([count for count in (1, 2, 4, 8) if cluster.devices % count == 0])
    restrictions: dict[str, Restriction] = {
        "micro_batches": {"micro_batches": rng.choice(powers(min(batch, 64)))},
        "zero": {"zero": rng.choice(ZEROS)},
        "recompute": {"recompute": rng.choice(("none", "selective", "full"))},
        "stages": {"stages": stages},
        "mesh": {"stages": stages, "mesh": rng.choice(meshes(cluster, stages))},
        "schedule": {"schedule": rng.choice(sorted(SCHEDULES))},
    }
    return {name: restrictions[name] for name in rng.sample(sorted(restrictions), DRAWN)}


def powers(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def steps(
    graph: Graph, request: Request, restrictions: Mapping[str, Restriction]
) -> dict[tuple[str, ...], float]:
    """The step under every subset of the restrictions under which there is a plan."""
    step_under: dict[tuple[str, ...], float] = {}
    for names in subsets(tuple(restrictions)):
        fixed = together(restrictions[name] for name in names)
        try:
            step_under[names] = search_plan(graph, replace(request, **fixed)).predicted.step
        except (NoPlanFits, UsageError):
            continue
    return step_under


def together(restrictions: Iterable[Restriction]) -> dict[str, Any]:
    """The fields that several restrictions fix."""
    return {field: value for one in restrictions for field, value in one.items()}


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All subsets, the smaller first."""
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


def pairs(step_under: Mapping[tuple[str, ...], float]) -> list[Pair]:
    """All pairs of subsets of which one contains the other."""
    return [
        Pair(fewer=fewer, more=more, step=step_under[fewer], restricted=step_under[more])
        for fewer, more in itertools.permutations(step_under, 2)
        if set(fewer) < set(more)
    ]


def looked_at(case: Case, seeds: range) -> Iterator[tuple[int, dict[str, Restriction], list[Pair]]]:
    """The pairs of a case with the restrictions of each seed."""
    graph = graph_of(case, Path())
    request = request_of(case, graph)
    for seed in seeds:
        restrictions = drawn(random.Random(f"{case.name} {seed}"), request, case.batch)
        yield seed, restrictions, pairs(steps(graph, request, restrictions))


def told(restrictions: Mapping[str, Restriction]) -> str:
    """The restrictions in a line."""
    return ", ".join(
        f"{name} {'x'.join(map(str, value.shape)) if name == 'mesh' else value}"
        for name, value in together(restrictions.values()).items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Look at a range of seeds of each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each case")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES_BY_NAME)
    args = parser.parse_args(arguments)
    every: list[Pair] = []
    for name in args.only or [case.name for case in CASES]:
        for seed, restrictions, compared in looked_at(
            CASES_BY_NAME[name], range(args.first, args.first + args.rounds)
        ):
            every += compared
            line = f"{name:26} {seed:3d} {len(compared):2d} pairs"
            if compared:
                most = max(compared, key=lambda pair: pair.gained)
                line += f" {most.gained:+8.3%} by {most.more} beside {most.fewer}"
            print(f"{line}   [{told(restrictions)}]", flush=True)
    wrong = sum(pair.gained > FASTER for pair in every)
    print(f"{len(every)} pairs, {wrong} in which more restrictions are faster by {FASTER:.1%}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
