"""The parser of the command line, made from the commands."""

from __future__ import annotations

import argparse
from typing import Any

from autopar import __version__

from .commands import COMMANDS, Command
from .examples import examples
from .shared_options import Parser


def build_parser() -> Parser:
    """The parser with all commands and their options."""
    description = "Finds the cheapest way to split a neural network over many devices, and runs it."
    parser = Parser(prog="autopar", description=description, allow_abbrev=False)
    parser.add_argument(
        "--verbose", action="store_true", help="beside any command: show where an error was raised"
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="beside any command: recall nothing of earlier commands, and remember nothing",
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    children = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for command in COMMANDS:
        _add(children, command, command.name)
    parser.set_defaults(whole_parser=parser)
    return parser


def options_of(parser: Parser) -> dict[str, list[str]]:
    """The options of every one-word command, by its name."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: [option for option in spellings(command) if option.startswith("--")]
        for name, command in commands.choices.items()
    }


def spellings(parser: argparse.ArgumentParser) -> list[str]:
    """All spellings of a parser's own options."""
    return [spelled for action in parser._actions for spelled in action.option_strings]


def _add(children: Any, command: Command, path: str) -> None:
    """Add a command, and the commands below it; `path`: all its words."""
    parser: Parser = children.add_parser(
        command.name,
        help=command.summary,
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=examples(path),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    command.add_options(parser)
    if not command.children:
        return
    below = parser.add_subparsers(
        dest=f"{command.name}_command",
        metavar="|".join(child.name for child in command.children),
        required=True,
        parser_class=Parser,
    )
    for child in command.children:
        _add(below, child, f"{path} {child.name}")
