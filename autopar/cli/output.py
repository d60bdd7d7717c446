"""The output of a command: one JSON object, or sentences and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.printable import printable

if TYPE_CHECKING:
    from autopar.report.printing import Table


@dataclass(slots=True)
class _Printed:
    """Whether the process has printed its object."""

    done: bool = False


_PRINTED = _Printed()


def print_json(answer: dict[str, Any]) -> None:
    """Print one object on stdout; JSON has no infinite numbers, which are null."""
    print(json.dumps(_finite(answer), indent=1, allow_nan=False))
    _PRINTED.done = True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def print_json_error(error: AutoparError) -> None:
    """Print an error as the object on stdout, unless the answer was printed before it."""
    if _PRINTED.done:
        return
    said: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, NoPlanFits):
        said |= {"minimum_memory": error.minimum, "memory_limit": error.memory_limit}
    print_json({"error": said | {"exit_code": error.exit_code}})


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
