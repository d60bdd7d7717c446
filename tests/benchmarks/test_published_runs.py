"""Published runs in files of their own, recipes, and the interval that held-out sources give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autopar.costmodel.calibration.run_kinds import WIDE_TYPES
from benchmarks.validating.frameworks import framework_of, recipe_of
from benchmarks.validating.held_out import conformal, of_memory, of_steps
from benchmarks.validating.machines import cluster_of
from benchmarks.validating.megatron_files import experts_layer, golden, golden_group, simumax
from benchmarks.validating.missing import Missing
from benchmarks.validating.plots import leaderboard
from benchmarks.validating.scores import Group, Sample, score
from benchmarks.validating.sizes import forward_flops, public_models

GOLDEN = {
    "family": "gpt",
    "case": "c",
    "gpu": "H100",
    "gpus": "",
    "gpus_inferred": "16",
    "tp": "2",
    "pp": "2",
    "vp": "",
    "cp": "1",
    "ep": "1",
    "layers": "8",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "4",
    "head_dim": "",
    "ffn": "8192",
    "gated": "1",
    "vocab": "32000",
    "vocab_padded": "32000",
    "seq": "2048",
    "experts": "",
    "topk": "",
    "moe_ffn": "",
    "shared_expert_ffn": "",
    "moe_layer_freq": "",
    "moe_dispatcher": "",
    "micro_batch": "1",
    "global_batch": "32",
    "precision": "bf16",
    "seq_parallel": "1",
    "recompute": "",
    "dist_optimizer": "1",
    "overlap_grad_reduce": "1",
    "overlap_param_gather": "1",
    "tp_comm_overlap": "0",
    "untie": "1",
    "deterministic": "0",
    "iter_time_s": "1.5",
    "mem_max_allocated_bytes": "2e10",
    "trap": "",
    "attention": "",
    "pp_layout": "",
    "nccl_nvls": "0",
}
SIMUMAX = {
    "case": "s",
    "layers": "4",
    "hidden": "2048",
    "heads": "16",
    "kv_heads": "4",
    "ffn": "8192",
    "vocab": "32000",
    "experts": "",
    "topk": "",
    "moe_ffn": "",
    "shared_ffn": "",
    "dense_layers": "",
    "attention": "gqa",
    "gated": "1",
    "seq": "4096",
    "tp": "2",
    "pp": "1",
    "cp": "1",
    "cp_comm": "",
    "ep": "1",
    "dp": "4",
    "vp": "1",
    "micro_batch": "1",
    "global_batch": "16",
    "dist_optimizer": "1",
    "ce_fusion": "1",
    "real_step_s": "0.4",
    "real_alloc_gib_max_rank": "20",
    "pred_step_s": "0.38",
}


def test_a_golden_value_is_of_the_last_stage() -> None:
    actual = golden(GOLDEN)
    assert (
        actual.configuration.data,
        actual.configuration.zero,
        actual.stage,
        actual.measured,
    ) == (4, 1, -1, 1.5)
    assert (
        actual.configuration.habits.overlap_gradients
        and not actual.configuration.habits.pipelined_tensor
    )
    sample = actual.sample()
    priced = actual.priced()
    assert (sample.memory, sample.predicted) == (2e10, priced.step)
    assert sample.told_memory == priced.allocated[-1] != priced.allocated[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trap": "tiny model: launch-bound"}, "a tiny model"),
        ({"trap": "one of the two is mislabelled"}, "a trap"),
        ({"gpus_inferred": ""}, "not given"),
    ],
)
def test_golden_values_that_say_nothing_are_left_out(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        golden(GOLDEN | change)


def test_golden_values_are_grouped_by_what_they_leave_open() -> None:
    changes: list[dict[str, str]] = [
        {},
        {"deterministic": "1"},
        {"trap": "inferred GPU count is ambiguous"},
    ]
    assert [golden_group(GOLDEN | c) for c in changes] == [
        "megatron_golden",
        "megatron_golden deterministic",
        "megatron_golden ambiguous",
    ]
    one_order = golden(GOLDEN | {"deterministic": "1"}).configuration.habits
    assert not one_order.fused_accumulation, "sums of gradients are passes of their own"
    assert one_order.update_traffic > golden(GOLDEN).configuration.habits.update_traffic


def test_a_golden_value_names_its_attention_and_whether_switches_add_up() -> None:
    kernels = {
        word: golden(GOLDEN | {"attention": word}).configuration.kernels.attention
        for word in ("unfused", "flash", "fused", "")
    }
    assert kernels == {"unfused": "fused", "flash": "flash2", "fused": "cudnn", "": "cudnn"}
    features = [golden(GOLDEN | {"nccl_nvls": word}).cluster.levels[0].features for word in "01"]
    assert not features[0] and features[1]
    with pytest.raises(Missing, match="attention not described"):
        golden(GOLDEN | {"attention": "sparse"})
    laid_out = golden(GOLDEN | {"pp_layout": "Et*2|t*2|t*2|t*2L"}).configuration
    assert (laid_out.interleave, laid_out.layout[0]) == (2, "Ett")


def test_an_encoder_and_its_decoder_are_read() -> None:
    shape = golden(GOLDEN | {"family": "t5", "seq": "512", "gated": "0"}).shape
    assert (shape.encoder_layers, shape.encoder_sequence, shape.sequence) == (8, 512, 128)


def test_a_run_of_simumax_is_on_its_own_machine() -> None:
    actual = simumax(SIMUMAX)
    assert actual.cluster.device.clock < 1 and cluster_of("B200").device.clock == 1
    assert (
        actual.peer,
        actual.configuration.sequence_parallel,
        actual.configuration.habits.loss,
    ) == (0.38, True, "megatron-fused")
    latent = simumax(SIMUMAX | {"attention": "mla q1536", "cp": "2", "cp_comm": "a2a"})
    assert latent.shape.latent is not None and latent.configuration.context_by == "heads"


def test_a_layer_of_experts_has_no_attention() -> None:
    row = {
        "case": "e",
        "gpu": "H100",
        "tp": "1",
        "ep": "8",
        "seq": "4096",
        "micro_batch": "1",
        "hidden": "4096",
        "moe_ffn": "14336",
        "experts": "8",
        "topk": "2",
        "shared_expert_ffn": "",
        "router": "softmax",
        "dispatcher": "alltoall",
        "precision": "bf16",
        "forward_s": "0.0043",
        "backward_s": "0.0077",
    }
    forward, backward = (sample for _, sample in experts_layer(row))
    assert (
        forward.predicted and backward.predicted and 0.7 * 0.0043 < forward.predicted < 1.3 * 0.0043
    )
    assert 1.5 < backward.predicted / forward.predicted < 2.5


def test_recipes_are_of_the_nearest_container() -> None:
    asked = ("DeepSeekV3 (w/ MTP)", "H100-SXM5-80GB", "FP8")
    assert recipe_of("Megatron-Bridge 25.09 NeMo Container", *asked)["recompute"] == [
        "mla_up_proj",
        "mlp",
    ]
    assert recipe_of("Megatron-Bridge 26.04 NeMo Container", "Nobody's", "H100", "FP8") == {}
    assert framework_of("Megatron-Bridge 26.08 NeMo Container").habits.loss == "in-place"


def test_public_models_have_the_parameters_that_their_names_say() -> None:
    """Twice the parameters that a token meets, and attention, are its FLOPs: Qwen3 30B has 3 B
    active, DeepSeek-V3 37 B.
    """
    for name, active in (
        ("Llama3-70B", 70e9),
        ("Qwen3-30B-A3B", 3e9),
        ("DeepSeekV3", 37e9),
        ("GPT-OSS-120B", 5.1e9),
    ):
        assert forward_flops(public_models()[name]) / 2 == pytest.approx(active, rel=0.2), name


# --- how sure predictions are ---


def group(name: str, errors: list[float]) -> Group:
    samples = (
        Sample(label=str(e), measured=e, predicted=1.0, work=1.0, memory=2 * e, told_memory=1.0)
        for e in errors
    )
    return Group(name=name, samples=tuple(samples))


def test_every_source_weighs_as_much() -> None:
    rng = np.random.default_rng(0)
    wide, narrow = (list(np.exp(rng.normal(0, s, n))) for s, n in ((0.2, 20), (0.01, 2000)))
    held = of_steps(
        [
            group("wide", wide),
            group("narrow", narrow),
            group("narrow, too", narrow[::10]),
            group("collectives, x", [100.0] * 9),
            group("few", [9.0, 9.0]),
        ]
    )[WIDE_TYPES]
    assert held.residual.rows == 2220
    assert 0.1 < held.residual.high < 0.6, "the small group makes the tails"
    assert held.inside["narrow"] == 1.0 and held.inside["wide"] < 0.8
    assert held.coverage == pytest.approx(np.mean(list(held.inside.values())))
    assert of_memory([group("a", wide), group("b", wide)]).residual.middle == pytest.approx(
        math.log(2), abs=0.1
    )


def test_nine_rows_in_ten_of_a_source_left_out_are_inside() -> None:
    """Sources that are biased each in its own way: quantiles of their rows alone are too narrow."""
    rng = np.random.default_rng(1)
    logs = {str(n): rng.normal(rng.normal(0, 0.1), 0.02, 30) for n in range(40)}
    held = conformal(logs)
    assert held.coverage >= 0.9
    every = np.concatenate(list(logs.values()))
    low, high = np.quantile(every, (0.05, 0.95))
    assert held.residual.low <= low + 0.01 and held.residual.high >= high - 0.01
    beside = conformal(logs, [np.full(3, 5.0)])
    assert beside.residual.high >= held.residual.high, "runs of other kinds are one source more"


def test_the_leaderboard_shows_every_group_with_a_null_model() -> None:
    groups = [
        group("a <b>", [1.0, 1.1, 0.9]),
        group("c", [1.0, 5.0, 0.1]),
        Group(name="empty", samples=()),
    ]
    picture: Any = leaderboard(groups, [score(g) for g in groups])
    assert "a &lt;b&gt; (3)" in picture and "c (3)" in picture and "empty" not in picture
