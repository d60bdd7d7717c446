"""`autopar explain`: tell how the operators of a plan are sharded, and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    json_option,
    plan_argument,
    planning_option,
    planning_values,
    trace_option,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.cli.progress import ProgressBar
    from autopar.ir import Graph
    from autopar.plan import Plan
    from autopar.report.explain.explanation import Explained


def add_options(parser: Parser) -> None:
    """Add the plan, the operator, and the further questions."""
    add = parser.add_argument
    plan_argument(parser)
    add(
        "operator",
        metavar="OP",
        nargs="?",
        help="an operator, a module path or a pattern such as '*attn*' (default: all, folded)",
    )
    add(
        "--model",
        metavar="MODEL",
        help="the model of the plan: adds layouts, collectives, bytes and times "
        "to what the plan file holds",
    )
    planning_option(parser, "trust")
    planning_option(parser, "cluster", help="price on this cluster (default: the plan's)")
    planning_option(
        parser, "target", help="price as this project would run it (default: the plan's)"
    )
    add(
        "--alternatives",
        action="store_true",
        help="with --model: the best plans with OP split otherwise; without OP, with other stages, "
        "micro-batches, recompute, ZeRO, offload",
    )
    add(
        "--sensitivity",
        action="store_true",
        help="with --model: at which link speed, memory and batch the plan becomes another",
    )
    add(
        "--collectives",
        action="store_true",
        help="the collectives of a step by axis, phase and kind; with --model: by operator as well",
    )
    add(
        "--stalls",
        action="store_true",
        help="with --model: what makes a step longer than its computation: seconds by reason, and "
        "the largest waits",
    )
    add(
        "--gap",
        action="store_true",
        help="with --model: where the plan's gap is: what its bound leaves out, in seconds that "
        "add up to the gap",
    )
    add(
        "--diff",
        metavar="PLAN2",
        help="what differs in another plan file: figures, outer choices, strategies, storage",
    )
    planning_option(
        parser, "memory", help="memory limit per device for these (default: the cluster's)"
    )
    trace_option(parser, "with --model: ")
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Explain the plan, or an operator of it."""
    from autopar.cli.progress import ProgressBar
    from autopar.plan import Plan

    plan = Plan.load(args.plan)
    for option in ("alternatives", "sensitivity", "stalls", "gap", "trace"):
        if getattr(args, option) and args.model is None:
            raise UsageError(f"--{option} needs --model")
    check_outputs(args, args.trace)
    with stdout_to_stderr(), ProgressBar() as bar:
        explained = _explained(plan, args, bar)
        if args.stalls:
            explained = explained.with_stalls()
        if args.gap:
            explained = explained.with_gap(**planning_values(args, ["memory"]))
    if args.collectives:
        explained = explained.with_collectives()
    if args.diff:
        explained = explained.beside_plan(Plan.load(args.diff))
    print_answer(args, explained.json, explained.parts)


def _explained(plan: Plan, args: argparse.Namespace, bar: ProgressBar) -> Explained:
    from autopar.plan_origin import cluster_of_plan, known_cluster, model_of_plan
    from autopar.report.explain.explanation import Explained

    if args.model is None:
        explained = Explained.of_file(plan, args.operator)
        return replace(explained, cluster=known_cluster(plan, args.cluster, args.target))
    model = model_of_plan(args.model, plan, trust=args.trust)
    cluster = cluster_of_plan(plan, args.cluster, args.target)
    if args.trace:
        from autopar.report.traces import write_trace

        write_trace(args.trace, plan, model.graph, cluster)
    explained = Explained.of_model(plan, model.graph, cluster, args.operator)
    if not (args.alternatives or args.sensitivity):
        return explained
    from autopar.report.explain.further_answers import Further, answered

    further = Further(
        alternatives=args.alternatives,
        batches=rebatching(args, plan) if args.sensitivity else None,
        **planning_values(args, ["memory"]),
    )
    return answered(explained, cluster, further, bar)


def rebatching(args: argparse.Namespace, plan: Plan) -> Callable[[int], Graph]:
    """The function that reads the model again with another global batch."""
    from autopar.plan_origin import model_of_batch

    def rebatched(batch: int) -> Graph:
        return model_of_batch(args.model, plan, batch, trust=args.trust).graph

    return rebatched


COMMAND = Command(
    name="explain",
    summary="tell how the operators of a plan are sharded, and why",
    add_options=add_options,
    run=run,
)
