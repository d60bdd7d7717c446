"""The output of a command: one JSON object, or sentences and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.printable import printable

if TYPE_CHECKING:
    from autopar.report.printing import Table


def print_json(answer: dict[str, Any]) -> None:
    """Print one object on stdout."""
    print(json.dumps(answer, indent=1))


def print_answer(
    args: argparse.Namespace,
    as_json: Callable[[], dict[str, Any]],
    as_parts: Callable[[], Iterable[str | Table]],
) -> None:
    """Print an answer as --json asks for it; only the form that is printed is made."""
    if args.json:
        print_json(as_json())
        return
    from autopar.report.printing import show

    show(as_parts())


def print_notes(source: str, notes: Sequence[str]) -> None:
    """Print what got lost on the way from or to another project, on stderr."""
    for note in notes:
        print(printable(f"autopar: {source}: {note}"), file=sys.stderr)


def stdout_to_stderr() -> contextlib.redirect_stdout[Any]:
    """Send to stderr what a user's module prints: stdout is for the answer alone."""
    return contextlib.redirect_stdout(sys.stderr)
