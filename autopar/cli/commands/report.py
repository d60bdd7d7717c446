"""`autopar report`: write a plan, or two beside one another, as a page for the browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    budget_of,
    budget_options,
    plan_argument,
    planning_option,
    planning_values,
)
from autopar.errors import UsageError
from autopar.printable import printable

from .explain import rebatching

if TYPE_CHECKING:
    from autopar.api import Planned
    from autopar.cli.progress import ProgressBar
    from autopar.report.page import Contents
    from autopar.report.page.modules import Tree
    from autopar.report.page.section import Section


def add_options(parser: Parser) -> None:
    """Add the plans, the page, and the sections that need the model."""
    add = parser.add_argument
    plan_argument(parser)
    add("plan2", metavar="PLAN2", nargs="?", help="another plan file: adds what differs")
    add(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="write the page, one file that asks for no other, to FILE (.html)",
    )
    add(
        "--model",
        metavar="MODEL",
        help="the model of PLAN: adds the timeline of every operator, and what each communicates",
    )
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="with --model: price the known schemes beside the plan, each by a search of its own",
    )
    add(
        "--alternatives",
        action="store_true",
        help="with --model: why operators are split so: other strategies, forced and solved again",
    )
    add(
        "--sensitivity",
        action="store_true",
        help="with --model: plan anew with other devices, link speeds, batches and memory",
    )
    add(
        "--measured",
        metavar="FILE",
        help="a measured step to set beside the prediction: what run --json printed, "
        "or a Chrome trace of torch.profiler",
    )
    planning_option(
        parser,
        "memory",
        help="memory limit per device of the known schemes (default: the cluster's)",
    )
    planning_option(parser, "cluster", help="price on this cluster (default: the plan's)")
    planning_option(
        parser, "target", help="price as this project would run it (default: the plan's)"
    )
    budget_options(parser)
    planning_option(parser, "trust")
    planning_option(parser, "rules")


def run(args: argparse.Namespace) -> None:
    """Write the page of a plan."""
    from autopar.outputs import write_whole
    from autopar.report.page import page

    check_outputs(args, args.output)
    for option in ("compare", "alternatives", "sensitivity"):
        if getattr(args, option) and args.model is None:
            raise UsageError(f"--{option} needs --model")
    write_whole(Path(args.output), page(_contents(args)))
    print(printable(f"saved to {args.output}"), file=sys.stderr)


PARTS = 2
"""The parts of a page without further searches: the model read, the step played."""


def _contents(args: argparse.Namespace) -> Contents:
    """The contents of the page, from the plan file alone or with the model."""
    from autopar.analysis.measurements.measured_steps import read_measured
    from autopar.plan import Plan
    from autopar.plan_origin import known_cluster
    from autopar.report.page import Compared, Contents

    plan = Plan.load(args.plan)
    other = Plan.load(args.plan2) if args.plan2 else None
    measured = read_measured(args.measured) if args.measured else None
    beside = Compared(other=other, measured=measured, budget=budget_of(args))
    if args.model is None:
        cluster = known_cluster(plan, args.cluster, args.target)
        return Contents.of(plan, cluster=cluster, compared=beside)

    from autopar.analysis.searches.rivals import rivals
    from autopar.api import Planned
    from autopar.cli.progress import ProgressBar
    from autopar.plan_origin import cluster_of_plan, model_of_plan
    from autopar.schemes import SCHEMES

    (memory,) = planning_values(args, ["memory"]).values()
    cluster = cluster_of_plan(plan, args.cluster, args.target)
    with stdout_to_stderr(), ProgressBar(word="report:") as bar:
        bar(0, PARTS, "the model is read")
        model = model_of_plan(args.model, plan, trust=args.trust)
        bar(1, PARTS, "the step is played")
        planned = Planned(plan=plan, model=model, cluster=cluster, notes=())
        priced = []
        if args.compare:
            priced = rivals(planned, list(SCHEMES), memory=memory, progress=bar)
        return Contents.of(
            plan,
            graph=model.graph,
            cluster=cluster,
            compared=replace(beside, rivals=priced),
            more=lambda tree: _searched_sections(tree, planned, args, bar),
        )


def _searched_sections(
    tree: Tree, planned: Planned, args: argparse.Namespace, bar: ProgressBar
) -> Sequence[Section]:
    """The sections that need further searches."""
    from autopar.analysis.searches.alternatives import Why
    from autopar.analysis.searches.curves import curves
    from autopar.analysis.searches.sensitivity import sensitivity_of
    from autopar.report.page.curves import sensitivity
    from autopar.report.page.reasons import reasons, why_section
    from autopar.sharding.analysis import analyse

    plan = planned.plan
    cluster = planned.cluster
    (memory,) = planning_values(args, ["memory"]).values()
    analysis = analyse(planned.model.graph, train=plan.model.mode == "train")
    sections = []
    if args.alternatives:
        why = Why(plan, analysis, cluster, memory=memory, play=False)
        sections.append(why_section(plan, reasons(tree, why, bar)))
    if args.sensitivity:
        batches = rebatching(args, plan)
        quantities = sensitivity_of(plan, analysis, cluster, memory=memory, batches=batches)
        sections.append(sensitivity(curves(quantities, bar), plan.predicted.step))
    return sections


COMMAND = Command(
    name="report",
    summary="write a plan, or two beside one another, as a page for the browser",
    add_options=add_options,
    run=run,
)
