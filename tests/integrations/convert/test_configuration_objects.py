"""Configuration objects of other projects: made by their own classes, or held to their fields."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from report_models import planned as perceptrons
from test_convert import planned
from test_present_formats import staged

from autopar.api import plan_loaded
from autopar.errors import UsageError
from autopar.integrations.convert import convert
from autopar.integrations.importing import read_configuration
from autopar.integrations.importing.megatron import read_megatron
from autopar.model import LoadedModel
from autopar.plan import Plan
from benchmarks.validating.known.transformer import transformer
from tests.benchmarks.known.mixture import MIXTURE

BRIDGE = "megatron-bridge"
# The fields that we set, as of NVIDIA-NeMo/Megatron-Bridge@067f987df0.
FIELDS = {
    "model": {
        "tensor_model_parallel_size",
        "sequence_parallel",
        "context_parallel_size",
        "cp_comm_type",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "tp_comm_overlap",
        "pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "virtual_pipeline_model_parallel_size",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "seq_length",
    },
    "train": {"micro_batch_size", "global_batch_size"},
    "dataset": {"seq_length"},
    "ddp": {
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
    },
    "optimizer": {"use_distributed_optimizer", "use_precision_aware_optimizer"},
    "dist": {"use_megatron_fsdp"},
    "checkpoint": {"ckpt_format"},
}


def hybrid(zero: int) -> Plan:
    """Two replicas of shards over two devices."""
    given = {"mesh": (2, 2), "scheme": f"gpu0:data,gpu1:zero{zero}", "micro_batches": 2}
    return perceptrons(stages=1, recompute="none", **given).plan


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the module of Megatron-Bridge that files import."""
    module = "megatron.bridge.training.mixed_precision"
    parents = [module.rsplit(".", number)[0] for number in range(1, 4)]
    made = {"MixedPrecisionConfig": SimpleNamespace, "get_mixed_precision_config": named}
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**made))


def named(name: str) -> Any:
    """The precision of a name."""
    return SimpleNamespace(name=name, grad_reduce_in_fp32=True)


def made(text: str, name: str) -> Any:
    """The object of that name in a file."""
    names: dict[str, Any] = {}
    exec(compile(text, "planned.py", "exec"), names)
    return names[name]


def contained(plan: Plan) -> Any:
    """A container of Megatron-Bridge after the function of the file."""
    config = SimpleNamespace(**{name: SimpleNamespace() for name in FIELDS})
    made(convert(plan, "megatron-bridge").text, "planned")(config)
    for name, fields in FIELDS.items():
        assert set(vars(getattr(config, name))) <= fields
    return config


def test_a_container_has_the_degrees_of_the_plan() -> None:
    config = contained(planned("both"))
    assert config.model.tensor_model_parallel_size == 2
    assert config.train.micro_batch_size == 4 and config.train.global_batch_size == 8
    assert not config.ddp.use_distributed_optimizer and not config.dist.use_megatron_fsdp
    config = contained(hybrid(1))
    assert config.ddp.use_distributed_optimizer and config.optimizer.use_distributed_optimizer
    assert config.ddp.num_distributed_optimizer_instances == 2


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_types_are_said_and_read(tmp_path: Path, reduce: str) -> None:
    data = json.loads(planned("data").to_json())
    for parameter in data["parameters"].values():
        parameter["dtype"] = "bfloat16"
    data["schedule"]["reduce"] = reduce
    plan = Plan.model_validate(data)
    said = contained(plan).mixed_precision
    assert said == "bf16_mixed" if reduce == "float32" else not said.grad_reduce_in_fp32
    caller = "\n\ndef tiny() -> ConfigContainer:\n    return planned(_pretrain_common())\n"
    for target, name, more in (
        ("megatron", "plan.sh", ""),
        (BRIDGE, "plan.py", caller),
        ("deepspeed", "plan.json", ""),
    ):
        path = tmp_path / name
        path.write_text(convert(plan, target).text + more)
        read = read_configuration(path, target)
        assert read.dtype == "bfloat16" and (read.reduce or "float32") == reduce
        assert read.lost == ()


def test_parameters_in_float32_are_said() -> None:
    assert contained(planned("both")).mixed_precision.params_dtype == torch.float32


def test_parameters_gathered_for_every_pass_are_megatron_fsdp() -> None:
    config = contained(planned("zero3"))
    assert config.dist.use_megatron_fsdp and config.ddp.use_megatron_fsdp
    assert config.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    assert config.checkpoint.ckpt_format == "fsdp_dtensor"


def test_unequal_stages_are_a_layout_in_a_container() -> None:
    config = contained(staged(3, micro_batches=4, schedule="1f1b"))
    assert config.model.pipeline_model_parallel_layout in ("Et*1|t*2L", "Et*2|t*1L")
    assert config.model.virtual_pipeline_model_parallel_size is None
    assert contained(planned("pipeline")).model.pipeline_model_parallel_layout is None


def test_a_distributed_config_is_made_by_transformers() -> None:
    pytest.importorskip("transformers.distributed.configuration_utils")
    config = made(convert(planned("megatron"), "transformers").text, "CONFIG")
    assert (config.tp_size, config.fsdp_size, config.pp_size) == (4, 1, 1)
    assert config.tp_plan["layers.*.q"] == "colwise"
    for zero, style in ((1, "keep_full_weight"), (3, "free_full_weight")):
        text = convert(hybrid(zero), "transformers").text
        config = made(text, "CONFIG")
        assert (config.dp_replicate_size, config.fsdp_size, config.tp_size) == (2, 2, 1)
        assert set(config.fsdp_plan.values()) == {style} and "layers.*" in config.fsdp_plan
        assert not config.fsdp_mixed_precision
        assert ("ZeRO 2" in text) == (zero == 1)


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    read = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file
    parallel = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
    for plan in (hybrid(3), planned("zero1"), planned("megatron"), planned("data")):
        converted = convert(plan, "accelerate")
        (tmp_path / "config.yaml").write_text(converted.text)
        config = read(str(tmp_path / "config.yaml"))
        assert config.num_processes == 4 and config.mixed_precision == "no"
        held = {
            name.removeprefix("parallelism_config_"): size
            for name, size in config.parallelism_config.items()
        }
        assert not held or parallel(**held).total_size == 4
        assert config.distributed_type.value == ("FSDP" if config.fsdp_config else "MULTI_GPU")


def test_accelerate_gathers_as_the_plan_does() -> None:
    for zero, again in ((1, False), (3, True)):
        read = yaml.safe_load(convert(hybrid(zero), "accelerate").text)
        assert read["fsdp_config"]["fsdp_reshard_after_forward"] is again
        sizes = read["parallelism_config"]
        assert sizes["parallelism_config_dp_replicate_size"] == 2
        assert sizes["parallelism_config_dp_shard_size"] == 2


def test_deepspeed_has_no_replicas_of_shards() -> None:
    with pytest.raises(UsageError, match="replicas over gpu0=2"):
        convert(hybrid(1), "deepspeed")
    assert "--num-distributed-optimizer-instances 2" in convert(hybrid(1), "megatron").text


def test_experts_are_exchanged_and_multiplied_as_the_plan_has_them() -> None:
    """By default Megatron gathers all rows on each rank, and has a product for each expert."""
    graph = transformer(replace(MIXTURE, layers=2), batch=8).graph
    model = LoadedModel(graph=graph, source=graph, dtype="bfloat16")
    asked = {"scheme": "data 2 x expert 2 x megatron-sp 2", "stages": 1, "micro_batches": 1}
    plan = plan_loaded(model, cluster="dgx-h100", devices=8, **asked).plan
    written = convert(plan, "megatron").text
    for argument in (
        "--expert-model-parallel-size 2",
        "--expert-tensor-parallel-size 2",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
    ):
        assert argument in written
    assert not any("dispatcher" in told for told in read_megatron(written).lost)
    bridge = convert(plan, BRIDGE).text
    assert "config.model.moe_token_dispatcher_type = 'alltoall'" in bridge
    assert "config.model.expert_tensor_parallel_size = 2" in bridge
    assert "config.optimizer.use_precision_aware_optimizer = False" in bridge
