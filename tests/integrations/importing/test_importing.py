"""Configurations of other projects: what they say, what is refused by name, and the command that
plans them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import run
from autopar.cli import shared_options as options
from autopar.errors import UsageError
from autopar.integrations.importing import FORMATS, Configuration, read_configuration
from autopar.integrations.importing.configuration import left_out
from autopar.integrations.importing.configuration_plan import framework_of_run, scheme_text
from autopar.integrations.importing.megatron import read_megatron
from autopar.integrations.importing.megatron_framework import layout_of, megatron_framework
from autopar.schemes import scheme_named
from tests.benchmarks.known.mixture import MIXTURE

TITAN = """
[training]
local_batch_size = 8
seq_len = 4096
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "full"
[metrics]
log_freq = 10
"""
MEGATRON = """#!/bin/bash
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size=4 \\
    --num-layers 32 --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 64 \\
    --recompute-activations --bf16 --use-distributed-optimizer --lr 0.1  # why not
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW"},
    "aio": {},
}
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "t.toml",
        TITAN,
        {
            "source": "torchtitan",
            "data": 8,
            "shards": 4,
            "zero": 1,
            "tensor": 2,
            "sequence_parallel": True,
            "stages": 2,
            "schedule": "interleaved",
            "interleave": 2,
            "micro_batch": 2,
            "local_batch": 8,
            "sequence": 4096,
            "recompute": "full",
            "dtype": "bfloat16",
        },
    ),
    (
        "m.sh",
        MEGATRON,
        {
            "source": "megatron",
            "data": None,
            "zero": 1,
            "tensor": 2,
            "stages": 4,
            "schedule": "interleaved",
            "interleave": 2,
            "batch": 64,
            "micro_batch": 1,
            "recompute": "selective",
            "dtype": "bfloat16",
            "sequence_parallel": True,
        },
    ),
    (
        "d.json",
        json.dumps(DEEPSPEED),
        {
            "source": "deepspeed",
            "data": 8,
            "zero": 2,
            "batch": 64,
            "micro_batches": 2,
            "offload": "optimizer",
            "dtype": "bfloat16",
        },
    ),
    (
        "h.json",
        '{"layers.*.q": "colwise", "layers.*.o": "rowwise", "norm": "replicate"}',
        {"source": "transformers"},
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    ROWS,
    ids=lambda value: value if isinstance(value, str) and "." in value[:8] else "",
)
def test_configurations_are_read(
    name: str, text: str, said: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    configuration = read_configuration(tmp_path / name)
    assert asdict(configuration) | said == asdict(configuration)
    assert read_configuration(tmp_path / name, configuration.source) == configuration


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.sh").write_text(MEGATRON)
    assert read_configuration(tmp_path / "m.sh").lost == ("not taken over: --lr",)
    (tmp_path / "d.json").write_text(json.dumps(DEEPSPEED))
    assert read_configuration(tmp_path / "d.json").lost == ("not taken over: aio",)
    assert left_out([f"key{i:02}" for i in range(20)])[0].endswith("key11 and 8 more")


@pytest.mark.parametrize(
    ("given", "data", "text"),
    [
        ({"zero": 0}, 1, ""),
        ({"zero": 3}, 8, "data 8 (zero3)"),
        ({"zero": 3, "shards": 4}, 8, "data 2 x data 4 (zero3)"),
        ({"zero": 0, "expert": 4}, 8, "data 2 x expert 4"),
        (
            {"expert": 8, "expert_tensor": 1, "tensor": 2},
            8,
            "data 2 x expert 4 x expert+megatron 2",
        ),
        ({"expert": 3, "expert_tensor": 1, "tensor": 2}, 3, "expert 3 x megatron 2"),
        (
            {"tensor": 2, "context": 2, "stages": 2, "schedule": "gpipe"},
            1,
            "pipeline-gpipe 2 x context 2 x megatron 2",
        ),
    ],
)
def test_degrees_are_a_product_of_schemes(given: dict[str, Any], data: int, text: str) -> None:
    actual = scheme_text(Configuration(source="x", **given), data)
    assert actual == text
    if text:
        assert scheme_named(text).axes


BAD = [
    ("t.toml", "[parallelism]\ntensor_parallel_degree = 'two'", "tensor_parallel_degree is 'two'"),
    (
        "t.toml",
        "[parallelism]\ntensor_parallel_degree = 0",
        "tensor is 0; it must be a whole number from 1 on",
    ),
    ("t.toml", "[parallelism]\ntensor_parallel_degree = 99999999999", "tensor is 99999999999"),
    ("t.toml", "parallelism = 3", r"\[parallelism\] is no table"),
    ("t.toml", "[parallelism", "not TOML"),
    (
        "t.toml",
        "[parallelism]\npipeline_parallel_degree=2\npipeline_parallel_schedule='ZBV'",
        "unknown pipeline schedule 'ZBV'",
    ),
    ("t.toml", "[activation_checkpoint]\nmode='some'", "unknown activation_checkpoint mode 'some'"),
    (
        "t.toml",
        "[training]\nlocal_batch_size=3\n[parallelism]\npipeline_parallel_degree=2\npipeline_parallel_microbatch_size=2",
        "local batch of 3",
    ),
    ("d.json", '{"zero_optimization": {"stage": 7}}', "ZeRO stage 7"),
    (
        "d.json",
        '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, '
        '"gradient_accumulation_steps": 1}',
        "train_batch_size 7",
    ),
    ("d.json", '{"zero_optimization": 3}', "zero_optimization is no object"),
    ("d.json", "{", "not JSON"),
    ("d.json", "{" + '"a":[' * 50_000, "not JSON"),
    ("m.sh", "--recompute-granularity most", "neither full nor selective"),
    ("m.sh", "--tensor-model-parallel-size 'two", "cannot be read"),
    ("m.sh", "nothing at all", "give --from torchtitan"),
    ("gone.toml", None, "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "why"), BAD)
def test_what_is_wrong_is_said(name: str, text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=why):
        read_configuration(tmp_path / name)


def test_formats_are_those_of_the_parser() -> None:
    assert options.FORMATS == FORMATS


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "convert"))
    config = tmp_path / "t.toml"
    saved = tmp_path / "plan.json"
    config.write_text(
        "[training]\nlocal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = "
        "2\ndata_parallel_shard_degree = 2\n"
    )
    model = ["--model", "convert_models:build", "--cluster", "dgx-h100"]
    assert run(["import", str(config), *model, "-o", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert (
        "torchtitan as data 2 (zero3) x megatron-sp 2" in shown
        and "configuration" in shown
        and "plan found" in shown
    )
    assert saved.exists()
    run(["import", str(config), *model, "--json", "--no-compare"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] and printed["scheme"].startswith("data 2") and printed["best"] is None
    run(["import", str(config), *model, "--json", "--no-compare", "--memory", "100KiB"])
    assert not json.loads(capsys.readouterr().out)["fits"]
    with pytest.raises(UsageError, match="torchtitan is for 4 devices, not 8"):
        run(["import", str(config), *model, "--devices", "8"])
    styles = tmp_path / "styles.json"
    styles.write_text('{"layers.*.mlp": "colwise"}')
    with pytest.raises(
        UsageError,
        match=r"no weight of the model is meant by layers\.\*\.mlp; its modules are such as",
    ):
        run(["import", str(styles), *model, "--devices", "2"])


FOLDED = """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True pretrain_gpt.py
--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --sequence-parallel
--micro-batch-size 1 --global-batch-size 32 --seq-length 2048 --use-distributed-optimizer
--overlap-grad-reduce --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
--overlap-moe-expert-parallel-comm --recompute-granularity selective
--recompute-modules moe_act layernorm --pipeline-model-parallel-layout 'Et|(tt|)*2tL'
--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-precision-aware-optimizer
--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --cross-entropy-loss-fusion
--cross-entropy-fusion-impl te
"""


def test_the_framework_of_a_megatron_configuration_does_what_its_arguments_say() -> None:
    configuration = read_megatron(FOLDED)
    assert configuration.interleave == 2
    (modules,) = configuration.lost
    assert "moe_act" in modules and "one operator" in modules
    assert configuration.precision == "fp8-block"
    assert configuration.recompute_modules == ("layernorm",)
    work = framework_of_run(configuration)
    habits = work.habits
    assert (work.name, work.kernels.products) == ("megatron-core", "float8_block")
    assert (habits.overlap_gradients, habits.overlap_gather) == (True, False)
    # A master of four bytes, two bytes of each moment.
    assert (habits.state_bytes, habits.loss) == (8, "in-place")
    assert not habits.graphed and not habits.pipelined_tensor and habits.overlap_chunk_sends
    assert framework_of_run(read_megatron(f"{FOLDED} --tp-comm-overlap")).habits.pipelined_tensor


@pytest.mark.parametrize(
    ("project", "zero", "name"),
    [
        ("torchtitan", 3, "torchtitan-2026.03"),
        ("accelerate", 3, "torchtitan-2026.03"),
        ("deepspeed", 3, "deepspeed zero-3"),
        ("deepspeed", 2, "deepspeed zero-1"),
        ("transformers", None, "torchtitan-2026.03"),
    ],
)
def test_a_configuration_is_run_by_its_project(project: str, zero: int | None, name: str) -> None:
    assert framework_of_run(Configuration(source=project, zero=zero)).name == name


@pytest.mark.parametrize(
    ("more", "dispatcher"),
    [
        ("", "allgather"),
        ("--moe-token-dispatcher-type alltoall", "alltoall"),
        ("--moe-token-dispatcher-type flex", "node"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "node"),
    ],
)
def test_rows_come_to_experts_as_the_file_says(more: str, dispatcher: str) -> None:
    configuration = read_megatron(f"--expert-model-parallel-size 8 --micro-batch-size 1 {more}")
    assert megatron_framework(configuration).kernels.dispatcher == dispatcher
    assert not configuration.lost


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        ("", ()),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            ("Et", "tt", "tt", "tL"),
        ),
        ("--decoder-first-pipeline-num-layers 3", ("Ettt", "t", "t", "tL")),
        ("--pipeline-model-parallel-layout 'Ett|t|(t)*2|tL'", ("Ett", "t", "tt", "tL")),
    ],
)
def test_layouts_of_pipelines_are_read(more: str, layout: tuple[str, ...]) -> None:
    text = f"--pipeline-model-parallel-size 4 --micro-batch-size 1 {more}"
    assert layout_of(read_megatron(text), MIXTURE.layers) == layout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--expert-model-parallel-size 2 --moe-token-dispatcher-type mail",
            "unknown dispatcher 'mail'",
        ),
        ("--fp8-format e4m3 --fp8-recipe int8", "unknown --fp8-recipe 'int8'"),
        ("--recompute-granularity selective --recompute-modules act", "recompute module 'act'"),
        ("--pipeline-model-parallel-layout Ex|L", "has 'x'; its letters are E, t, m, L"),
        ("--use-precision-aware-optimizer --exp-avg-dtype int4", "unknown --exp-avg-dtype 'int4'"),
    ],
)
def test_words_of_a_run_that_are_unknown_list_the_known_ones(more: str, message: str) -> None:
    text = f"--pipeline-model-parallel-size 2 --micro-batch-size 1 {more}"
    with pytest.raises(UsageError, match=message):
        configuration = read_megatron(text)
        framework_of_run(configuration)
        layout_of(configuration, MIXTURE.layers)


def test_experts_folded_over_tensor_parallel_ranks_are_planned_so() -> None:
    configuration = read_megatron(FOLDED)
    assert configuration.devices(16) == 16
    text = scheme_text(configuration, 4)
    assert text.endswith(" x expert 4 (zero1) x expert+megatron-sp 2")
    # Without the argument, ranks that split tensors split each expert.
    whole = read_megatron(FOLDED.replace("--expert-tensor-parallel-size 1", ""))
    assert scheme_text(whole, 8).endswith(" x expert 8 (zero1) x megatron-sp 2")


def test_dense_weights_are_shared_out_over_the_ranks_of_experts() -> None:
    """FSDP with experts: dense weights over all ranks, experts over the replicas of their own."""
    configuration = Configuration(source="torchtitan", data=8, shards=8, zero=3, expert=4)
    text = scheme_text(configuration, 8)
    assert text == "data 2 (zero3) x expert 4 (zero3)"
    storage = [axis.storage for axis in scheme_named(text).axes]
    assert storage == ["split", "split"]
    assert [axis.storage for axis in scheme_named("data 2 (zero3) x expert 4").axes][1] == "used"


def test_rows_that_travel_by_nodes_split_the_experts_in_two() -> None:
    arguments = "--expert-model-parallel-size 16 --micro-batch-size 1 --moe-token-dispatcher-type "
    by_node = read_megatron(f"{arguments} flex")
    assert scheme_text(by_node, 32, 8) == "data 2 x expert 2 x expert 8"
    assert scheme_text(by_node, 32, 16) == scheme_text(by_node, 32) == "data 2 x expert 16"
    assert scheme_text(read_megatron(f"{arguments} alltoall"), 32, 8) == "data 2 x expert 16"
