"""`autopar what-if`: plan again with other memory, links, devices or forced strategies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    json_option,
    plan_argument,
    planning_option,
    planning_options,
    planning_values,
)
from autopar.options.kinds import pair_of
from autopar.options.table import PINS

if TYPE_CHECKING:
    from autopar.report.what_if import WhatIf

LINK_FORM = "LEVEL=0.5x"


def add_options(parser: Parser) -> None:
    """Add the plan, the changed conditions, and the pins."""
    add = parser.add_argument
    plan_argument(parser)
    add("--model", required=True, metavar="MODEL", help="the model that it was made for")
    planning_option(parser, "trust")
    # The text is handed on as it is, because the answer repeats it.
    planning_option(parser, "memory", metavar="40GiB", help="with this memory per device")
    add(
        "--link",
        action="append",
        default=[],
        metavar=LINK_FORM,
        help="with another bandwidth of a level (a factor, or 100GB/s)",
    )
    planning_option(parser, "devices", help="on so many devices")
    planning_option(parser, "cluster", help="on another cluster")
    planning_option(parser, "target", help="as another project runs it")
    planning_option(parser, "batch", help="with another global batch")
    add(
        "--keep",
        action="store_true",
        help="keep the plan's mesh, stages, micro-batches and schedule where nothing else is said",
    )
    planning_options(parser, PINS)
    add("-o", "--output", metavar="FILE", help="write the plan found to FILE")
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Plan again under changed conditions."""
    from autopar.cli.progress import ProgressBar
    from autopar.plan import Plan
    from autopar.report.what_if import what_if

    check_outputs(args, args.output)
    links: dict[str, float | str] = dict(pair_of(text, "--link", LINK_FORM) for text in args.link)
    with stdout_to_stderr(), ProgressBar() as bar:
        answer = what_if(
            Plan.load(args.plan),
            args.model,
            memory=args.memory,
            links=links,
            devices=args.devices,
            cluster=args.cluster,
            target=args.target,
            batch=args.batch,
            keep=args.keep,
            trust=args.trust,
            progress=bar,
            **_pinned(args),
        )
    if args.output:
        answer.other.save(args.output)
    print_answer(args, lambda: _as_json(answer), lambda: [answer.summary(), *answer.tables()])


def _pinned(args: argparse.Namespace) -> dict[str, Any]:
    """The choices that the command line fixes."""
    values = planning_values(args, (option.name for option in PINS))
    return {name: value for name, value in values.items() if value is not None and value != []}


def _as_json(answer: WhatIf) -> dict[str, Any]:
    return {
        "asked": list(answer.asked),
        "summary": answer.summary(),
        "before": answer.plan.predicted.model_dump(mode="json"),
        "after": answer.other.predicted.model_dump(mode="json"),
        "plan": answer.other.model_dump(mode="json", by_alias=True),
    }


COMMAND = Command(
    name="what-if",
    summary="plan again with other memory, links, devices or forced strategies",
    add_options=add_options,
    run=run,
)
