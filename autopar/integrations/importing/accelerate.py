"""The configuration of Hugging Face accelerate (YAML), as `accelerate config` writes it.

Names are those of huggingface/accelerate (utils/dataclasses.py: `FullyShardedDataParallelPlugin`,
`DeepSpeedPlugin`, `MegatronLMPlugin`; parallelism_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError, unknown

from .configuration import Configuration, degree, left_out, number, stage

SOURCE = "accelerate"
MARKS = ("distributed_type", "compute_environment", "num_processes")
"""Keys of which each tells such a file."""
LOCAL = "LOCAL_MACHINE"
PLAIN = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
_STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""Sharding strategies of FSDP's first version as stages of ZeRO, in the order of their numbers."""
_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "no": None, False: None}
_DEGREES = "parallelism_config_"


def read_accelerate(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a parsed file."""
    where = data.get("compute_environment", LOCAL)
    if where != LOCAL:
        raise UsageError(f"{SOURCE}: " + unknown("compute_environment", str(where), [LOCAL]))
    # YAML reads a bare NO as false.
    kind = str(data.get("distributed_type") or "NO").upper()
    readers = {
        "NO": lambda data: {"data": 1},
        **dict.fromkeys(PLAIN, _plain),
        "FSDP": _fsdp,
        "DEEPSPEED": _deepspeed,
        "MEGATRON_LM": _megatron,
    }
    if kind not in readers:
        raise UsageError(f"{SOURCE}: " + unknown("distributed_type", kind, readers))
    precision = data.get("mixed_precision", "no")
    if precision not in _TYPES:
        raise UsageError(
            f"{SOURCE}: "
            + unknown("mixed_precision", str(precision), ["bf16", "fp16", "fp8", "no"])
        )
    said = readers[kind](data)
    lost = list(said.pop("lost", ()))
    if precision == "fp8":
        lost.append("mixed_precision fp8: products of bfloat16 are planned")
    return Configuration(source=SOURCE, dtype=_TYPES[precision], lost=tuple(lost), **said)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Devices that split nothing but the batch."""
    return {"zero": 0, **_degrees(data)}


def _fsdp(data: Mapping[str, Any]) -> dict[str, Any]:
    table = _table(data, "fsdp_config")
    degrees = _degrees(data)
    zero, hybrid = _sharding(table)
    if hybrid and degrees["data"] is not None:
        machines = degree(SOURCE, data, "num_machines")
        if degrees["data"] % machines:
            raise UsageError(
                f"{SOURCE}: {degrees['data']} processes are not on {machines} machines"
            )
        degrees["shards"] = degrees["data"] // machines
    lost = left_out(["fsdp_offload_params"] if table.get("fsdp_offload_params") else [])
    if degrees["data"] is not None and degrees.get("shards") == 1:
        zero = 0
    recomputes = table.get("fsdp_activation_checkpointing") is True
    return {**degrees, "zero": zero, "recompute": "full" if recomputes else "none", "lost": lost}


def _sharding(table: Mapping[str, Any]) -> tuple[int, bool]:
    """The stage of ZeRO, and whether machines hold replicas."""
    value = table.get("fsdp_reshard_after_forward")
    if value is None or isinstance(value, str):
        name = value or table.get("fsdp_sharding_strategy", "FULL_SHARD")
        names = list(_STRATEGIES)
        if isinstance(name, int) and 1 <= name <= len(names):
            name = names[name - 1]
        if str(name).lower() in ("true", "false"):
            return (3 if str(name).lower() == "true" else 2), False
        if name not in _STRATEGIES:
            raise UsageError(f"{SOURCE}: " + unknown("fsdp_sharding_strategy", str(name), names))
        return _STRATEGIES[name], str(name).startswith("HYBRID")
    return (3 if value else 2), False


def _degrees(data: Mapping[str, Any]) -> dict[str, Any]:
    """Degrees of the processes, of which those that no degree takes split the batch."""
    table = _table(data, "parallelism_config")
    replicas, shards, tensor, context, heads = (
        degree(SOURCE, table, f"{_DEGREES}{name}_size")
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    )
    if context > 1 and heads > 1:
        raise UsageError(f"{SOURCE}: cp_size and sp_size both split the sequence")
    count = number(SOURCE, data, "num_processes")
    inner = tensor * context * heads
    whole = replicas * shards * inner
    if table and count is not None and whole > 1 and whole != count:
        raise UsageError(f"{SOURCE}: parallelism_config is for {whole} processes, not {count}")
    split = {"data": None if count is None else count // inner}
    if replicas > 1 or (table and whole > 1):
        split = {"data": replicas * shards, "shards": shards}
    return {
        **split,
        "tensor": tensor,
        "context": context * heads,
        "context_scheme": "ulysses" if heads > 1 else "context",
    }


def _deepspeed(data: Mapping[str, Any]) -> dict[str, Any]:
    table = _table(data, "deepspeed_config")
    degrees = _degrees(data)
    if "deepspeed_config_file" in table:
        raise UsageError(
            f"{SOURCE}: the layout is in DeepSpeed's file {table['deepspeed_config_file']}: import "
            f"that one, with --devices {data.get('num_processes', 'N')}"
        )
    device = str(table.get("offload_optimizer_device", "none"))
    return {
        **degrees,
        "zero": stage(SOURCE, number(SOURCE, table, "zero_stage", 2)),
        "micro_batches": number(SOURCE, table, "gradient_accumulation_steps", 1),
        "offload": "optimizer" if device == "cpu" else None,
        "lost": left_out(
            f"{name}: {table[name]}"
            for name in ("offload_optimizer_device", "offload_param_device")
            if table.get(name, "none") not in ("none", "cpu" if "optimizer" in name else "none")
        ),
    }


def _megatron(data: Mapping[str, Any]) -> dict[str, Any]:
    table = {
        name.removeprefix("megatron_lm_"): value
        for name, value in _table(data, "megatron_lm_config").items()
    }
    tensor, stages = (degree(SOURCE, table, f"{name}_degree") for name in ("tp", "pp"))
    count = number(SOURCE, data, "num_processes")
    if count is not None and count % (tensor * stages):
        raise UsageError(f"{SOURCE}: {count} processes do not make groups of {tensor} x {stages}")
    return {
        "data": None if count is None else count // (tensor * stages),
        "tensor": tensor,
        "stages": stages,
        "schedule": "1f1b" if stages > 1 else None,
        "micro_batches": number(SOURCE, table, "num_micro_batches", 1),
        "sequence_parallel": table.get("sequence_parallelism") is True,
        "recompute": "selective" if table.get("recompute_activations") is True else "none",
        "zero": 1 if table.get("use_distributed_optimizer") is True else 0,
    }


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name) or {}
    if not isinstance(table, Mapping):
        raise UsageError(f"{SOURCE}: {name} is no table")
    return {str(key): value for key, value in table.items() if value is not None}
