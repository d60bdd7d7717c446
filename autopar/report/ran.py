"""Prints the report of a run, and its profile if there is one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..printable import printable
from .commands import print_json
from .fields import report_json, report_lines
from .files import check_outputs
from .tables import Table, show
from .units import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopar.costmodel import Cluster

    from ..ir import Graph
    from ..plan import Plan
    from .recalibrated import Recalibrated


def require_profile(args: argparse.Namespace) -> None:
    """Refuse options of a profile that is impossible or cannot be written."""
    check_outputs(args, args.profile, args.recalibrate)
    if args.recalibrate and not args.profile:
        raise UsageError("--recalibrate scales a cluster to what --profile measures: give both")
    if args.recalibrate and Path(args.recalibrate).suffix.lower() != ".json":
        raise UsageError(f"{args.recalibrate}: a cluster file ends in .json")
    if args.cluster and not args.recalibrate:
        raise UsageError("--cluster says what to recalibrate: give --recalibrate FILE")
    if args.profile and (args.check or args.steps < 2):
        raise UsageError("--profile measures the steps after the first: give --steps 2 or more, without --check")


def cluster_to_scale(args: argparse.Namespace, plan: Plan) -> Cluster | None:
    """The cluster that `--recalibrate` scales, or None; refused before the run if a profile cannot scale it."""
    if not args.recalibrate:
        return None
    from ..plan_origin import cluster_of_plan
    from .recalibrated import require_alike

    found = cluster_of_plan(plan, args.cluster)
    require_alike(plan, found)
    return found


def scaling(
    args: argparse.Namespace, plan: Plan, graph: Graph, cluster: Cluster | None, profile: Mapping[str, Any] | None
) -> Callable[[], Recalibrated] | None:  # fmt: skip
    """The function that scales the cluster to a profile and, on rank 0, writes its file; None if not requested."""
    if cluster is None or profile is None:
        return None

    def made() -> Recalibrated:
        from .recalibrated import recalibrate

        found = recalibrate(profile, plan, graph, replace(cluster, name=Path(args.recalibrate).stem))
        if os.environ.get("RANK", "0") == "0":
            found.save(args.recalibrate)
        return found

    return made


def print_run(report: Any, *, as_json: bool, recalibrate: Callable[[], Recalibrated] | None = None) -> None:
    """Print a `RunReport`, the profile in tables, and the result of `recalibrate`."""
    found = report_json(report)
    if as_json:
        told = {name: value for name, value in found.items() if name != "profile" or value is not None}
        print_json(told | ({"recalibrated": recalibrate().json()} if recalibrate else {}))
        return
    lines = [line for line in report_lines(report) if not line.startswith("profile")]
    print(printable("\n".join(lines)))
    if report.profile is not None:
        show(profile_parts(report.profile))
    if recalibrate:
        show(recalibrate().parts())


def profile_parts(found: Mapping[str, Any]) -> list[str | Table]:
    """The measurements of `autopar.profile` next to the predictions."""
    rows = tuple(
        (part["part"], _text(part["measured"], part["unit"]), _text(part["predicted"], part["unit"])) for part in found["parts"]
    )  # fmt: skip
    kinds = tuple((kind, seconds_text(seconds)) for kind, seconds in found["kinds"].items())
    largest = sorted(found["actions"].items(), key=lambda action: -action[1])[:10]
    actions = tuple((name, seconds_text(seconds)) for name, seconds in largest)
    return [
        Table(title="A step of rank 0", columns=("part", ">measured", ">predicted"), rows=rows),
        *_of_stages(found.get("stages", ())),
        Table(title="By kind of operator", columns=("operators", ">time"), rows=kinds),
        Table(title="The longest actions of the order", columns=("action", ">time"), rows=actions),
        "\n".join(found["deviations"]),
    ]


STAGE_COLUMNS: Mapping[str, str] = {
    "forward": "forward", "backward": "backward", "between stages, waiting included": "bubble", "collectives": "collectives",
    "update": "update", "idle and others": "idle", "memory beside parameters and optimizer": "memory",
}  # fmt: skip
"""Parts of a profile, and their columns."""


def _of_stages(profiles: Sequence[Mapping[str, Any]]) -> list[str | Table]:
    """A table of the stages, each with measured and predicted seconds; nothing without stages."""
    rows = []
    for one in profiles:
        parts = {part["part"]: part for part in one["parts"]}
        for kind in ("measured", "predicted"):
            cells = (_text(parts[name][kind], parts[name]["unit"]) for name in STAGE_COLUMNS)
            rows.append((f"{one['stage']} {kind}", *cells))
    columns = ("stage", *(f">{name}" for name in STAGE_COLUMNS.values()))
    return [Table(title="The stages, of each its first rank", columns=columns, rows=tuple(rows))] if rows else []


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return bytes_text(value) if unit == "B" else seconds_text(value)
