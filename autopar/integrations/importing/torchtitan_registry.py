"""The configuration of torchtitan in Python: a function of a model's `config_registry`.

Names are those of pytorch/torchtitan from February 2026 on (9810191bb8, b5bcd76c66): sections are
objects, and since August a micro-batch is counted in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import UsageError

from .configuration import Configuration, left_out
from .python import Configured, Record, configured, is_plain, named_unread
from .torchtitan import SOURCE, read_torchtitan

SECTIONS = ("training", "parallelism")
RECOMPUTES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
"""The classes of `activation_checkpoint`; without one the default is selective."""
CONVERTERS = {
    f"{name}{of}Converter": recipe
    for name, recipe in (("Float8", "fp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"))
    for of in ("Linear", "GroupedExperts")
}
"""Our recipe for each class of converters."""
OPTIMIZERS = {"default_adamw": "AdamW", "default_muon": "Muon"}
_LAYER = re.compile(r"layers\.\d+$")
_TOKENS = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step")
_IGNORED = {
    "disable_cuda_graphs",
    "enable_cpu_offload",
    "spmd_backend",
    "enable_fsdp_symm_mem",
    "context_parallel_load_balancer",
    "context_parallel_ptrr_mask_key",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_schedule_csv",
}
"""Fields without a bearing on the layout."""


def read_registry(path: Path, text: str, given: Mapping[str, str]) -> Configuration:
    """The configuration that a function of the file returns."""
    read = configured(path, text, given, closed=("model_registry",))
    record = read.record
    _require_shown(record)
    if not {*SECTIONS} & {*record.fields}:
        raise UsageError(
            f"{SOURCE}: {record.path}, line {record.line}: {record.made}(...) has no training and "
            "no parallelism of its own"
        )
    data: dict[str, Any] = {name: _section(record, name) for name in SECTIONS}
    parallel = data["parallelism"]
    counts = data["training"]
    offloads = counts.get("enable_cpu_offload") is True
    rows = parallel.pop("enable_sequence_parallel", True)
    layout = parallel.pop("module_fqns_per_model_part", None)
    if any(name in counts for name in _TOKENS):
        data["training"] = _in_samples(counts, parallel, record)
    for table in (data["training"], parallel):
        for name in _IGNORED & set(table):
            del table[name]
    data["activation_checkpoint"] = {"mode": _recompute(record)}
    data["optimizer"] = {"name": _optimizer(record)}
    made = read_torchtitan(data)
    dealt = _dealt(layout, made.stages)
    lost = _losses(read, () if dealt else layout, offloads=offloads)
    return replace(
        made,
        dealt=dealt,
        interleave=len(dealt) // made.stages if dealt else made.interleave,
        precision=_precision(record, lost),
        sequence_parallel=made.sequence_parallel and bool(rows),
        lost=(*made.lost, *lost),
    )


def _dealt(layout: object, stages: int) -> tuple[int, ...]:
    """The number of layers of each chunk; () where they are no lists of modules for each stage."""
    if not isinstance(layout, list) or not layout or len(layout) % stages:
        return ()
    if not all(isinstance(part, list) for part in layout):
        return ()
    return tuple(sum(_LAYER.match(str(name)) is not None for name in part) for part in layout)


def _losses(read: Configured, layout: object, *, offloads: bool) -> list[str]:
    lost = []
    if layout:
        lost.append("module_fqns_per_model_part: layers are cut into stages by the search")
    if offloads:
        lost += left_out(["enable_cpu_offload"])
    return lost + [f"{call} is not read, and may set more" for call in read.calls]


def _require_shown(record: Record) -> None:
    """Refuse a configuration of which nothing shows but what is set afterwards."""
    if record.hides or not record.made.endswith("Config"):
        shown = f"{record.made}(...)"
        raise UsageError(
            f"{SOURCE}: {record.path}, line {record.line}: what {shown} gives does not show: give "
            "the file in its own folders, so that what it imports is read, too"
        )


def _section(record: Record, name: str) -> dict[str, Any]:
    """The fields of a section that bear on the plan, as plain values."""
    value = record.fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Record):
        raise UsageError(named_unread(SOURCE, name, value))
    if name in record.fields and value.made != name:
        _require_shown(value)
    for key, one in value.fields.items():
        if not is_plain(one):
            raise UsageError(named_unread(SOURCE, key, one))
    return {key: one for key, one in value.fields.items() if one is not None}


def _in_samples(
    training: Mapping[str, Any], parallel: dict[str, Any], record: Record
) -> dict[str, Any]:
    """The batch in samples; a micro-batch and a step are counted in tokens there."""
    length = training.get("max_context_length", 2048)
    samples: dict[str, int] = {}
    for name, default in zip(_TOKENS, (16384, -1), strict=True):
        tokens = training.get(name, default)
        if tokens != -1 and (not isinstance(tokens, int) or tokens % length):
            line = record.record("training").line
            raise UsageError(
                f"{SOURCE}: {record.path}, line {line}: {name} is {tokens}, which are no sequences "
                f"of {length}"
            )
        samples[name] = tokens if tokens == -1 else tokens // length
    micro, step = (samples[name] for name in _TOKENS)
    count = parallel.pop("num_pp_microbatches", 1)
    if parallel.get("pipeline_parallel_degree", 1) > 1:
        parallel["pipeline_parallel_microbatches"] = count
        micro *= count
    counted = (*_TOKENS, "max_context_length")
    return {
        **{name: value for name, value in training.items() if name not in counted},
        "local_batch_size": micro,
        "global_batch_size": step,
        "seq_len": length,
    }


def _recompute(record: Record) -> str:
    if "activation_checkpoint" not in record.fields:
        return "selective"
    value = record.fields["activation_checkpoint"]
    if value is None:
        return "none"
    if not isinstance(value, Record):
        raise UsageError(named_unread(SOURCE, "activation_checkpoint", value))
    if value.name in RECOMPUTES:
        return RECOMPUTES[value.name]
    mode = value.fields.get("mode", "selective")
    if not isinstance(mode, str):
        raise UsageError(named_unread(SOURCE, "activation_checkpoint.mode", mode))
    return mode


def _optimizer(record: Record) -> str:
    value = record.fields.get("optimizer")
    if not isinstance(value, Record):
        return "AdamW"
    named = value.fields.get("name")
    return named if isinstance(named, str) else OPTIMIZERS.get(value.name, "AdamW")


def _precision(record: Record, lost: list[str]) -> str | None:
    """The recipe of the converters of products that the model is made with; others go to `lost`."""
    held = record.record("model_spec").fields.get("converters")
    held = record.record("model_converters").fields.get("converters") if held is None else held
    precision = None
    for part in held if isinstance(held, list) else []:
        name = part.name if isinstance(part, Record) else ""
        if name not in CONVERTERS:
            lost += left_out([f"converter {name}"])
            continue
        precision = CONVERTERS[name]
        if isinstance(part, Record) and part.fields.get("fqns") and "Linear" in name:
            lost.append(f"{name} of some layers: all products follow the recipe")
    return precision
