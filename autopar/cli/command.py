"""A command of the command line: its name, its summary, its options and its action."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from .shared_options import Parser

Action = Callable[[argparse.Namespace], int | None]
"""Runs a command; an exit code, or None for success."""


def _no_options(parser: Parser) -> None:
    """Add nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, with the commands below it if it has several.

    `summary`: what it does, without a capital and a full stop.
    """

    name: str
    summary: str
    run: Action
    add_options: Callable[[Parser], None] = _no_options
    children: tuple[Command, ...] = ()
