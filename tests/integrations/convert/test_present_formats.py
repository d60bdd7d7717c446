"""Formats of the present versions: torchtitan's functions, units that match, layouts of stages."""

from __future__ import annotations

import ast
import json
import types
from pathlib import Path
from typing import Any

import pytest
from report_models import planned
from torch import nn

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.integrations.convert import convert
from autopar.plan import Plan
from autopar.plan_parts import InputSpec
from tests.end_to_end.small_types import small_configuration

# The fields of its dataclasses that we set, as of pytorch/torchtitan@b5bcd76c66.
TRAINING = {
    "num_tokens_per_microbatch_per_dp_rank",
    "num_tokens_per_train_step",
    "max_context_length",
    "mixed_precision_param",
    "disable_cuda_graphs",
}
PARALLELISM = {
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "module_fqns_per_model_part",
    "num_pp_microbatches",
    "enable_sequence_parallel",
}


def staged(layers: int, **more: Any) -> Plan:
    plan = planned(
        layers=layers, mesh=(2,), scheme="data", stages=2, zero=0, recompute="none", **more
    ).plan
    tokens = {"input_ids": InputSpec(shape=(32, 8), dtype="int64")}
    return plan.model_copy(update={"model": plan.model.model_copy(update={"inputs": tokens})})


def experts(folder: Path) -> Plan:
    (folder / "config.json").write_text(json.dumps(small_configuration("mixtral")))
    loaded = load_any(f"hf:{folder}", ModelOptions(batch=4, dims={"sequence": 16}))
    return plan_loaded(loaded, devices=2, cluster="local-cpu", scheme="expert").plan


def configured(text: str) -> Any:
    """A configuration of torchtitan after the function of the file."""
    config = types.SimpleNamespace(
        training=types.SimpleNamespace(), parallelism=types.SimpleNamespace()
    )
    names: dict[str, Any] = {}
    exec(compile(text, "planned.py", "exec"), names)
    return names["planned"](config)


def test_a_function_sets_fields_that_torchtitan_has() -> None:
    converted = convert(staged(3, micro_batches=4, schedule="1f1b"), "torchtitan")
    assert "pytorch/torchtitan@" in converted.text.splitlines()[0]
    config = configured(converted.text)
    assert set(vars(config.training)) <= TRAINING
    assert set(vars(config.parallelism)) == PARALLELISM
    # 32 sequences of 8 tokens, in 4 micro-batches on 2 ranks of a stage.
    assert config.training.num_tokens_per_train_step == 256
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 32
    assert config.parallelism.num_pp_microbatches == 4 and config.training.disable_cuda_graphs
    assert config.activation_checkpoint is None
    parts = config.parallelism.module_fqns_per_model_part
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *(f"layers.{layer}" for layer in range(3)),
        "norm",
        "lm_head",
    ]


def test_the_released_version_counts_in_samples() -> None:
    text = convert(staged(3, micro_batches=4, schedule="1f1b"), "torchtitan", "0.3").text
    assert "torchtitan 0.3.0" in text.splitlines()[0]
    config = configured(text)
    # The fields of its dataclasses, of which those of tokens are later ones.
    assert vars(config.training) == {
        "local_batch_size": 16,
        "global_batch_size": 32,
        "seq_len": 8,
        "mixed_precision_param": "float32",
        "disable_cuda_graphs": True,
    }
    assert config.parallelism.pipeline_parallel_microbatch_size == 4
    assert set(vars(config.parallelism)) - {"pipeline_parallel_microbatch_size"} <= PARALLELISM


def test_unequal_stages_are_a_layout() -> None:
    uneven = convert(staged(3, micro_batches=4, schedule="1f1b"), "megatron").text
    (line,) = [line for line in uneven.splitlines() if "pipeline-model-parallel-layout" in line]
    assert line.split('"')[1] in ("Et*1|t*2L", "Et*2|t*1L")
    even = convert(staged(4, micro_batches=4, schedule="1f1b"), "megatron").text
    assert "pipeline-model-parallel-layout" not in even


def test_experts_behind_a_transpose_are_experts(tmp_path: Path) -> None:
    plan = experts(tmp_path)
    assert "--expert-model-parallel-size 2" in convert(plan, "megatron").text
    parallel = configured(convert(plan, "torchtitan").text).parallelism
    assert parallel.expert_parallel_degree == parallel.data_parallel_shard_degree == 2
    for target in ("fsdp2", "deepspeed", "transformers", "dtensor"):
        with pytest.raises(UsageError, match="splitting experts"):
            convert(plan, target)


@pytest.mark.parametrize("version", ["new", "", "2026-02"])
def test_what_is_no_version(version: str) -> None:
    plan = planned(scheme="zero3").plan
    with pytest.raises(UsageError, match="no version of torchtitan"):
        convert(plan, "torchtitan", version)
    with pytest.raises(UsageError, match="one format"):
        convert(plan, "megatron", "1")


class Blocks(nn.Module):
    """Layers that hold lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


@pytest.mark.parametrize(("target", "at"), [("fsdp2", "shard"), ("dtensor", "parallelize")])
def test_every_unit_matches(target: str, at: str) -> None:
    text = convert(planned(scheme="zero3").plan, target).text
    assert at in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    names: dict[str, Any] = {}
    exec(compile(text, f"{target}.py", "exec"), names)
    layers = names["units"](Blocks())
    assert [type(layer) for layer in layers] == [nn.Sequential] * 3
    with pytest.raises(ValueError, match=r"no module of Linear is called layers\.\*"):
        names["units"](nn.Linear(4, 4))
    assert names["POLICY"].param_dtype is None


def test_deepspeed_counts_no_ranks_that_share_samples() -> None:
    told = convert(planned(scheme="megatron").plan, "deepspeed")
    assert "train_batch_size" not in json.loads(told.text)
    assert any("train_batch_size" in line for line in told.lost)
    assert json.loads(convert(planned(scheme="data").plan, "deepspeed").text)["train_batch_size"]


def test_deepspeed_says_the_type_of_sums(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_configuration("qwen3")))
    loaded = load_any(f"hf:{tmp_path}", ModelOptions(batch=4, dims={"sequence": 16}))
    plan = plan_loaded(loaded, devices=2, cluster="local-cpu", scheme="zero1").plan
    told = json.loads(convert(plan, "deepspeed").text)
    assert told["bf16"]["enabled"]
    assert told["communication_data_type"] == told["data_types"]["grad_accum_dtype"] == "fp32"
