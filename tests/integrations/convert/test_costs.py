"""Losses of a written file are told with the bytes that they cost."""

from __future__ import annotations

import json
import math
from typing import Any

from report_models import planned

from autopar.integrations.convert import convert
from autopar.integrations.convert.costs import bytes_of, elements
from autopar.plan import Plan
from autopar.units import bytes_text


def narrowed(plan: Plan, **schedule: Any) -> Plan:
    """The plan with parameters of 16 bits."""
    data = json.loads(plan.to_json())
    for parameter in data["parameters"].values():
        parameter["dtype"] = "bfloat16"
    data["schedule"] |= schedule
    return Plan.model_validate(data)


def test_shards_are_counted_whole_or_split() -> None:
    given = {"mesh": (2, 2), "scheme": "gpu0:data,gpu1:zero3", "micro_batches": 2}
    plan = planned(stages=1, recompute="none", **given).plan
    whole = sum(math.prod(parameter.shape) for parameter in plan.parameters.values())
    split = sum(
        math.prod(parameter.shape) / (2 if "S" in parameter.storage else 1)
        for parameter in plan.parameters.values()
    )
    assert sum(elements(plan, whole=(0, 1)).values()) == whole
    assert sum(elements(plan).values()) == split < whole
    assert bytes_of(elements(plan)) == 4 * split
    assert bytes_of(elements(plan), "bfloat16") == 2 * split


def test_stages_are_counted_apart() -> None:
    given = {"layers": 4, "stages": 2, "micro_batches": 2, "schedule": "1f1b", "zero": 0}
    plan = planned(mesh=(2,), scheme="data", recompute="none", **given).plan
    whole = sum(math.prod(parameter.shape) for parameter in plan.parameters.values())
    assert whole / 2 <= sum(elements(plan).values()) < whole


def test_losses_have_their_bytes() -> None:
    given = {"layers": 4, "stages": 2, "micro_batches": 2, "schedule": "1f1b", "zero": 3}
    plan = planned(mesh=(2,), scheme="zero3", recompute="none", **given).plan
    more = bytes_text(bytes_of(elements(plan, whole=(0,))) - bytes_of(elements(plan)))
    lost = convert(plan, "torchtitan", "0.2").lost
    assert [line for line in lost if "ZeRO 1" in line] == [
        f"gradients are added up whole and reduced once a step (ZeRO 1): {more} more on a device"
    ]
    assert any(line.endswith(f"to the end of the step: {more} more on a device") for line in lost)


def test_parameters_of_16_bits_are_said_or_told() -> None:
    plan = planned(mesh=(4,), scheme="data", stages=1, recompute="none").plan
    narrow = narrowed(plan, master=None, reduce=None)
    more = bytes_text(4 * sum(math.prod(one.shape) for one in plan.parameters.values()))
    for target in ("megatron", "megatron-bridge", "deepspeed"):
        (line,) = [one for one in convert(narrow, target).lost if "float32" in one]
        assert line.endswith(f"{more} more on a device")
    assert 'dtype = "bfloat16"' in convert(narrow, "torchtitan", "0.2").text
    usual = narrowed(plan, master="float32", reduce="float32")
    assert not [one for one in convert(usual, "megatron").lost if "float32" in one]
    assert "\ndtype" not in convert(usual, "torchtitan", "0.2").text
