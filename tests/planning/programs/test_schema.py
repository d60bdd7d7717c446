"""The published JSON Schema of the plan file is the one that the code checks by; `UPDATE_GOLDEN=1`
rewrites it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autopar.api import plan_loaded
from autopar.errors import PlanError
from autopar.plan import Plan, plan_schema
from autopar.plan_parts import SchedulePlan
from autopar.sharding.analysis import analyse
from tests.planning.architectures import llama
from tests.planning.tables.test_architectures import loaded

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
    apart = {
        name: {
            "lead": name,
            "strategy": operator["strategy"],
            "operators": {name: operator | {"place": place}},
        }
        for place, (name, operator) in enumerate(old["operators"].items())
    }
    assert json.loads(Plan.load(VERSION_2).to_json()) == old | {
        "version": 4,
        "operators": apart,
        "routing": None,
        "target": "autopar",
        "framework": "autopar",
        "habits": {},
        "model": old["model"]
        | {"flops": {}, "precision": None, "proof": "", "onnx": False, "values": {}, "outputs": []},
        "schedule": old["schedule"] | {"gathered": "per_pass", "overlap_experts": False},
        "provenance": old["provenance"]
        | {"bound_of": "", "asked_gap": None, "asked_seconds": None, "inside": 0.0},
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
    assert plan.version == 4 and plan.schedule == SchedulePlan() and not plan.stages


def test_a_file_has_operators_by_region_and_a_plan_has_them_in_the_order_of_the_model(
    tmp_path: Path,
) -> None:
    """A region is one entry of the file, under its lead's strategy."""
    model = loaded(llama())
    plan = plan_loaded(model, devices=4, cluster="dgx-h100").plan
    path = tmp_path / "plan.json"
    plan.save(path)
    regions = json.loads(path.read_text(encoding="utf-8"))["operators"]
    analysis = analyse(model.graph, train=True)
    assert list(regions) == [region.name for region in analysis.regions]
    assert len(regions) < 0.8 * len(analysis.warm)
    for region in analysis.regions:
        held = regions[region.name]
        assert set(held["operators"]) == set(region.members)
        assert held["strategy"] == held["operators"][held["lead"]]["strategy"]
    read = Plan.load(path)
    assert read == plan and list(read.operators) == [op.name for op in analysis.warm]
    assert read.to_json() == plan.to_json()


def test_a_plan_of_version_3_has_every_operator_by_itself(tmp_path: Path) -> None:
    plan = plan_loaded(loaded(llama()), devices=4, cluster="dgx-h100").plan
    data = json.loads(plan.to_json())
    flat = {
        name: {key: value for key, value in operator.items() if key != "place"}
        for name, operator in sorted(
            (pair for held in data["operators"].values() for pair in held["operators"].items()),
            key=lambda pair: pair[1]["place"],
        )
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data | {"version": 3, "operators": flat}), encoding="utf-8")
    read = Plan.load(path)
    assert list(read.operators) == list(plan.operators)
    assert [op.strategy for op in read.operators.values()] == [
        op.strategy for op in plan.operators.values()
    ]


def test_regions_that_contradict_their_operators_are_refused(tmp_path: Path) -> None:
    """An operator in two regions, a lead that is elsewhere, a strategy that is not the lead's."""
    plan = plan_loaded(loaded(llama()), devices=4, cluster="dgx-h100").plan
    path = tmp_path / "plan.json"
    for number in range(3):
        data = json.loads(plan.to_json())
        one, other = list(data["operators"].values())[:2]
        if number == 0:
            one["operators"] |= other["operators"]
        else:
            one |= {"lead": "elsewhere"} if number == 1 else {"strategy": ["B"]}
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(PlanError, match="in two regions" if number == 0 else "of its lead"):
            Plan.load(path)
