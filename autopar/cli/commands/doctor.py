"""`autopar doctor`: check this machine."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import Parser, json_option
from autopar.errors import RunError


def add_options(parser: Parser) -> None:
    """Add the ranks, and how much is tried."""
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks (default: one for each GPU, else 2 on the CPU); under torchrun, its ranks",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one step of each plan, and one collective"
    )
    json_option(parser)


def run(args: argparse.Namespace) -> int | None:
    """Check this machine, and fail if a plan does not compute as one device."""
    from autopar.analysis.measurements.doctor import doctor
    from autopar.report.measurements.doctor import diagnosis_json, diagnosis_parts

    with stdout_to_stderr():
        diagnosis = doctor(nproc=args.nproc, quick=args.quick)
    if diagnosis is None or isinstance(diagnosis, int):  # another rank speaks, or did the work
        return diagnosis
    print_answer(args, lambda: diagnosis_json(diagnosis), lambda: diagnosis_parts(diagnosis))
    return 0 if diagnosis.ok else RunError.exit_code


COMMAND = Command(
    name="doctor",
    summary="check this machine: versions, devices, links, plans beside one device, bandwidths",
    add_options=add_options,
    run=run,
)
