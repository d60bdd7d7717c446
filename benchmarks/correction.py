"""One price: the search's sum, the plan's program, and the same plan asked for in other ways.

    benchmarks/correction.py [--quick] [--on MESHES] [--json] [--models DIR]

    tables      the sum of the tables of the plan's choices, with the rule of hidden seconds
    step        the plan's, its program played to the last collective: tables + correction
    explain     the step of the plan's choices, read back from its file and priced anew
    pinned      the step of the plan found with all of the plan's strategies, storage, stages and
                micro-batches pinned
    known       the step of the plan found for its name alone: a scheme is stricter, as it stores
                all parameters alike
    gap         step / bound - 1

The correction (units of parameters, overlap) is the part that tables cannot add up; candidates near
the best are ranked with it. With stages the sum is that of equal ones, times the slowest's excess
over their mean at the best cuts by arithmetic, as the search expects it; stages on different meshes
have no tables in common. `--models` takes a folder with public models, as `benchmarks/search.py`
does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.analysis.program.account import has_account
from autopar.analysis.searches.plan_tables import tables_of_plan, work_of_plan
from autopar.costmodel import load_cluster
from autopar.errors import AutoparError, NoPlanFits
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.pins import hosted_by, reuse
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.programs.priced_program import evaluate
from autopar.planning.stages.whole_model import imbalance
from autopar.planning.tables.parameters.traffic import exposed_seconds
from autopar.planning.tables.tables import Tables
from autopar.schemes import scheme_named, scheme_of, stages_of
from autopar.schemes.naming import zero_of
from autopar.schemes.pinning import pinned, stage_mesh
from autopar.search import Solution, condition, solve
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import format_layout
from benchmarks.searching.models import Model, llama3_8b, public, quiet, shaped
from benchmarks.validating.known.shape import Shape

GPT2 = Shape(
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    sequence=1024,
    dropout=False,
)
SMALL = Shape(
    layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=8192, sequence=256, dropout=False
)
CASES = {
    "small": (SMALL, 16),
    "gpt2": (GPT2, 32),
    "llama3-8b/8 layers": (replace(llama3_8b(8), sequence=4096), 32),
}
MESHES: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("8", None),
    ("2x4", (2, 4)),
    ("7", None),
    ("4", None),
    ("8x8", (8, 8)),
    ("3", None),
    ("6", None),
)
SAME = 1e-4
"""Share of a step up to which two prices are the same."""
SHARES = (None, 1.1, 0.7, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan with its prices in seconds.

    `memory`: the limit as a share of the unlimited plan's memory.

    `pinned_s`, `known_s`: None if there is no such plan, or its name is no scheme.
    """

    model: str
    devices: str
    memory: float | None
    scheme: str
    tables_s: float
    step_s: float
    explain_s: float
    pinned_s: float | None
    known_s: float | None
    gap: float | None
    cpu_s: float
    fits: bool = True

    @property
    def holds(self) -> bool:
        """Whether plan, explain and pinned plan agree, within the memory, with a gap from 0 on."""
        same = (
            self.pinned_s is not None
            and max(abs(s / self.step_s - 1) for s in (self.explain_s, self.pinned_s)) <= SAME
        )
        return same and self.fits and self.gap is not None and self.gap >= 0

    @property
    def correction(self) -> float:
        """The program's excess over the tables' sum, as a share."""
        return self.step_s / self.tables_s - 1


def choices_of(tables: Tables, plan: Plan) -> dict[int, int]:
    """The plan's choice for each variable of its tables."""
    choices: dict[int, int] = {}
    for number, variable in enumerate(tables.variables):
        rows = [int(row) for row in variable.rows]
        if variable.what == "operator":
            names = [tables.strategies[variable.name].names(row) for row in rows]
            choices[number] = names.index(tuple(plan.operators[variable.name].strategy))
        elif variable.what == "parameter":
            state = plan.parameters[variable.name].state == "host"
            hosts = variable.host if variable.host is not None else [0.0] * len(rows)
            pairs = [
                (format_layout(tables.spaces[variable.name].layout(row)), held > 0)
                for row, held in zip(rows, hosts, strict=True)
            ]
            choices[number] = pairs.index((plan.parameters[variable.name].storage, state))
    return choices


def priced(plan: Plan, analysis: Analysis, request: Request) -> tuple[float, float]:
    """The tables' sum of a plan, and its step priced anew from its file.

    Stages on different meshes have no tables in common.
    """
    if not has_account(plan):
        return math.nan, plan.predicted.step
    tables = tables_of_plan(plan, analysis, request.cluster)
    stages = stages_of(plan)
    settled = choices_of(tables, plan)
    solution = solve(condition(tables.graph, settled))
    choices = tuple(settled.get(number, choice) for number, choice in enumerate(solution.choices))
    whole: Solution = replace(solution, choices=choices)
    cost = tables.graph.cost(choices)
    if stages > 1:
        uneven = imbalance(
            FoldedModel(analysis.graph, train=analysis.train, folded=False), tables, whole, stages
        )
        return uneven * cost / stages, plan.predicted.step
    work = work_of_plan(plan, analysis, request.cluster)
    cost += exposed_seconds(tables, whole, work) if analysis.train else 0.0
    return cost, evaluate(tables, whole, plan.schedule.in_stage).estimate.step


def asked_again(plan: Plan, analysis: Analysis, request: Request) -> Request:
    """A request on the plan's own mesh, with its stages and micro-batches."""
    stages = stages_of(plan)
    return replace(
        request,
        cluster=request.cluster.sized(plan.devices),
        mesh=plan.mesh_,
        stages=stages,
        micro_batches=plan.schedule.micro_batches,
        schedule=plan.schedule.pipeline if stages > 1 else None,
        interleave=plan.schedule.interleave if stages > 1 else None,
        recompute=None if plan.schedule.recompute else "none",
        fewer=False,
    )


def seconds_of(graph: Graph, request: Request | None) -> float | None:
    """The step of the plan found, if there is one."""
    try:
        return search_plan(graph, request).predicted.step if request is not None else None
    except AutoparError:
        return None


def pinned_seconds(plan: Plan, analysis: Analysis, request: Request) -> float | None:
    """The step of the plan found with every choice of this plan pinned."""
    pins, _ = reuse(plan, analysis)
    split = any("S" in parameter.storage for parameter in plan.parameters.values())
    zero = zero_of(plan, train=analysis.train) if split else None
    return seconds_of(
        analysis.graph,
        replace(
            asked_again(plan, analysis, request), limits=pins, zero=zero, hosted=hosted_by(plan)
        ),
    )


def known_seconds(
    plan: Plan, analysis: Analysis, request: Request, name: str | None
) -> float | None:
    """The step of the plan found for the name of this one."""
    if name is None:
        return None
    try:
        return seconds_of(
            analysis.graph,
            pinned(asked_again(plan, analysis, request), scheme_named(name), analysis),
        )
    except AutoparError:
        return None


def row(
    model: str, graph: Graph, devices: str, request: Request, share: float | None
) -> tuple[Row, Plan]:
    """Plan, and price the plan in every way."""
    start = time.process_time()
    plan = search_plan(graph, request)
    seconds = time.process_time() - start
    analysis = analyse(graph, train=True)
    named = scheme_of(plan, analysis)
    sums, explained = priced(plan, analysis, request)
    return Row(
        model=model,
        devices=devices,
        memory=share,
        scheme=named.name,
        tables_s=sums,
        step_s=plan.predicted.step,
        explain_s=explained,
        pinned_s=pinned_seconds(plan, analysis, request),
        known_s=known_seconds(plan, analysis, request, named.scheme),
        gap=plan.provenance.gap,
        cpu_s=seconds,
        fits=plan.predicted.memory <= request.memory_limit * (1 + 1e-9),
    ), plan


def rows(
    models: Sequence[Model],
    meshes: Sequence[tuple[str, tuple[int, ...] | None]],
    shares: Sequence[float | None],
) -> Iterator[Row]:
    """Every model on every mesh under every memory; plans that do not fit are left out."""
    for model in models:
        graph = model.load()
        for devices, sizes in meshes:
            cluster = load_cluster("dgx-h100").sized(math.prod(map(int, devices.split("x"))))
            free = Request(
                cluster=cluster, memory=1e15, mesh=stage_mesh(cluster, sizes) if sizes else None
            )
            needed = 0.0
            for share in shares:
                request = free if share is None else replace(free, memory=share * needed)
                try:
                    compared, plan = row(model.name, graph, devices, request, share)
                except NoPlanFits:
                    continue
                needed = needed or plan.predicted.memory
                yield compared


def show(compared: Row) -> None:
    """One line of the table."""
    others = (compared.explain_s, compared.pinned_s, compared.known_s)
    shares = [
        compared.correction,
        *(None if s is None else s / compared.step_s - 1 for s in others),
    ]
    told = [f"{1e3 * s:.3f}" for s in (compared.tables_s, compared.step_s)] + [
        "-" if share is None else f"{share:+.2%}" for share in shares
    ]
    told += ["-" if compared.gap is None else f"{compared.gap:.1%}", f"{compared.cpu_s:.1f}"]
    print(
        line(
            compared.model, compared.devices, f"{compared.memory or 'free'}", *told, compared.scheme
        ),
        flush=True,
    )


def line(model: str, devices: str, memory: str, *cells: str) -> str:
    """The cells of a line, the last one unpadded."""
    return (
        f"{model:20} {devices:5} {memory:>6} {' '.join(f'{cell:>10}' for cell in cells[:-1])}  "
        f"{cells[-1]}"
    )


def main() -> int:
    """Print the table, and the largest differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two models, one mesh, free and at 0.7 of the memory"
    )
    parser.add_argument("--on", help="devices or meshes, such as 8,2x4,7 (else all)")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--models", type=Path, help="a folder with public_models.py, whose small models come too"
    )
    args = parser.parse_args()
    models = [
        Model(name=name, load=lambda shape=shape, batch=batch: shaped(shape, batch))
        for name, (shape, batch) in CASES.items()
    ]  # type: ignore[misc]
    models = models[:2] if args.quick else models
    if args.models is not None:
        with quiet():
            models += public(args.models, full=False)
    table = []
    if not args.json:
        print(
            line(
                "model",
                "on",
                "memory",
                "tables ms",
                "step ms",
                "correction",
                "explain",
                "pinned",
                "known",
                "gap",
                "cpu s",
                "scheme",
            )
        )
    meshes = [mesh for mesh in MESHES if args.on is None or mesh[0] in args.on.split(",")]
    for one in rows(
        models, meshes[:2] if args.quick else meshes, (None, 0.7) if args.quick else SHARES
    ):
        table.append(one)
        if not args.json:
            show(one)
    largest = max(
        (abs(one.correction) for one in table if not math.isnan(one.correction)), default=0.0
    )
    explained = max((abs(one.explain_s / one.step_s - 1) for one in table), default=0.0)
    again = max(
        (abs(one.pinned_s / one.step_s - 1) for one in table if one.pinned_s is not None),
        default=0.0,
    )
    held = sum(one.holds for one in table)
    if args.json:
        told = [asdict(one) | {"correction": one.correction} for one in table]
        print(
            json.dumps(
                {
                    "rows": told,
                    "correction": largest,
                    "explain": explained,
                    "pinned": again,
                    "hold": held,
                }
            )
        )
    else:
        print(
            f"\nlargest correction {largest:.2%}, explain differs by {explained:.2%}, the pinned "
            f"plan by {again:.2%}"
        )
        print(
            f"{held} of {len(table)} rows hold: plan, explain and the pinned plan agree, memory is "
            "kept, gaps are not below 0"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
