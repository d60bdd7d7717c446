"""The configuration of DeepSpeed (JSON): batch sizes, ZeRO stage, offload, tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .configuration import Configuration, degree, left_out, number

SOURCE = "deepspeed"
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "sgd": "sgd", "lamb": "lamb", "fusedlamb": "lamb"}
_KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "zero_optimization", "bf16", "fp16",
    "tensor_parallel", "sequence_parallel_size", "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown",
}  # fmt: skip


def read_deepspeed(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a parsed file; "auto" counts as missing."""
    said = {key: value for key, value in data.items() if value != "auto"}
    zero, optimizer, tensor = (_table(said, name) for name in ("zero_optimization", "optimizer", "tensor_parallel"))
    lost = left_out(set(data) - _KNOWN)
    stage = number(SOURCE, zero, "stage", 0) or 0
    if not 0 <= stage <= 3:
        raise UsageError(f"{SOURCE}: ZeRO stage {stage} is none of 0, 1, 2, 3")
    if _table(zero, "offload_param"):
        lost.append("offload_param: parameters stay on the device, which autopar plans")
    batch, micro, count = (
        number(SOURCE, said, key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    data_degree = None
    if batch and micro and count:
        if batch % (micro * count):
            raise UsageError(f"{SOURCE}: train_batch_size {batch} is not {micro} x {count} x a number of devices")
        data_degree = batch // (micro * count)
    named = str(optimizer.get("type", "AdamW")).lower()
    lost += left_out([f"optimizer {optimizer.get('type')}"]) if named not in OPTIMIZERS else []
    sequence = degree(SOURCE, said, "sequence_parallel_size")
    return Configuration(
        source=SOURCE, data=data_degree, zero=stage, tensor=degree(SOURCE, tensor, "autotp_size"), context=sequence, batch=batch,
        micro_batches=count, dtype=next((name for key, name in _TYPES.items() if _table(said, key).get("enabled") is True), None),
        optimizer=OPTIMIZERS.get(named), offload="optimizer" if _table(zero, "offload_optimizer").get("device") == "cpu" else None,
        lost=tuple(lost),
    )  # fmt: skip


_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, Mapping):
        raise UsageError(f"{SOURCE}: {name} is no object")
    return found
