"""Plans of Mist and Aceso become runs if their stages are alike but for their numbers of layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.validating.missing import Missing
from benchmarks.validating.mist import aceso, mist, stage_samples

PLAN = {
    "gpu": "L4-24GB",
    "system": "aceso",
    "model": "gpt",
    "run": "one",
    "layers": "4",
    "hidden": "1024",
    "heads": "16",
    "seq": "512",
    "gpus": "4",
    "micro_batch": "2",
    "global_batch": "16",
    "step_s": "1.5",
    "pred_step_s": "1.4",
    # The embedding and a layer; three layers and the head.
    "stages": (
        "gpus=2 ops=14 tp=1x14 dp=2x14 recompute=0x14 ; "
        "gpus=2 ops=41 tp=1x41 dp=2x41 recompute=0x41"
    ),
}
ALL = (
    "gpus=2 ops=14 tp=1x14 dp=2x14 recompute=0x1 1x13 ; "
    "gpus=2 ops=41 tp=1x41 dp=2x41 recompute=1x39 0x2"
)
SOME = (
    "gpus=2 ops=14 tp=1x14 dp=2x14 recompute=0x3 1x4 0x7 ; "
    "gpus=2 ops=41 tp=1x41 dp=2x41 recompute=0x41"
)
OTHER = (
    "gpus=2 ops=14 tp=1x14 dp=2x14 recompute=0x14 ; gpus=2 ops=41 tp=2x41 dp=1x41 recompute=0x41"
)
HALVES = "gpus=2 ops=5 tp=1x5 dp=2x5 recompute=0x5 ; gpus=2 ops=50 tp=1x50 dp=2x50 recompute=0x50"


def test_a_plan_of_aceso_deals_its_operators_out_by_layers() -> None:
    plan = aceso(PLAN)
    c = plan.configuration
    assert (plan.measured, plan.peer, plan.framework) == (1.5, 1.4, "megatron-2021")
    assert (c.dealt, c.tensor, c.data, c.micro_batch, c.devices) == ((1, 3), 1, 2, 1, 4)
    assert (c.recompute, aceso(PLAN | {"stages": ALL}).configuration.recompute) == ("none", "full")
    priced = plan.priced()
    assert priced.forward[1] > 2 * priced.forward[0]
    sample = plan.sample()
    assert sample.predicted == priced.step and sample.work


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"step_s": ""}, "no step time"),
        ({"stages": "gpus=1 ops=9 tp=1x4 2x5"}, "operators of one stage"),
        ({"stages": OTHER}, "stages on meshes, or with recompute, of their own"),
        ({"stages": SOME}, "stages on meshes, or with recompute, of their own"),
        ({"stages": HALVES}, "stages that share a layer"),
    ],
)
def test_plans_that_are_no_run_are_left_out(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        aceso(PLAN | changed)


def test_stages_are_scored_by_device() -> None:
    rank = {
        "gpu": "L4-24GB",
        "system": "aceso",
        "run": "one",
        "stage": "0",
        "fwd_ms": "80",
        "bwd_ms": "160",
        "max_allocated_MB": "1000",
    }
    rows = [
        rank,
        rank | {"stage": "1"},
        rank | {"stage": "1", "fwd_ms": "120"},
        rank | {"stage": ""},
        rank | {"run": "x"},
    ]
    actual, left_out = stage_samples(rows, [PLAN])
    # The mean of ranks, by micro-batch.
    assert [s.measured for s in actual["L4"]] == pytest.approx([0.03, 0.0325])
    assert all(s.memory == 1000 * 2**20 and s.told_memory for s in actual["L4"])
    first, second = (s.predicted or 0.0 for s in actual["L4"])
    assert second > 2 * first > 0
    assert left_out == {"its plan is in no table": 1, "its stage is not given": 1}


def row_of_mist(**given: Any) -> dict[str, str]:
    own = {
        "layer_partitions": [3, 1],
        "recomputed_layers_per_stage": [0, 0],
        "stage_peak_allocated_MB": [10, 20],
        "stage_strategies": [[2, 2, 1, 0, 0, 1, 0, 0, 0.5, 0]] * 2,
    }
    return {
        "family": "llama",
        "model": "1b",
        "gpu": "L4-24GB",
        "gpus": "4",
        "layers": "4",
        "hidden": "1024",
        "heads": "16",
        "kv_heads": "",
        "ffn": "2816",
        "gated": "1",
        "vocab": "4096",
        "seq": "512",
        "global_batch": "16",
        "flash_attn": "1",
        "step_s": "2",
    } | {name: json.dumps(value) for name, value in (own | given).items()}


def test_plans_of_mist_shard_states_and_keep_some_in_host_memory() -> None:
    half = mist(row_of_mist())
    whole = mist(row_of_mist(stage_strategies=[[2, 2, 1, 0, 0, 1, 0, 0, 0, 0]] * 2))
    c = half.configuration
    assert (c.zero, c.data, c.micro_batch, c.dealt, c.recompute) == (1, 2, 2, (3, 1), "none")
    assert half.memory == 20 * 2**20 and half.cluster.devices == 4
    assert c.habits.state_bytes == whole.configuration.habits.state_bytes / 2
    told, more = (plan.sample().told_memory or 0.0 for plan in (half, whole))
    assert 0 < told < more
    every = mist(row_of_mist(recomputed_layers_per_stage=[3, 1])).configuration
    assert every.recompute == "full"


@pytest.mark.parametrize(
    "changed",
    [
        {"recomputed_layers_per_stage": [2, 0]},
        {"stage_strategies": [[2, 2, 1, 0, 0, 1, 0, 0, s, 0] for s in (0.5, 0)]},
    ],
)
def test_plans_of_mist_whose_stages_differ_are_left_out(changed: dict[str, Any]) -> None:
    with pytest.raises(Missing, match="of their own"):
        mist(row_of_mist(**changed))
