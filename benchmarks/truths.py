"""Plans drawn by chance, each beside one that ought not to be faster.

Less memory, fewer devices, a pin more, a scheme, another method.

    benchmarks/truths.py [--first SEED] [--count N] [--kind monotone|tries|chains]

monotone    a plan, and one with less memory, fewer devices or one pin more: it is not faster by
            more than what a search leaves (1 %),
            limits are kept, gaps are there and not below 0
tries       a plan, and one that is asked for in other words: operators pinned by chance, a known
            scheme, another method of search, other
            outer choices; none is below the plan's bound, and so none beats the plan by more than
            its gap
chains      models from a step that only launches take to one of seconds, on devices of any kind,
            and up to three restrictions,
            one after the other (memory, devices, outer choices, operators, schemes): no plan is
            faster than one of fewer of them

A line for each case that is wrong, or whose second plan is a little faster, and how many were
looked at (up to Ctrl-C, too); the exit code says whether all held.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.costmodel import load_cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.pins import Pins, together
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import SCHEMES, scheme_named, stages_of
from autopar.schemes.pinning import pinned
from autopar.search import SEARCHES
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SLOWER = 1.01
"""By how much a plan may be slower that ought not to be.

What a search leaves as not worth its time.
"""
PINS: tuple[dict[str, Any], ...] = (
    {"stages": 1},
    {"stages": 2},
    {"micro_batches": 1},
    {"micro_batches": 2},
    {"zero": 0},
    {"zero": 3},
)
SHARES = (1.1, 0.9, 0.7, 0.5)
LESS = (1.02, 0.95, 0.9, 0.8, 0.75, 0.7, 0.6, 0.5)
METHODS = ("lagrangian", "recursive_programming")
LINKS = 3
"""Restrictions of a chain."""
MOST_PINNED = 3
"""Operators that are pinned at once, at most."""
TOLD = 1 - 1e-4
TOLD_OF = 200
"""A second plan that is faster by more than this is told of, though nothing is wrong about it.

And so many letters of a mistake.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One question asked beside a plan.

    `wrong` is empty where nothing is; `share` is the other step over the plan's (0: none).
    """

    asked: str
    wrong: str = ""
    share: float = 0.0


def drawn(seed: int) -> tuple[Graph, Request]:
    """A model, and the request for it without a limit that binds."""
    rng = random.Random(seed)
    heads = rng.choice([4, 8])
    width = rng.choice([256, 512, 1024])
    shape = Shape(
        layers=rng.choice([2, 4]),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocab=rng.choice([1024, 8192]),
        sequence=rng.choice([64, 256]),
        dropout=False,
    )
    cluster = load_cluster(rng.choice(["dgx-h100", "local-cpu"])).sized(rng.choice([2, 4]))
    return transformer(shape, batch=rng.choice([4, 8, 16])).graph, Request(
        cluster=cluster, memory=1e15
    )


def drawn_widely(seed: int) -> tuple[Graph, Request]:
    """A model of any width on devices of any kind, and a request without a limit that binds."""
    rng = random.Random(3000 + seed)
    heads = rng.choice([4, 8])
    width = rng.choice([128, 256, 512, 1024, 2048])
    shape = Shape(
        layers=rng.choice([1, 2, 3, 4, 6, 8]),
        hidden=width,
        heads=heads,
        kv_heads=rng.choice([heads, 4]),
        ffn=4 * width,
        vocab=rng.choice([1024, 8192, 32768]),
        sequence=rng.choice([64, 128, 256, 1024]),
        dropout=False,
        gated=rng.random() < 0.3,
        tied=rng.random() < 0.7,
    )
    cluster = load_cluster(rng.choice(["dgx-h100", "rtx4090", "local-cpu", "l40s"])).sized(
        rng.choice([2, 3, 4, 6, 8])
    )
    return transformer(shape, batch=rng.choice([4, 8, 12, 16, 32])).graph, Request(
        cluster=cluster, memory=1e15
    )


def monotone(seed: int) -> Outcome:
    """A plan, and one that has less memory, fewer devices or one pin more."""
    rng = random.Random(1000 + seed)
    graph, free = drawn(seed)
    best = search_plan(graph, free)
    kind = rng.choice(["memory", "devices", "pin"])
    if kind == "memory":
        less = replace(free, memory=rng.choice(SHARES) * best.predicted.memory)
    elif kind == "devices":
        less = replace(
            free,
            cluster=load_cluster(free.cluster.name).sized(rng.choice([1, 2, free.cluster.devices])),
        )
    else:
        less = replace(free, **rng.choice(PINS))
    asked = f"{kind} {less.memory} {less.cluster.devices}"
    try:
        other = search_plan(graph, less)
    except (
        NoPlanFits,
        UsageError,
    ):  # nothing fits so little, and so many stages or micro-batches there may not be
        return Outcome(asked=asked)
    objections = [*untrue(best, free), *untrue(other, less), *beaten(best, other)]
    if best.predicted.step > SLOWER * other.predicted.step:
        objections.append(
            f"{best.predicted.step / other.predicted.step - 1:.2%} slower than with less"
        )
    return Outcome(
        asked=asked, wrong="; ".join(objections), share=other.predicted.step / best.predicted.step
    )


def tried(seed: int) -> Outcome:
    """Plan in all memory or in less, and once more with the same limits in other words."""
    rng = random.Random(2000 + seed)
    graph, request = drawn(seed)
    if rng.random() < 0.5:
        request = replace(
            request, memory=rng.choice(SHARES) * search_plan(graph, request).predicted.memory
        )
    analysis = analyse(graph, train=True)
    try:
        best = search_plan(graph, request)
    except NoPlanFits:
        return Outcome(asked="nothing fits")
    asked, other = rng.choice((_pins, _scheme, _method, _outer))(rng, best, analysis, request)
    try:
        plan = search_plan(graph, other()) if other is not None else best
    except (NoPlanFits, UsageError):
        return Outcome(asked=asked)
    objections = [*untrue(best, request), *beaten(best, plan)]
    return Outcome(
        asked=asked, wrong="; ".join(objections), share=plan.predicted.step / best.predicted.step
    )


def chained(seed: int) -> Outcome:
    """Plans of one model, each with a restriction more than the one before."""
    rng = random.Random(4000 + seed)
    graph, request = drawn_widely(seed)
    analysis = analyse(graph, train=True)
    plans = [search_plan(graph, request)]
    asked = list[str]()
    wrong = list[str]()
    share = 0.0
    for restricting in rng.sample((_less_memory, _fewer_devices, _outer, _pins, _scheme), LINKS):
        said, other = restricting(rng, plans[-1], analysis, request)
        if other is None:
            continue
        try:
            less = other()
            plan = search_plan(graph, less)
        except (NoPlanFits, UsageError):
            continue
        request = less
        least = min(plan.predicted.step / before.predicted.step for before in plans)
        asked.append(said)
        wrong += [
            *untrue(plan, request),
            *(
                [f"{1 / least - 1:.2%} slower than with the last of these"]
                if least < 1 / SLOWER
                else []
            ),
        ]
        plans = [*plans, plan]
        share = min(share or least, least)
    return Outcome(asked="; ".join(asked), wrong="; ".join(wrong), share=share)


def untrue(plan: Plan, request: Request) -> list[str]:
    """Claims of a plan about itself that do not hold."""
    objections = []
    bound = plan.provenance.lower_bound
    limit = request.memory_limit
    needed = plan.predicted.memory
    objections += (
        [f"gap {plan.provenance.gap}"]
        if plan.provenance.gap is None or plan.provenance.gap < 0
        else []
    )
    objections += [f"memory {needed} of {limit}"] if needed > limit * (1 + 1e-9) else []
    return objections + (
        [f"step below bound {bound}"] if plan.predicted.step < bound * (1 - 1e-9) else []
    )


def beaten(plan: Plan, other: Plan) -> list[str]:
    """Whether a plan that is among those bounded is below the bound."""
    bound = plan.provenance.lower_bound
    step = other.predicted.step
    return [f"bound {bound} beaten by {step}"] if step < bound * (1 - 1e-9) else []


Asking = tuple[str, Callable[[], Request] | None]


def _pins(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """A few operators split by chance, on the plan's mesh."""
    wanted: dict[str, Mapping[str, str]] = {}
    for op in rng.sample(list(analysis.warm), rng.randint(1, MOST_PINNED)):
        names = [option.name for option in analysis.offers[op.name].options]
        wanted[op.name] = {axis.name: rng.choice(names) for axis in plan.mesh}
    cluster = request.cluster.sized(plan.devices)
    if request.limits:
        limits = together(request.limits, Pins(operators=wanted))
    else:
        limits = Pins(operators=wanted)
    held = replace(
        request,
        cluster=cluster,
        mesh=plan.mesh_,
        stages=stages_of(plan),
        limits=limits,
        fewer=False,
    )
    return f"pins {wanted}", lambda: held


def _scheme(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """A known scheme."""
    name = rng.choice(list(SCHEMES))
    return f"scheme {name}", lambda: pinned(request, scheme_named(name), analysis)


def _method(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """Another method of the inner search."""
    method = rng.choice([name for name in METHODS if name in SEARCHES])
    return f"method {method}", lambda: replace(request, search=method)


def _outer(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """Two outer choices at once, of those that are open."""
    pins = (
        rng.choice(PINS)
        | rng.choice(PINS)
        | {"recompute": rng.choice(["none", "selective", "full"])}
    )
    open_ = {name: value for name, value in pins.items() if getattr(request, name) is None}
    return f"outer {open_}", lambda: replace(request, **open_)


def _less_memory(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """Less than the plan needs."""
    share = rng.choice(LESS)
    return f"memory {share}", lambda: replace(request, memory=share * plan.predicted.memory)


def _fewer_devices(rng: random.Random, plan: Plan, analysis: Analysis, request: Request) -> Asking:
    """Fewer than there are, where some may stay idle."""
    devices = rng.randint(1, request.cluster.devices)
    idle = request.fewer and request.mesh is None
    return f"devices {devices}", (
        lambda: replace(request, cluster=request.cluster.sized(devices))
    ) if idle else None


KINDS: Mapping[str, Callable[[int], Outcome]] = {
    "monotone": monotone,
    "tries": tried,
    "chains": chained,
}


def looked_at(kind: str, seed: int) -> Outcome:
    """A case; where planning fails by a mistake of its own, that is what is wrong."""
    try:
        return KINDS[kind](seed)
    except Exception as error:  # any at all is to be told
        return Outcome(asked="?", wrong=f"{type(error).__name__}: {error}"[:TOLD_OF])


def main() -> int:
    """Look at a range of seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    parser.add_argument("--kind", choices=list(KINDS), default="monotone")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    with contextlib.suppress(KeyboardInterrupt):
        for seed in range(args.first, args.first + args.count):
            outcomes.append(looked_at(args.kind, seed))
            if outcomes[-1].wrong or 0 < outcomes[-1].share < TOLD:
                print(
                    f"{seed} {outcomes[-1].asked}: {outcomes[-1].share - 1:+.3%} "
                    f"{outcomes[-1].wrong}",
                    flush=True,
                )
    compared = sum(one.share > 0 for one in outcomes)
    wrong = sum(bool(one.wrong) for one in outcomes)
    print(
        f"{len(outcomes)} cases of {args.kind}, {compared} of them with a second plan, {wrong} "
        "wrong"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
