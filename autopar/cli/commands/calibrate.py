"""`autopar calibrate`: measure the ranks at hand and write a cluster file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import (
    Parser,
    check_measured_ranks,
    json_option,
    measured_kinds,
    measuring_options,
)
from autopar.errors import UsageError


def add_options(parser: Parser) -> None:
    """Add the file, the ranks, and what is measured."""
    add = parser.add_argument
    add(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="write the cluster to FILE (.json), for `autopar plan --cluster FILE`",
    )
    measuring_options(parser)
    add(
        "--inside",
        metavar="FILE",
        help="cluster file of one node: the ranks, one a node, stand for such nodes",
    )
    add("--name", help="name of the cluster (default: that of FILE)")
    add(
        "--collectives",
        default="",
        metavar="all_reduce,...",
        help="which collectives, beside send (default: all)",
    )
    add("--quick", action="store_true", help="sizes up to 4 MiB and fewer matrix products")
    add(
        "--tolerance",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="repeats that differ by more are refused (default: 0.1)",
    )
    json_option(parser)


def run(args: argparse.Namespace) -> int | None:
    """Measure, fit, write and show the cluster."""
    from autopar.analysis.measurements.calibration import Calibration, calibrate
    from autopar.costmodel import dump, load_cluster
    from autopar.outputs import write_whole
    from autopar.report.clusters import show_parts
    from autopar.report.measurements.calibration import calibrated_parts
    from autopar.runtime.launch.own_command import relaunched

    path = Path(args.output)
    check_outputs(args, args.output)
    if path.suffix.lower() != ".json":
        raise UsageError(f"{path}: a cluster file ends in .json")
    check_measured_ranks(args)
    if not args.tolerance > 0:
        raise UsageError(f"--tolerance is {args.tolerance}; it must be above 0")
    wanted = Calibration(
        name=args.name or path.stem,
        kinds=tuple(measured_kinds(args)),
        quick=args.quick,
        tolerance=args.tolerance,
        inside=load_cluster(args.inside) if args.inside else None,
    )
    if (ranks := relaunched(args.nproc, args.backend, least=2)) is not None:
        return ranks.code
    with stdout_to_stderr():
        cluster = calibrate(wanted, nproc=args.nproc, backend=args.backend)
    if cluster is None:  # another rank speaks
        return None
    text = dump(cluster)
    write_whole(path, text)
    print_answer(
        args, lambda: json.loads(text), lambda: [*show_parts(cluster), *calibrated_parts(cluster)]
    )
    return None


COMMAND = Command(
    name="calibrate",
    summary="measure the ranks at hand and write a cluster file",
    add_options=add_options,
    run=run,
)
