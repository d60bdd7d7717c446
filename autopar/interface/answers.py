"""Answers about plans in Python: `compare`, `explain` and `report`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autopar.analysis.program.throughput import Budget
from autopar.api import Planned, planned_with
from autopar.costmodel import Cluster
from autopar.errors import UsageError
from autopar.options.keywords import PlanKeywords
from autopar.options.python_words import python_words
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan, known_cluster, model_of_plan
from autopar.printable import printable

if TYPE_CHECKING:
    from autopar.report.printing import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer as the text of the command line, and as its `--json`: seconds and bytes.

    `plan`: the plan that it is about.
    """

    plan: Plan
    text: str
    values: Mapping[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@python_words
def compare(
    model: Any,
    example_inputs: Any = None,
    *,
    schemes: Sequence[str] | None = None,
    tokens: float | None = None,
    price: float | None = None,
    **options: Unpack[PlanKeywords],
) -> Answer:
    """The plan found beside the best plans of schemes known by name, the fastest first.

    `schemes`: names such as "FSDP" or "TP8 x DP8"; by default all, and the usual products. `tokens`
    of a training run and `price` of a device and hour: add device hours and costs. `options`: as of
    `plan`; micro-batches, recompute, the schedule and its chunks hold for the schemes, too.
    """
    from autopar.analysis.searches.rivals import rivals
    from autopar.report.comparison import compared_json, compared_parts
    from autopar.report.plan_output import cluster_sentence
    from autopar.schemes import SCHEMES, usual_recipes

    budget = Budget(tokens=tokens, price=price)
    planned = planned_with(model, example_inputs, options)
    wanted = [*SCHEMES, *usual_recipes(planned.cluster)] if schemes is None else list(schemes)
    priced = rivals(
        planned, wanted, memory=_bytes(options), given=options, progress=options.get("progress")
    )
    parts = compared_parts(
        planned, priced, cluster_sentence(planned), named=schemes is not None, budget=budget
    )
    return Answer(
        plan=planned.plan, text=_text(parts), values=compared_json(planned, priced, budget)
    )


@python_words
def explain(
    plan: Plan | str | Path,
    operator: str | None = None,
    *,
    model: Any = None,
    example_inputs: Any = None,
    cluster: str | Path | Cluster | None = None,
    target: str | None = None,
    collectives: bool = False,
    stalls: bool = False,
    beside: Plan | str | Path | None = None,
) -> Answer:
    """How the operators of a plan are sharded; with its `model`, what they communicate, and why.

    `operator`: a name or a pattern; by default all, equal layers folded. `collectives`: those of a
    step, by axis. `stalls`: what makes a step longer than its computation. `beside`: another plan
    to compare with. `cluster`: to price on, `target`: to price as it would run the plan; by
    default the plan's.
    """
    from autopar.report.explain.explanation import Explained

    of = Plan.of(plan)
    if model is None:
        if stalls:
            raise UsageError("stalls= needs model=")
        explained = replace(
            Explained.of_file(of, operator), cluster=known_cluster(of, _named(cluster), target)
        )
    else:
        loaded = model_of_plan(model, of, example_inputs)
        chosen = cluster_of_plan(of, cluster, target)
        explained = Explained.of_model(of, loaded.graph, chosen, operator)
    explained = explained.with_stalls() if stalls else explained
    explained = explained.with_collectives() if collectives else explained
    if beside is not None:
        explained = explained.beside_plan(Plan.of(beside))
    return Answer(plan=of, text=_text(explained.parts()), values=explained.json())


@python_words
def report(
    plan: Plan | str | Path,
    path: str | Path,
    *,
    model: Any = None,
    example_inputs: Any = None,
    cluster: str | Path | Cluster | None = None,
    target: str | None = None,
    beside: Plan | str | Path | None = None,
    schemes: Sequence[str] = (),
    tokens: float | None = None,
    price: float | None = None,
) -> Path:
    """Write a plan as a page for the browser to `path`, which is returned.

    `model`: adds what every operator communicates; with it, `schemes` to price beside the plan.
    `cluster`, `target`: as of `explain`. `beside`: another plan to compare with. `tokens`,
    `price`: as of `compare`.
    """
    from autopar.analysis.searches.rivals import rivals
    from autopar.outputs import write_whole
    from autopar.report.page import Compared, Contents, page

    of = Plan.of(plan)
    compared = Compared(
        other=None if beside is None else Plan.of(beside), budget=Budget(tokens=tokens, price=price)
    )
    if model is None:
        if schemes:
            raise UsageError("schemes= needs model=")
        contents = Contents.of(
            of, cluster=known_cluster(of, _named(cluster), target), compared=compared
        )
    else:
        loaded = model_of_plan(model, of, example_inputs)
        chosen = cluster_of_plan(of, cluster, target)
        planned = Planned(plan=of, model=loaded, cluster=chosen, notes=())
        compared = replace(compared, rivals=rivals(planned, list(schemes), memory=None))
        contents = Contents.of(of, graph=loaded.graph, cluster=chosen, compared=compared)
    write_whole(Path(path), page(contents))
    return Path(path)


def _named(cluster: str | Path | Cluster | None) -> Any:
    return str(cluster) if isinstance(cluster, Path) else cluster


def _bytes(options: PlanKeywords) -> float | None:
    from autopar.options.checking import checked

    memory: float | None = checked({"memory": options.get("memory")})["memory"]
    return memory


def _text(parts: Iterable[str | Table]) -> str:
    """Sentences and tables as one text."""
    from autopar.report.printing import show

    out = io.StringIO()
    show(parts, out)
    return printable(out.getvalue().rstrip("\n"))
