"""`autopar train`: train a model as a file says."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.shared_options import Parser


def add_options(parser: Parser) -> None:
    """Add the file, and what overrules it."""
    add = parser.add_argument
    add(
        "config",
        metavar="CONFIG",
        help="a .toml file with model, data, optimizer, schedule and training (docs/training.md)",
    )
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of this machine (default: that of CONFIG, else 1); under torchrun, its ranks",
    )
    add("--steps", type=int, metavar="N", help="train up to this step (default: that of CONFIG)")
    add(
        "--folder",
        metavar="FOLDER",
        help="where checkpoints, plans and metrics go (default: that of CONFIG)",
    )


def run(args: argparse.Namespace) -> None:
    """Train as the file says."""
    from autopar.training.command import train

    train(args)


COMMAND = Command(
    name="train",
    summary="train a model as a file says, resuming by itself",
    add_options=add_options,
    run=run,
)
