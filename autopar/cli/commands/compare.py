"""`autopar compare`: the known schemes beside the plan found, or how the model scales."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.loading import check_words, load_asked
from autopar.cli.output import print_answer, print_json, stdout_to_stderr
from autopar.cli.scaling_arguments import Scaling, counts_of, scaling_of
from autopar.cli.shared_options import (
    Parser,
    budget_of,
    json_option,
    model_argument,
    planning_option,
    planning_options,
    planning_values,
)
from autopar.options.table import COMPARED, MODEL, TABLE

ASKED = ("target", "mode", "master", "reduce", "optimizer", "memory", *COMPARED)
"""The options of planning that hold for every plan of a comparison."""


def add_options(parser: Parser) -> None:
    """Add the clusters and numbers of devices, the model, and what is compared."""
    add = parser.add_argument
    model_argument(parser)
    add(
        "--devices",
        metavar="N|1..64",
        help="number of devices, or several, as 8,16 or 1..64: how the model scales",
    )
    planning_option(
        parser,
        "cluster",
        action="append",
        default=[],
        help=f"{TABLE['cluster'].help}; several are set beside one another",
    )
    planning_option(parser, "target")
    planning_options(parser, MODEL)
    add(
        "--price",
        action="append",
        default=[],
        metavar="2.5|CLUSTER=2.5",
        help="price of a device and hour, or of those of a --cluster; repeatable",
    )
    add("--tokens", metavar="1T", help="tokens of a training run: adds device hours and price")
    add(
        "--target-step",
        metavar="500ms",
        help="name the cheapest cluster and number of devices within this time a step",
    )
    add(
        "--target-per-money",
        type=float,
        metavar="N",
        help="name the fastest with at least N samples for a unit of money",
    )
    add("--plot", metavar="FILE", help="write samples a second over devices to FILE (.svg)")
    planning_option(
        parser,
        "scheme",
        action="append",
        default=[],
        metavar="NAME",
        help="a scheme to price, as of `plan --scheme`; repeatable (default: all)",
    )
    for name in COMPARED:
        planning_option(parser, name)
    planning_option(parser, "rules")
    json_option(parser)


def run(args: argparse.Namespace) -> None:
    """Compare schemes on one cluster and number of devices, or scaling over several."""
    check_outputs(args, args.plot)
    counts = counts_of(args.devices) if args.devices is not None else ()
    scaling = scaling_of(args, counts)
    if scaling is None:
        args.price = args.price[0] if args.price else None
    # The model is read, and the words are checked, for the first of several.
    args.cluster = args.cluster[0] if args.cluster else None
    args.devices = counts[0] if counts else None
    check_words(args, args.scheme)
    if scaling is not None:
        _compare_scaling(args, scaling)
    else:
        _compare_schemes(args)


def _compare_schemes(args: argparse.Namespace) -> None:
    from autopar.analysis.searches.rivals import rivals
    from autopar.api import plan_loaded
    from autopar.cli.progress import ProgressBar
    from autopar.report.comparison import compared_json, compared_parts
    from autopar.report.plan_output import cluster_sentence
    from autopar.schemes import SCHEMES, usual_recipes

    budget = budget_of(args)
    asked = planning_values(args, ("devices", "cluster", *ASKED))
    with stdout_to_stderr(), ProgressBar() as bar:
        planned = plan_loaded(load_asked(args), progress=bar, **asked)
        schemes = args.scheme or [*SCHEMES, *usual_recipes(planned.cluster)]
        compared = rivals(planned, schemes, memory=asked["memory"], given=asked, progress=bar)
    sentence = cluster_sentence(planned)
    print_answer(
        args,
        lambda: compared_json(planned, compared, budget),
        lambda: compared_parts(planned, compared, sentence, named=bool(args.scheme), budget=budget),
    )


def _compare_scaling(args: argparse.Namespace, wanted: Scaling) -> None:
    from autopar.analysis.searches.scaling import scaling
    from autopar.cli.progress import ProgressBar
    from autopar.outputs import write_whole
    from autopar.report.printing import show
    from autopar.report.scaling import answers, scaling_json, scaling_plot, scaling_table

    asked: dict[str, Any] = planning_values(args, ASKED)
    with stdout_to_stderr(), ProgressBar() as bar:
        model = load_asked(args)
        rows = scaling(model, wanted.clusters, wanted.counts, wanted.prices, progress=bar, **asked)
    sentences = answers(rows, wanted.target_step, wanted.target_per_money)
    if args.plot:
        write_whole(Path(args.plot), scaling_plot(rows))
    if args.json:
        print_json(scaling_json(rows, sentences))
        return
    show([*sentences, scaling_table(rows)])
    if args.plot:
        show([f"\nplot saved to {args.plot}"])


COMMAND = Command(
    name="compare",
    summary="price the known schemes beside the plan found",
    add_options=add_options,
    run=run,
)
