"""The published JSON Schema of the plan file is the one that the code checks by; `UPDATE_GOLDEN=1`
rewrites it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from autopar.plan import Plan, plan_schema
from autopar.plan_parts import SchedulePlan

PUBLISHED = Path(__file__).parents[3] / "docs" / "plan.schema.json"
VERSION_2 = Path(__file__).parents[1] / "plans" / "version_2.json"


def test_the_published_schema_is_current() -> None:
    text = json.dumps(plan_schema(), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        PUBLISHED.write_text(text, encoding="utf-8")
    assert PUBLISHED.read_text(encoding="utf-8") == text


def test_a_plan_of_version_2_is_read() -> None:
    """Its words for how often parameters are gathered become those of the present version."""
    old = json.loads(VERSION_2.read_text(encoding="utf-8"))
    assert old["version"] == 2 and old["schedule"]["gathered"] == "again"
    assert old.pop("mixtures") == []
    assert json.loads(Plan.load(VERSION_2).to_json()) == old | {
        "version": 3,
        "routing": None,
        "framework": "autopar",
        "model": old["model"]
        | {"flops": {}, "precision": None, "proof": "", "onnx": False, "values": {}, "outputs": []},
        "schedule": old["schedule"] | {"gathered": "per_pass", "overlap_experts": False},
        "provenance": old["provenance"]
        | {"bound_of": "", "asked_gap": None, "asked_seconds": None},
    }


def test_a_plan_of_version_1_is_read(tmp_path: Path) -> None:
    """It has one stage and no schedule, and three fields that say nothing."""
    old = json.loads(VERSION_2.read_text(encoding="utf-8"))
    del old["schedule"]
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(old | {"version": 1, "stages": 1, "micro_batches": 1, "recompute": False}),
        encoding="utf-8",
    )
    plan = Plan.load(path)
    assert plan.version == 3 and plan.schedule == SchedulePlan() and not plan.stages
