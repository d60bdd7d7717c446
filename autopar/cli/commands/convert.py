"""`autopar convert`: write a plan as the configuration of another project."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.files import check_outputs
from autopar.cli.output import print_notes
from autopar.cli.shared_options import Parser, plan_argument
from autopar.printable import printable


def add_options(parser: Parser) -> None:
    """Add the plan, the target and the output."""
    plan_argument(parser)
    parser.add_argument(
        "--to",
        metavar="TARGET[@VERSION]",
        help="dtensor, fsdp2 and pipelining: Python for PyTorch; transformers, torchtitan and "
        "megatron-bridge: Python of their configurations (torchtitan up to 0.2: TOML); deepspeed: "
        "JSON; accelerate: YAML; megatron: arguments (default: the target that the plan is for)",
    )
    parser.add_argument(
        "--version",
        metavar="0.2",
        help="of torchtitan: up to 0.2 it reads TOML, 0.3 counts in samples (default: the present "
        "source, in tokens)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write it to FILE (default: print it); what is left out is told on stderr",
    )


def run(args: argparse.Namespace) -> None:
    """Convert the plan, and tell what the other project cannot say."""
    from autopar.integrations.convert import convert
    from autopar.outputs import write_whole
    from autopar.plan import Plan

    check_outputs(args, args.output)
    plan = Plan.load(args.plan)
    to = args.to or plan.target
    converted = convert(plan, to, args.version)
    print_notes(to, converted.lost)
    if args.output:
        write_whole(Path(args.output), converted.text)
    else:
        print(printable(converted.text), end="")


COMMAND = Command(
    name="convert",
    summary="write a plan as the configuration of another project",
    add_options=add_options,
    run=run,
)
