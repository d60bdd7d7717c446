"""`autopar cache`: what earlier commands have left on disk for later ones."""

from __future__ import annotations

import argparse
import dataclasses

from autopar.cli.command import Command
from autopar.cli.output import print_answer
from autopar.cli.shared_options import json_option
from autopar.remembered import Answers, answers, folder_of_answers, forget_all
from autopar.units import bytes_text


def show(args: argparse.Namespace) -> None:
    """Show the folder, and how many answers of which kinds it holds."""
    folder = folder_of_answers()
    held = answers()
    told = {"folder": None if folder is None else str(folder), **dataclasses.asdict(held)}
    print_answer(args, lambda: told, lambda: [_sentence(told["folder"], held)])


def clear(args: argparse.Namespace) -> None:
    """Remove all answers."""
    removed = forget_all()
    print_answer(args, lambda: {"removed": removed}, lambda: [f"answers removed: {removed}"])


def run(args: argparse.Namespace) -> None:
    """Show or remove what is remembered."""
    if args.cache_command == "show":
        show(args)
    else:
        clear(args)


def _sentence(folder: object, held: Answers) -> str:
    if folder is None:
        return "nothing is remembered: AUTOPAR_CACHE is empty"
    kinds = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in held.counts.items())
    return f"{folder}: {kinds or 'nothing'}, {bytes_text(held.bytes)}"


SHOW = Command(
    name="show",
    summary="show the folder of what is remembered, and how much that is",
    add_options=json_option,
    run=show,
)
CLEAR = Command(
    name="clear", summary="remove all that is remembered", add_options=json_option, run=clear
)
COMMAND = Command(
    name="cache",
    summary="what earlier commands have left on disk for later ones",
    run=run,
    children=(SHOW, CLEAR),
)
