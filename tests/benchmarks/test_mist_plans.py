"""Plans of Mist and Aceso become pipelines whose stages have devices, layers and recompute of their
own.
"""

from __future__ import annotations

import pytest

from benchmarks.validating.missing import Missing
from benchmarks.validating.mist import OPERATORS, aceso, mist, stage_samples

PLAN = {
    "gpu": "L4-24GB",
    "system": "aceso",
    "model": "gpt",
    "run": "one",
    "layers": "4",
    "hidden": "1024",
    "heads": "16",
    "seq": "512",
    "gpus": "3",
    "micro_batch": "2",
    "global_batch": "16",
    "step_s": "1.5",
    "pred_step_s": "1.4",
    # The embedding, one layer and half of the second; the rest with the head. Of whole layers the
    # four operators around scores.
    "stages": (
        "gpus=1 ops=20 tp=1x20 dp=1x20 recompute=0x3 1x4 0x13 ; gpus=2 ops=35 tp=1x35 dp=2x35 "
        "recompute=0x7 1x26 0x2"
    ),
}


def test_stages_of_a_plan_have_their_own_meshes_and_recompute() -> None:
    plan = aceso(PLAN)
    first, second = plan.pipelines[0]
    assert (plan.measured, plan.peer, plan.cluster.devices) == (1.5, 1.4, 3)
    meshes = [
        (stage.start, stage.own.tensor, stage.own.data, stage.own.micro_batch)
        for stage in (first, second)
    ]
    assert meshes == [(0, 1, 1, 2), (1, 1, 2, 1)]
    assert [count for count, _ in first.layers] == [1, pytest.approx(6 / 13)]
    assert first.layers[0][1].habits.selective == OPERATORS[2:6]
    assert [c.recompute for _, c in first.layers] == ["selective", "none"]
    assert [(round(count, 3), c.recompute) for count, c in second.layers] == [
        (0.538, "none"),
        (2, "full"),
    ]
    sample = plan.sample()
    assert sample.predicted and sample.work


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"step_s": ""}, "no step time"), ({"stages": "gpus=1 ops=9 tp=1x4 2x5"}, "one stage")],
)
def test_plans_that_say_too_little_are_left_out(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        aceso(PLAN | changed)


def test_stages_are_scored_by_device() -> None:
    rank = {
        "gpu": "L4-24GB",
        "system": "aceso",
        "run": "one",
        "fwd_ms": "80",
        "bwd_ms": "160",
        "max_allocated_MB": "1000",
    }
    rows = [
        rank | {"stage": "0"},
        rank | {"stage": "1"},
        rank | {"stage": "1", "fwd_ms": "120"},
        rank | {"stage": ""},
        rank | {"run": "x"},
    ]
    actual, left_out = stage_samples(
        [row | {"stage": row.get("stage", "0")} for row in rows], [PLAN]
    )
    assert [sample.measured for sample in actual["L4"]] == [
        pytest.approx(0.03),
        pytest.approx(0.0325),
    ], "the mean of ranks, by micro-batch"
    assert all(sample.memory == 1000 * 2**20 and sample.told_memory for sample in actual["L4"])
    assert left_out == {"its plan is in no table": 1, "its stage is not given": 1}


def test_plans_of_mist_shard_states_and_keep_some_in_host_memory() -> None:
    row = {
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
        "layer_partitions": "[3, 1]",
        "recomputed_layers_per_stage": "[2, 0]",
        "stage_peak_allocated_MB": "[10, 20]",
        "stage_strategies": "[[2, 2, 1, 0, 0, 1, 0, 0, 0.5, 0], [2, 2, 1, 0, 0, 1, 0, 0, 0, 0]]",
    }
    plan = mist(row)
    first, second = plan.pipelines[0]
    assert [(count, c.recompute) for count, c in first.layers] == [(2, "full"), (1, "none")]
    assert first.own.habits.state_bytes == second.own.habits.state_bytes / 2
    assert (first.own.zero, first.own.data, second.start, plan.memory) == (1, 2, 2, 20 * 2**20)
    assert plan.sample().told_memory
