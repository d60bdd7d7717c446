"""`autopar plan`: find the cheapest plan for a model on a cluster."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.loading import check_words, load_asked, warn_replicated
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    budget_of,
    budget_options,
    json_option,
    model_argument,
    planning_options,
    planning_values,
    trace_option,
)
from autopar.options.table import CLUSTER, EARLIER_PLANS, MODEL, PINS, PLANNED, RULES, SEARCH

if TYPE_CHECKING:
    from autopar.api import Planned
    from autopar.cli.progress import ProgressBar


def add_options(parser: Parser) -> None:
    """Add the options of planning, and what is written and printed."""
    model_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        "--strategy-save",
        metavar="FILE",
        help="write the plan (the strategy checkpoint) to FILE",
    )
    planning_options(parser, (*CLUSTER, *MODEL, *SEARCH, *PINS, *EARLIER_PLANS, *RULES))
    trace_option(parser)
    budget_options(parser)
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="price known schemes beside the plan, or do not "
        "(default: beside one that took long, within a share of its time)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, write and print; the exit code says whether an interrupt ended the search."""
    from autopar.cli.interrupts import INTERRUPTED, counted, say_interrupted
    from autopar.cli.progress import ProgressBar

    check_outputs(args, args.output, args.trace)
    budget_of(args)
    with counted() as interrupts:
        with stdout_to_stderr(), ProgressBar(wanted=not args.quiet) as bar:
            planned = _planned(args, bar)
            if not args.quiet:
                warn_replicated(planned.plan)
        if args.output:
            planned.plan.save(args.output)
        if args.json or not args.quiet:
            # After an interrupt nobody waits for the search of other schemes.
            _print(args, planned, compare=False if interrupts.count else args.compare)
        if args.trace:
            from autopar.report.traces import write_trace

            write_trace(args.trace, planned.plan, planned.model.graph, planned.cluster)
    if not interrupts.count:
        return 0
    say_interrupted(args.output)
    return INTERRUPTED


def _planned(args: argparse.Namespace, bar: ProgressBar) -> Planned:
    from autopar.api import plan_loaded

    check_words(args, [args.scheme] if args.scheme else [])
    model = load_asked(args)
    return plan_loaded(model, progress=bar, **planning_values(args, PLANNED))


def _print(args: argparse.Namespace, planned: Planned, *, compare: bool | None) -> None:
    from autopar.report.plan_output import planned_json, planned_parts

    (memory,) = planning_values(args, ["memory"]).values()
    asked: dict[str, Any] = {"compare": compare, "memory": memory, "saved": args.output}
    asked["budget"] = budget_of(args)
    print_answer(
        args, lambda: planned_json(planned, **asked), lambda: planned_parts(planned, **asked)
    )


COMMAND = Command(
    name="plan",
    summary="find the cheapest plan for a model on a cluster",
    add_options=add_options,
    run=run,
)
