"""Prints what a run did, and where its seconds went if that was measured."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..printable import printable
from .commands import print_json
from .fields import report_json, report_lines
from .files import check_outputs
from .tables import Table, show
from .units import bytes_text, seconds_text


def require_profile(args: argparse.Namespace) -> None:
    """Refuse at once what cannot be profiled, or written."""
    check_outputs(args, args.profile)
    if args.profile and (args.check or args.steps < 2):
        raise UsageError("--profile measures the steps after the first: give --steps 2 or more, without --check")


def print_run(report: Any, *, as_json: bool) -> None:
    """A `RunReport`; the profile in tables of its own."""
    found = report_json(report)
    if as_json:
        print_json({name: value for name, value in found.items() if name != "profile" or value is not None})
        return
    lines = [line for line in report_lines(report) if not line.startswith("profile")]
    print(printable("\n".join(lines)))
    if report.profile is not None:
        show(profile_parts(report.profile))


def profile_parts(found: Mapping[str, Any]) -> list[str | Table]:
    """What `autopar.profile` measured, beside what was predicted."""
    rows = tuple(
        (part["part"], _text(part["measured"], part["unit"]), _text(part["predicted"], part["unit"])) for part in found["parts"]
    )  # fmt: skip
    kinds = tuple((kind, seconds_text(seconds)) for kind, seconds in found["kinds"].items())
    largest = sorted(found["actions"].items(), key=lambda action: -action[1])[:10]
    actions = tuple((name, seconds_text(seconds)) for name, seconds in largest)
    return [
        Table(title="A step of rank 0", columns=("part", ">measured", ">predicted"), rows=rows),
        Table(title="By kind of operator", columns=("operators", ">time"), rows=kinds),
        Table(title="The longest actions of the order", columns=("action", ">time"), rows=actions),
        "\n".join(found["deviations"]),
    ]


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return bytes_text(value) if unit == "B" else seconds_text(value)
