"""The configuration of torchtitan (TOML): its `training`, `parallelism` and `activation_checkpoint` sections.

The order of its devices from the outside in: pipeline, replicate, shard, context, tensor; experts borrow from shard and
context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, unknown
from .configuration import Configuration, degree, left_out, number

SOURCE = "torchtitan"
SCHEDULES = {
    "gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved1f1b": ("interleaved", 2), "interleavedzerobubble": ("zero_bubble", 1),
    "zbvzerobubble": ("zero_bubble", 1),
}  # fmt: skip
"""autopar's schedule and the least chunks of a stage, by torchtitan's name in lower case."""
MODES = {"none": "none", "selective": "selective", "full": "full", "memory_budget": None}
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw"}
_TRAINING = {
    "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "mixed_precision_reduce", "dtype", "steps", "max_norm",
    "dataset", "dataset_path", "deterministic", "seed", "gc_freq", "gc_debug", "batch_size",
}  # fmt: skip
_PARALLEL = {
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
    "context_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree", "pipeline_parallel_degree",
    "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage",
    "context_parallel_rotate_method", "disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd",
}  # fmt: skip


def read_torchtitan(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a parsed file."""
    names = ("training", "parallelism", "activation_checkpoint", "optimizer")
    training, parallel, again, optimizer = (_table(data, name) for name in names)
    shard = number(SOURCE, parallel, "data_parallel_shard_degree", -1)
    replicate, tensor, context = (
        degree(SOURCE, parallel, f"{name}_degree") for name in ("data_parallel_replicate", "tensor_parallel", "context_parallel")
    )
    expert, stages = degree(SOURCE, parallel, "expert_parallel_degree"), degree(SOURCE, parallel, "pipeline_parallel_degree")
    all_of_them = shard is None or shard < 0
    data_degree = None if all_of_them else replicate * (shard or 1)
    lost = left_out(set(training) - _TRAINING, " of [training]") + left_out(set(parallel) - _PARALLEL, " of [parallelism]")
    lost += left_out({"expert_tensor_parallel_degree"} if degree(SOURCE, parallel, "expert_tensor_parallel_degree") > 1 else ())
    if all_of_them and replicate > 1:
        lost.append("data_parallel_replicate_degree beside all other devices as shards: parameters are stored split over all of them")
    schedule, interleave = _schedule(parallel) if stages > 1 else (None, 1)
    batch, local, micro = _batches(training, parallel, stages)
    types = {key: training.get(key) for key in ("mixed_precision_param", "mixed_precision_reduce")}
    return Configuration(
        source=SOURCE, data=data_degree, shards=None if all_of_them else shard, zero=_zero(parallel, shard, stages), tensor=tensor,
        sequence_parallel=tensor > 1, context=context, expert=expert, stages=stages, schedule=schedule, interleave=interleave, batch=batch,
        sequence=number(SOURCE, training, "seq_len"), micro_batch=micro, local_batch=local, recompute=_mode(again, lost),
        dtype=_text(types["mixed_precision_param"]), reduce=_text(types["mixed_precision_reduce"]), optimizer=_optimizer(optimizer, lost),
        lost=tuple(lost),
    )  # fmt: skip


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, Mapping):
        raise UsageError(f"{SOURCE}: [{name}] is no table")
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _zero(parallel: Mapping[str, Any], shard: int | None, stages: int) -> int:
    """The ZeRO stage of the policy; by default the backward pass gathers parameters again unless in a pipeline."""
    if shard == 1:
        return 0
    policy = parallel.get("fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        raise UsageError(f"{SOURCE}: " + unknown("fsdp_reshard_after_forward", policy, ("default", "always", "never")))
    return 3 if policy == "always" or (policy == "default" and stages == 1) else 2


def _schedule(parallel: Mapping[str, Any]) -> tuple[str, int]:
    given = str(parallel.get("pipeline_parallel_schedule", "1F1B"))
    if given.lower() not in SCHEDULES:
        raise UsageError(f"{SOURCE}: " + unknown("pipeline schedule", given, SCHEDULES))
    return SCHEDULES[given.lower()]


def _batches(training: Mapping[str, Any], parallel: Mapping[str, Any], stages: int) -> tuple[int | None, int | None, int | None]:
    """The global batch where it is said, that of a device before gradients are reduced, and that of a micro-batch."""
    local, whole = number(SOURCE, training, "local_batch_size"), number(SOURCE, training, "global_batch_size", -1)
    local = local if local is not None else number(SOURCE, training, "batch_size")
    small = degree(SOURCE, parallel, "pipeline_parallel_microbatch_size") if stages > 1 else local
    if local is not None and small is not None and (small < 1 or local % small):
        raise UsageError(f"{SOURCE}: a local batch of {local} is not made of micro-batches of {small}")
    return (whole if whole is not None and whole > 0 else None), local, small


def _mode(again: Mapping[str, Any], lost: list[str]) -> str | None:
    given = str(again.get("mode", "none"))
    if given not in MODES:
        raise UsageError(f"{SOURCE}: " + unknown("activation_checkpoint mode", given, MODES))
    if MODES[given] is None:
        lost.append(f"activation_checkpoint mode {given}: what is recomputed is searched")
    return MODES[given]


def _optimizer(table: Mapping[str, Any], lost: list[str]) -> str | None:
    given = str(table.get("name", "AdamW"))
    if given.lower() not in OPTIMIZERS:
        lost.extend(left_out([f"optimizer {given}"]))
        return None
    return OPTIMIZERS[given.lower()]
