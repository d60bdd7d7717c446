"""The plan file: JSON of one schema, whose older versions are read as the present one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import PlanError
from .file_limits import PLAN_BYTES
from .reading import read_text

SCHEMA = "autopar-plan"
VERSION = 4
_GATHERED_IN_2 = {"kept": "per_step", "again": "per_pass"}
"""The words of version 2 for `SchedulePlan.gathered`."""


def read_plan_file(path: Path) -> dict[str, Any]:
    """The content of a plan file in the words of the present version.

    Raises `PlanError` with the fault for any other file. The parts of the plan are not checked yet.
    """
    text = read_text(path, PLAN_BYTES, what="strategy checkpoint", error=PlanError)
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a strategy checkpoint: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise PlanError(f"{path}: not a strategy checkpoint: it holds no 'schema': '{SCHEMA}'")
    data = _upgraded(data)
    if data.get("version") != VERSION:
        raise PlanError(
            f"{path}: version {data.get('version')!r} of the plan file; this autopar reads "
            f"version {VERSION}"
        )
    # Earlier plans said what equal layers with unequal strategies pay.
    data.pop("mixtures", None)
    return data


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The content of a plan file of an older version as one of the present version."""
    if data.get("version") == 1:
        # Version 1 knew one stage and no schedule, so these fields never said anything.
        fields = ("stages", "micro_batches", "recompute")
        data = {name: value for name, value in data.items() if name not in fields}
        return data | {"version": VERSION}
    if data.get("version") == 2:
        schedule = data.get("schedule")
        if isinstance(schedule, dict) and schedule.get("gathered") in _GATHERED_IN_2:
            schedule = schedule | {"gathered": _GATHERED_IN_2[schedule["gathered"]]}
            data = data | {"schedule": schedule}
        return data | {"version": VERSION}
    # Before version 4 each operator was by itself.
    return data | {"version": VERSION} if data.get("version") == 3 else data


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
