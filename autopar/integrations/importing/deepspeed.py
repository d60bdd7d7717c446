"""The configuration of DeepSpeed (JSON).

It holds batch sizes, the ZeRO stage, offload, tensor and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError, unknown

from .configuration import Configuration, degree, left_out, number, stage

SOURCE = "deepspeed"
OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "fusedadam": "adamw",
    "sgd": "sgd",
    "lamb": "lamb",
    "fusedlamb": "lamb",
}
# The keys that are read, and those that change nothing in a plan: the learning rate's schedule, the
# clipping of gradients, and what is printed. Any other key is named as left out.
_KNOWN = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "communication_data_type",
    "data_types",
    "tensor_parallel",
    "sequence_parallel_size",
    "scheduler",
    "gradient_clipping",
    "steps_per_print",
    "wall_clock_breakdown",
}


def read_deepspeed(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a parsed file; a value of "auto" counts as missing."""
    # Values of "auto" are filled in by the Hugging Face trainer from its own arguments.
    table = {key: value for key, value in data.items() if value != "auto"}
    zero = _table(table, "zero_optimization")
    optimizer = _table(table, "optimizer")
    lost = left_out(set(data) - _KNOWN)
    if _table(zero, "offload_param"):
        lost.append("offload_param: parameters stay on the device, which autopar plans")
    kind = str(optimizer.get("type", "AdamW")).lower()
    if kind not in OPTIMIZERS:
        lost += left_out([f"optimizer {optimizer.get('type')}"])
    types = (name for key, name in _TYPES.items() if _table(table, key).get("enabled") is True)
    offloads = _table(zero, "offload_optimizer").get("device") == "cpu"
    return Configuration(
        source=SOURCE,
        data=_data(table),
        zero=stage(SOURCE, number(SOURCE, zero, "stage")),
        tensor=degree(SOURCE, _table(table, "tensor_parallel"), "autotp_size"),
        context=degree(SOURCE, table, "sequence_parallel_size"),
        context_scheme="ulysses",
        batch=number(SOURCE, table, "train_batch_size"),
        micro_batches=number(SOURCE, table, "gradient_accumulation_steps"),
        dtype=next(types, None),
        reduce=_sums(table),
        optimizer=OPTIMIZERS.get(kind),
        offload="optimizer" if offloads else None,
        lost=tuple(lost),
    )


def _data(table: Mapping[str, Any]) -> int | None:
    """Devices that split the batch, where all three sizes are given."""
    batch = number(SOURCE, table, "train_batch_size")
    micro = number(SOURCE, table, "train_micro_batch_size_per_gpu")
    count = number(SOURCE, table, "gradient_accumulation_steps")
    if not (batch and micro and count):
        return None
    if batch % (micro * count):
        raise UsageError(
            f"{SOURCE}: train_batch_size {batch} is not {micro} x {count} x a number of devices"
        )
    return batch // (micro * count)


def _sums(table: Mapping[str, Any]) -> str | None:
    """The type in which gradients travel and are added up, if the file tells one."""
    told = table.get("communication_data_type")
    told = _table(table, "data_types").get("grad_accum_dtype") if told is None else told
    if told is None:
        return None
    if told not in _SUMS:
        raise UsageError(unknown("communication_data_type", str(told), _SUMS))
    return _SUMS[str(told)]


_SUMS = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16"}
_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{SOURCE}: {name} is no object")
    return table
