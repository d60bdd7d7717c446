"""`autopar completion`: print a script that completes words in a shell."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.completion import SHELLS, completion_script, shell_named
from autopar.cli.shared_options import Parser
from autopar.errors import UsageError


def add_options(parser: Parser) -> None:
    """Add the shell."""
    parser.add_argument(
        "shell",
        metavar="|".join(SHELLS),
        choices=tuple(SHELLS),
        type=_shell,
        help="the shell that the script is for",
    )


def _shell(name: str) -> str:
    """The name of a shell; argparse shows the message of an `ArgumentTypeError` alone."""
    try:
        return shell_named(name)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    print(completion_script(args.shell, args.whole_parser), end="")


COMMAND = Command(
    name="completion",
    summary="print a script that completes commands, options and files in a shell",
    add_options=add_options,
    run=run,
)
