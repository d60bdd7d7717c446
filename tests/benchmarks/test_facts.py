"""Every column of a published run is used or named as not used, and what it leaves open is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from autopar.costmodel.frameworks import framework_named
from benchmarks.validating import columns as columns_module
from benchmarks.validating.columns import unnamed
from benchmarks.validating.facts import (
    MEASURED,
    NOT_USED,
    PRECISIONS,
    USED,
    open_facts,
    precision_of,
)
from benchmarks.validating.frameworks import attention_of, described, framework_of
from benchmarks.validating.machines import cluster_of
from benchmarks.validating.missing import Missing
from benchmarks.validating.networks import Network, network_of
from benchmarks.validating.rows import COLUMNS, GRID, Row, checked
from benchmarks.validating.scores import Group, Sample, score
from benchmarks.validating.sizes import parameters, shape_of
from benchmarks.validating.steps import configuration_of, framework, predict, with_degrees
from benchmarks.validating.training import sample, told_memory


def row(**given: Any) -> Row:
    """A small GPT on 16 devices but for what is given."""
    own = {
        "group": "g",
        "model": "GPT",
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "ffn": 4096,
        "gpus": 16,
        "seq_len": 128,
        "tp": 2,
        "pp": 1,
        "dp": 8,
        "micro_batch": 1,
        "global_batch": 32,
        "step_time_s": 1.0,
    }
    named = {name: str(value) for name, value in (own | given).items()}
    return dict.fromkeys(sorted(COLUMNS["steps"]), "") | dict(GRID) | named


def test_every_column_is_used_or_named() -> None:
    known = {*USED, *MEASURED, *NOT_USED}
    assert COLUMNS["steps"] <= known
    assert len(known) == len(USED) + len(MEASURED) + len(NOT_USED)


@pytest.mark.parametrize(
    ("text", "rate", "shared_by", "stated"),
    [
        ("8x200Gb HDR IB/node (Selene)", 25e9, 1, True),
        ("4x100Gb OPA/node", 12.5e9, 2, True),
        ("1600Gbps RoCE/node", 25e9, 1, True),
        ("32x100Gb EFA", 50e9, 1, True),
        ("100 Gb", 12.5e9, 8, False),
        ("100Gbps per node", 12.5e9, 8, True),
        ("NVLink 600GB/s; 8x50 GB/s", 50e9, 1, True),
        ("400 Gb/s per GPU", 50e9, 1, True),
        ("25GbE", 3.125e9, 8, False),
        ("4xHDR", 25e9, 2, False),
    ],
)
def test_networks_are_read(text: str, rate: float, shared_by: int, stated: bool) -> None:
    expected = Network(rate=pytest.approx(rate), shared_by=shared_by, stated=stated)
    assert network_of(text, 8) == expected
    port = cluster_of("H100", text, without=frozenset({"network"})).levels[-1]
    assert (port.bandwidth, port.shared_by) == (expected.rate, shared_by)


def test_a_port_like_those_of_the_machine_is_one_of_each_device() -> None:
    """DGX A100 has 8 x 200 Gbit/s; as many at another rate are one port of the node."""
    same, other = (cluster_of("A100", f"{rate}Gb/s InfiniBand").levels[-1] for rate in (200, 100))
    assert (same.shared_by, other.shared_by) == (1, 8)


@pytest.mark.parametrize("text", ["", "single node NVLink", "RoCE", "NVLink"])
def test_networks_without_a_rate_leave_the_machine_as_it_is(text: str) -> None:
    assert network_of(text, 8) is None
    assert cluster_of("A100", text) == cluster_of("A100")


def test_devices_are_told_apart_by_their_first_word() -> None:
    assert cluster_of("L40S-48GB").device.name != cluster_of("L4").device.name
    assert cluster_of("NVIDIA H100 80GB HBM3") == cluster_of("H100")
    for name in ("H100 NVL", "A100-PCIe-80GB", "GH200", "TPU v5e"):
        with pytest.raises(Missing, match="no preset"):
            cluster_of(name)


def test_a_row_may_say_how_large_memories_and_nodes_are() -> None:
    whole = cluster_of("V100-SXM2-16GB")
    large = cluster_of("V100-SXM2-16GB", memory=32, node=4)
    assert large.device.memory_capacity == 2 * whole.device.memory_capacity
    assert (whole.levels[0].size, large.levels[0].size) == (8, 4)
    assert cluster_of("GB200", node=4).levels[0].size == 72  # a rack's switch joins all


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("bf16", ("bfloat16", "")),
        ("amp_fp8", ("bfloat16", "float8_e4m3fn")),
        ("FP8-MX", ("bfloat16", "float8_block")),
        ("float8 rowwise", ("bfloat16", "float8_e4m3fn")),
        ("bf16 (fp32 grad accumulation)", ("bfloat16", "")),
        ("bf16-mixed", ("bfloat16", "")),
        ("fp32", ("float32", "")),
    ],
)
def test_precisions_are_read(text: str, types: tuple[str, str]) -> None:
    assert precision_of({"precision": text}) == types


@pytest.mark.parametrize("word", PRECISIONS)
def test_every_precision_is_priced(word: str) -> None:
    _, price = predict(row(precision=word, gpu="B200", network=""))
    assert 0 < price.step < math.inf


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("torchtitan 2024-06", "torchtitan-2024.12"),
        ("torchtitan 2026-04", "torchtitan-2026.03"),
        ("torchtitan", "torchtitan-2026.03"),
        ("NeMo 24.03", "nemo-2024.03"),
        ("NeMo 24.09", "nemo-2024.07"),
        ("NeMo AutoModel", "automodel"),
        ("Megatron-Bridge 26.06 NeMo Container", "megatron-bridge"),
        ("Megatron-LM", "megatron-2022"),
        ("Megatron-LM 2023-12", "megatron-core"),
        ("Megatron-DeepSpeed (MT-NLG)", "megatron-deepspeed"),
        ("MaxText (JAX)", "maxtext"),
        ("Megatron-MoE-ModelZoo", "moe zoo"),
        ("nanotron", "nanotron"),
        ("Llama 3 (Meta)", "llama-3"),
        ("Alpa 1.0", "alpa"),
        ("a framework of our own", "neutral"),
    ],
)
def test_frameworks_are_described_by_what_was_read_of_their_time(name: str, known: str) -> None:
    assert described(name) == known
    assert framework_of(name, compiled=False) == framework_named(known)


def test_large_runs_of_llm_foundry_have_the_kernels_of_their_sweep() -> None:
    own = {"attn_impl": "flash", "precision": "amp_bf16", "gpu": "H100", "gpus": 256}
    given = row(framework="llm-foundry/Composer FSDP", **own)
    kernels = {
        model: framework({**given, "model": model}).kernels.attention
        for model in ("MPT-7b", "MPT-30b")
    }
    assert kernels == {"MPT-7b": "flash2", "MPT-30b": "triton"}
    assert framework({**given, "gpus": "8"}).kernels.attention == "triton"


def test_attention_is_read() -> None:
    words = ("flash", "SDPA/flash", "FlashAttention-3", "cuDNN", "triton", "fused", "torch", "")
    kernels = ["", "flash2", "flash3", "cudnn", "triton", "fused", "unfused", ""]
    assert [attention_of(word) for word in words] == kernels


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({}, []),
        ({"network": ""}, ["network"]),
        ({"network": "", "gpus": 8}, []),
        ({"network": "100Gb"}, ["network"]),
        ({"precision": ""}, ["precision"]),
        ({"pp": 2, "dp": 4, "interleave": ""}, ["interleave"]),
        ({"recompute": ""}, ["recompute"]),
        ({"framework": "ours"}, ["framework"]),
        ({"tp": "", "dp": "", "micro_batch": ""}, ["micro-batch", "layout"]),
    ],
)
def test_open_facts_are_told(given: dict[str, Any], facts: list[str]) -> None:
    assert list(open_facts(row(**given))) == facts


def test_a_priced_row_tells_its_open_facts() -> None:
    for given, facts in (({"network": ""}, ("network",)), ({}, ())):
        one = row(**given)
        scored = sample(one, checked(one, Path("invented.csv"), 0), predict)
        assert isinstance(scored, Sample) and scored.open == facts


def test_rows_with_open_facts_are_scored_apart() -> None:
    stated = Sample(label="a", measured=1.0, predicted=1.1)
    unknown = Sample(label="b", measured=1.0, predicted=0.5, open=("network",))
    scored = score(Group(name="g", samples=(stated, unknown, unknown)))
    assert scored.stated_n == 1 and scored.stated_error == pytest.approx(0.1)
    assert scored.open_facts == {"network": 2}


def test_residuals_have_slopes_over_what_varies() -> None:
    samples = tuple(
        Sample(
            label="",
            measured=1.0,
            predicted=1.05**n * 1.1**m,
            scale={"sequence": 2.0**n, "devices": 2.0**m, "micro-batch": 4.0},
        )
        for n in range(3)
        for m in range(3)
    )
    slopes = score(Group(name="g", samples=samples)).trends
    assert slopes == pytest.approx({"sequence": 0.0488, "devices": 0.0953}, abs=1e-3)
    assert score(Group(name="g", samples=samples[:5])).trends == {}


def test_a_degree_follows_from_the_others() -> None:
    work = framework(row())
    assert configuration_of(row(dp=""), work) == configuration_of(row(), work)
    assert with_degrees(row(dp="", gpus=15))["dp"] == ""


def test_a_row_without_a_layout_has_the_fastest_that_fits() -> None:
    _, best = predict(row(tp="", dp="", gpus=2, zero_stage="auto", micro_batch=""))
    others = (
        predict(row(tp=tensor, dp=2 // tensor, gpus=2, zero_stage="2", micro_batch=micro))[1]
        for tensor in (1, 2)
        for micro in (1, 2, 4, 8)
    )
    assert best.step == min(other.step for other in others)


def test_hybrid_sharding_shares_out_in_a_node() -> None:
    given = row(framework="torchtitan 2025-06", zero_stage="HSDP", tp=1, dp=16)
    c = configuration_of(given, framework(given))
    assert (c.zero, c.shards, c.copies) == (3, 8, 2)


def test_torchtitan_divides_a_ranks_batch_among_its_stages() -> None:
    sizes = {"tp": 2, "pp": 4, "dp": 2, "micro_batch": 16, "global_batch": 32}
    micros = []
    for year in ("2024-12", "2025-06"):
        given = row(framework=f"torchtitan {year}", zero_stage="3 (FSDP2)", **sizes)
        micros.append(configuration_of(given, framework(given)).micro_batch)
    assert micros == [4, 1]


def test_layers_of_experts_follow_from_the_number_of_parameters() -> None:
    """Alpa's of 1.011568 billion: every second layer has 16 experts, eight hidden dims wide."""
    given = row(
        framework="Alpa",
        hidden=768,
        heads=6,
        layers=12,
        experts=16,
        ffn="",
        vocab=25600,
        params_b=1.011568,
    )
    shape = shape_of(given, framework(given))
    assert (shape.expert_every, shape.ffn, shape.top_k) == (2, 8 * 768, 2)
    assert parameters(shape) == pytest.approx(1.011568e9, rel=0.01)


def test_memory_is_what_a_frameworks_log_shows() -> None:
    _, price = predict(row())
    assert told_memory(row(framework="torchtitan"), price) == price.memory - price.reserved
    assert told_memory(row(framework="Alpa"), price) == max(price.allocated)
    assert told_memory(row(), price) == price.memory


def test_chunks_of_llama_3_have_a_layer_each() -> None:
    """126 layers, embedding and head on 16 stages: eight chunks each."""
    sizes = {"layers": 126, "tp": 1, "pp": 16, "dp": 1, "global_batch": 32, "interleave": ""}
    given = row(framework="Llama 3 (Meta)", zero_stage="FSDP", **sizes)
    assert configuration_of(given, framework(given)).interleave == 8
    assert list(open_facts(given)) == []


def test_experts_are_whole_where_a_stage_has_no_ranks_to_split_them() -> None:
    given = row(framework="Megatron-Core 2025", seq_parallel=1, experts=16, ep=16, tp=2, dp=8)
    assert configuration_of(given, framework(given)).expert_tensor == 1
    fewer = {**given, "ep": "8"}
    assert configuration_of(fewer, framework(fewer)).expert_tensor == 0


def test_columns_of_other_files_are_used_or_named() -> None:
    for kind, columns in COLUMNS.items():
        assert unnamed(kind, columns) == [], kind
        assert unnamed(kind, columns | {"colour"}) == ["colour"]
    for kind, reasons in columns_module.NOT_USED.items():
        named = " ".join(reasons.values()).split()
        assert len(set(named)) == len(named)
        assert not {*named} & {*columns_module.USED[kind].split()}
