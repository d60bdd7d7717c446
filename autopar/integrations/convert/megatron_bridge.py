"""Megatron-Bridge's `ConfigContainer`: a function that sets the plan's values in a recipe's one."""

from __future__ import annotations

from collections.abc import Iterable

from .megatron import REACH as MEGATRON
from .megatron import habits, letters, losses
from .precisions import words_of
from .reach import FOLDED, PARTLY, WEIGHTS, Reach, lacks
from .setup import Converted, Setup
from .stage_layers import stage_layers

TARGET = "megatron-bridge"
COMMIT = "NVIDIA-NeMo/Megatron-Bridge@067f987df0 (2026-08-22)"
"""The source that the names are taken from."""
TYPES = {"bfloat16": "bf16_mixed", "float16": "fp16_mixed"}
REACH = (
    MEGATRON[0],
    # Megatron-FSDP; with parameters gathered for every pass.
    Reach(axes=("shard", "expert", *WEIGHTS, *FOLDED), zeros=(3,), optimizers=("adamw", "sgd")),
)


def config_container(setup: Setup) -> Converted:
    """The file: `planned(config)`."""
    setup.refuse(TARGET, *setup.mixed(), *lacks(REACH, setup))
    lost = [*setup.lost, *setup.minor(), *losses(setup)]
    lost.append("the optimizer and its learning rate stay those of the recipe")
    precision = _precision(setup)
    text = _FILE.format(
        commit=COMMIT,
        notes="".join(f"#   {note}\n" for note in lost),
        imported="".join(line for word, line in _IMPORTED.items() if word in precision),
        values="\n".join(f"    config.{name} = {value!r}" for name, value in _values(setup)),
        precision=precision,
    )
    return Converted(text=text, lost=tuple(lost))


def _values(setup: Setup) -> Iterable[tuple[str, object]]:
    schedule = setup.plan.schedule
    yield "model.tensor_model_parallel_size", setup.degree("tensor")
    yield "model.sequence_parallel", setup.sequence_parallel
    yield "model.context_parallel_size", setup.degree("sequence", "ulysses")
    if setup.degree("ulysses") > 1:
        yield "model.cp_comm_type", "a2a"
    yield "model.expert_model_parallel_size", setup.experts
    if setup.has_experts:
        yield "model.expert_tensor_parallel_size", setup.inside_experts
        yield "model.moe_grouped_gemm", True
    for name, value in habits(setup, TARGET).items():
        yield f"model.{name.replace('-', '_')}", True if value == "" else value
    yield "model.pipeline_model_parallel_size", setup.stages
    layout = stage_layers(setup.plan)
    uneven = layout is not None and not layout.even
    yield "model.pipeline_model_parallel_layout", letters(layout) if layout and uneven else None
    chunks = schedule.interleave if schedule.interleave > 1 and not uneven else None
    yield "model.virtual_pipeline_model_parallel_size", chunks
    yield from _recomputed(setup)
    yield "train.micro_batch_size", setup.local_batch
    yield "train.global_batch_size", setup.batch
    if setup.sequence:
        yield "model.seq_length", setup.sequence
        yield "dataset.seq_length", setup.sequence
    yield from _sharded(setup)


def _precision(setup: Setup) -> str:
    """The types, as code: what they say of gradients takes the place of what `ddp` says."""
    words = words_of(setup.plan)
    dtype = setup.parameter_type(TYPES)
    if words is None and dtype is None:
        return _WHOLE
    name = words.bridge if words is not None else TYPES[str(dtype)]
    return f"{name!r}" if setup.gradient_type == "float32" else _NARROW.format(name=name)


def _recomputed(setup: Setup) -> Iterable[tuple[str, object]]:
    partly = setup.recompute in PARTLY
    granularities = {"none": None, "full": "full"}
    granularity = granularities.get(setup.recompute, "selective")
    yield "model.recompute_granularity", granularity
    yield "model.recompute_method", "uniform" if setup.recompute == "full" else None
    yield "model.recompute_num_layers", 1 if setup.recompute == "full" else None
    if partly:
        yield "model.recompute_modules", ["core_attn"]


def _sharded(setup: Setup) -> Iterable[tuple[str, object]]:
    """ZeRO: its distributed optimizer, or Megatron-FSDP."""
    fully = setup.zero == 3
    yield "ddp.use_distributed_optimizer", bool(setup.zero)
    yield "ddp.overlap_grad_reduce", True
    yield "ddp.overlap_param_gather", bool(setup.zero)
    yield "optimizer.use_distributed_optimizer", bool(setup.zero)
    # States of other types than float32 are no part of a plan, and need the former.
    yield "optimizer.use_precision_aware_optimizer", False
    yield "ddp.use_megatron_fsdp", fully
    yield "dist.use_megatron_fsdp", fully
    strategy = "optim_grads_params" if fully else "no_shard"
    yield "ddp.data_parallel_sharding_strategy", strategy
    replicas = setup.degree("data") // setup.shards
    if setup.zero and replicas > 1:
        yield "ddp.num_distributed_optimizer_instances", replicas
    if fully:
        yield "checkpoint.ckpt_format", "fsdp_dtensor"


_IMPORTED = {
    "torch": "import torch\n",
    "Mixed": "from megatron.bridge.training.mixed_precision import MixedPrecisionConfig\n",
    "get_": "from megatron.bridge.training.mixed_precision import get_mixed_precision_config\n",
}
"""The imports that the types need, by a part of their code."""
_WHOLE = """MixedPrecisionConfig(
        fp32=True, params_dtype=torch.float32, pipeline_dtype=torch.float32
    )"""
_NARROW = """get_mixed_precision_config({name!r})
    config.mixed_precision.grad_reduce_in_fp32 = False"""
_FILE = """# A plan as Megatron-Bridge takes it, by the names of {commit}.
# planned(config) sets it in the ConfigContainer of a recipe, before finetune or pretrain.
{notes}
{imported}

def planned(config: "ConfigContainer") -> "ConfigContainer":  # noqa: F821
{values}
    config.mixed_precision = {precision}
    return config
"""
