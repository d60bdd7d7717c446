"""Plans of small models within rising memories: none may be slower than one of less memory.

    benchmarks/memory_order.py [--first SEED] [--models N] [--devices N] [--jobs N]

A model of four layers, its widths and its kind drawn by chance, is planned without a limit, and
within five memories drawn from 45 to 110 % of what that plan takes. Each of these is a case, as is
the plan without a limit. It is in order where no plan of a smaller memory is faster by more than
1 %. Where a smaller memory has a plan, it has to have one, too.

A line tells of each case that breaks the order, the last one how many there were, and the CPU
seconds of a search. The exit code says whether any case broke it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.analysis.searches.side_by_side import side_by_side
from autopar.costmodel import load_cluster
from autopar.errors import NoPlanFits
from autopar.ir import Graph
from autopar.planning.model.request import WITHOUT_LIMIT, Request
from autopar.planning.planner import folded_of, search_plan
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SLOWER = 1e-2
"""The share by which a plan of more memory may be slower."""
SHARES = (0.45, 1.1)
"""The least and the most memory, as shares of what the plan without a limit takes."""
MEMORIES = 5
"""Memories of a model."""
LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The steps of a model by rising memory (infinite: no plan fits), and their CPU seconds.

    `shares`: of the memory that the last plan takes, which has no limit.
    """

    seed: int
    name: str
    shares: Sequence[float]
    steps: Sequence[float]
    seconds: float

    @property
    def broken(self) -> list[str]:
        """The memories whose plan is slower than one of less memory, each in a line."""
        fastest = itertools.accumulate(self.steps, min, initial=math.inf)
        told = []
        for share, step, less in zip(self.shares, self.steps, fastest, strict=False):
            if step > (1 + SLOWER) * less:
                where = list(self.steps).index(less)
                told.append(
                    f"seed {self.seed}, {self.name}: {step / less - 1:+.2%} at {share:.3f} beside "
                    f"{self.shares[where]:.3f}"
                )
        return told


def drawn(seed: int, devices: int) -> tuple[str, Graph, Request]:
    """A name, a model of four small layers, and its request without a limit that binds."""
    rng = random.Random(f"memory {seed}")
    heads = rng.choice([4, 8])
    hidden = rng.choice([128, 256, 512, 1024])
    experts = rng.choice([0, 0, 0, 4])
    shape = Shape(
        layers=LAYERS,
        hidden=hidden,
        heads=heads,
        kv_heads=rng.choice([heads, 4]),
        ffn=rng.choice([2, 4]) * hidden,
        vocab=rng.choice([1024, 8192, 32768]),
        sequence=rng.choice([64, 128, 256, 512]),
        experts=experts,
        dropout=False,
        gated=rng.random() < 0.3,
        tied=rng.random() < 0.5,
    )
    batch = rng.choice([8, 16, 32])
    cluster = load_cluster(rng.choice(["dgx-h100", "rtx4090", "l40s", "local-cpu"]))
    kind = f"{experts} experts" if experts else "dense"
    name = f"width {hidden}, {kind}, batch {batch} on {cluster.name}"
    request = Request(cluster=cluster.sized(devices), memory=WITHOUT_LIMIT)
    return name, transformer(shape, batch=batch).graph, request


def planned(seed: int, devices: int) -> Row:
    """The plans of a model within its memories, and without a limit."""
    begun = time.process_time()
    name, graph, free = drawn(seed, devices)
    folded = folded_of(graph, free)
    best = search_plan(graph, free, folded=folded).predicted
    rng = random.Random(f"shares {seed}")
    shares = sorted(rng.uniform(*SHARES) for _ in range(MEMORIES))
    steps = []
    for share in shares:
        request = replace(free, memory=share * best.memory)
        try:
            steps.append(search_plan(graph, request, folded=folded).predicted.step)
        except NoPlanFits:
            steps.append(math.inf)
    return Row(
        seed=seed,
        name=name,
        shares=(*shares, math.inf),
        steps=(*steps, best.step),
        seconds=time.process_time() - begun,
    )


def main(arguments: list[str] | None = None) -> int:
    """Plan the models of a range of seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", type=int, default=20, help="how many models")
    parser.add_argument("--devices", type=int, default=8, help="devices of each model")
    parser.add_argument("--jobs", type=int, default=1, help="models planned side by side")
    args = parser.parse_args(arguments)
    seeds = range(args.first, args.first + args.models)
    rows: list[Row] = []
    broken = 0
    for row in side_by_side(functools.partial(planned, devices=args.devices), seeds, args.jobs):
        rows.append(row)
        broken += len(row.broken)
        for line in row.broken:
            print(line, flush=True)
    cases = sum(len(row.steps) for row in rows)
    each = sum(row.seconds for row in rows) / max(cases, 1)
    print(f"{cases} cases of {len(rows)} models, {broken} out of order; {each:.2f} CPU s each")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
