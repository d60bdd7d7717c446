"""`autopar doctor`: check this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_answer, stdout_to_stderr
from autopar.cli.shared_options import Parser, json_option
from autopar.errors import AutoparError, RunError, UsageError
from autopar.outputs import write_whole

if TYPE_CHECKING:
    from autopar.analysis.measurements.doctor import Diagnosis


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
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write everything into one file, without names and secrets, to be sent to us",
    )
    json_option(parser)


def run(args: argparse.Namespace) -> int | None:
    """Check this machine, and fail if a plan does not compute as one device."""
    from autopar.analysis.measurements.doctor import doctor
    from autopar.report.measurements.doctor import diagnosis_json, diagnosis_parts
    from autopar.runtime.launch.own_command import relaunched

    check_outputs(args, args.report)
    if args.nproc is not None and args.nproc < 1:
        raise UsageError(f"--nproc is {args.nproc}; it must be at least 1")
    before = _stamp(args.report)
    try:
        ranks = relaunched(args.nproc)
        if ranks is not None:
            # Their first rank has written the report, unless it ended before.
            if _stamp(args.report) == before:
                _report(args.report, None, f"exit code {ranks.code}\n{ranks.tail}")
            return ranks.code
        with stdout_to_stderr():
            diagnosis = doctor(nproc=args.nproc, quick=args.quick)
    except (AutoparError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            _report(args.report, None, str(error))
        raise
    if diagnosis is None:  # another rank speaks
        return None
    _report(args.report, diagnosis)
    print_answer(args, lambda: diagnosis_json(diagnosis), lambda: diagnosis_parts(diagnosis))
    return 0 if diagnosis.ok else RunError.exit_code


def _stamp(path: str | None) -> int | None:
    """The time of a file's last change; None where there is no file."""
    return Path(path).stat().st_mtime_ns if path and Path(path).exists() else None


def _report(path: str | None, diagnosis: Diagnosis | None, failure: str = "") -> None:
    """Write the report, if one is wanted."""
    if path:
        from autopar.report.measurements.doctor import report_text

        write_whole(Path(path), report_text(diagnosis, failure))
        print(f"autopar: the report is in {path}", file=sys.stderr)


COMMAND = Command(
    name="doctor",
    summary="check this machine: versions, devices, links, plans beside one device, bandwidths",
    add_options=add_options,
    run=run,
)
