"""The contents of the report: its sections, from a plan and, if given, its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.analysis.measurements.measured_steps import Measured
from autopar.analysis.program.account import account_of, has_account
from autopar.analysis.program.exchanges import issued_by
from autopar.analysis.program.throughput import Budget
from autopar.analysis.searches.rivals import Rival
from autopar.costmodel import Cluster
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.plan_checks import require_consistent
from autopar.report.certainty import step_around
from autopar.report.comparison import comparison_table
from autopar.report.explain.operators import storage_table
from autopar.report.frameworks import repriced, repriced_lines
from autopar.report.tables import Table
from autopar.schemes import Named, scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import seconds_text

from . import figures
from .beside import beside
from .difference import difference
from .drawing import Bar, bars
from .graph import graph as picture_of
from .modules import Tree, tree_of
from .section import Section, shortened
from .shapes import Picture
from .spans import timeline_of
from .traffic import communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The things that the report sets beside the plan.

    `other`: another plan. `rivals`: the known schemes with their costs. `measured`: a run of the
    plan. `budget`: a run that is asked about.
    """

    other: Plan | None = None
    rivals: Sequence[Rival] = ()
    measured: Measured | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The whole report: sections, and the operators as a picture and as a tree."""

    title: str
    sections: tuple[Section, ...]
    drawn: Picture
    tree: Tree
    parameters: Table

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        graph: Graph | None = None,
        cluster: Cluster | None = None,
        compared: Compared = Compared(),  # it is frozen, so that all calls can share it
        more: Callable[[Tree], Sequence[Section]] = lambda tree: (),
    ) -> Contents:
        """The report of `plan`; `more` makes further sections about rows of the tree."""
        require_consistent(plan)
        account = None
        named = None
        analysis = None
        if graph is not None and cluster is not None:
            analysis = analyse(graph, train=plan.model.mode == "train")
            named = scheme_of(plan, analysis)
            account = account_of(plan, analysis, cluster) if has_account(plan) else None
        drawn = timeline_of(plan, analysis, cluster)
        budget = compared.budget
        told = repriced_lines(plan, repriced(plan, analysis, cluster), cluster)
        sections = [
            figures.summary(
                plan, named, cluster, budget=budget, slowed=drawn.slowed, repriced=told
            ),
            figures.time(plan, drawn),
        ]
        sections += [figures.memory(plan, cluster), communication(plan, account, cluster)]
        if compared.rivals:
            sections.append(_schemes(plan, named, compared, cluster))
        if compared.measured is not None:
            sections.append(beside(plan, compared.measured, issued_by(plan, account), cluster))
        tree = tree_of(plan, account)
        sections += more(tree)
        if compared.other is not None:
            sections.append(difference(plan, compared.other))
        return cls(
            title=f"Plan of {plan.model.name} on {plan.devices} devices of {plan.cluster}",
            sections=tuple(sections),
            drawn=picture_of(plan, tree),
            tree=tree,
            parameters=shortened(storage_table(plan)),
        )


def _schemes(
    plan: Plan, named: Named | None, compared: Compared, cluster: Cluster | None
) -> Section:
    rivals = compared.rivals
    around = step_around(plan, cluster) if cluster else None
    rows = []
    for name, step in (
        ("plan found", plan.predicted.step),
        *((r.name, r.step) for r in rivals if r.step is not None),
    ):
        interval = (step * around.low, step * around.high) if around else None
        rows.append(
            Bar(
                name=name,
                parts=(("step", step, seconds_text(step)),),
                text=seconds_text(step),
                interval=interval,
            )
        )
    table = comparison_table(
        plan,
        named.called if named else "",
        [r for r in rivals if r.step is not None],
        cluster,
        compared.budget,
    )
    absent = [f"{r.name} ({r.why})" for r in rivals if r.step is None]
    told = [
        "Each is the best plan that the scheme allows on the same devices; whiskers hold nine runs "
        "in ten."
    ]
    if absent:
        told.append(f"Not possible here: {'; '.join(absent)}.")
    drawn = bars(
        rows, "Predicted step of the plan and of the known schemes, with intervals", alike=True
    )
    return Section(
        anchor="schemes",
        title="Beside known schemes",
        told=tuple(told),
        pictures=(drawn,),
        tables=(table,),
    )
