"""A recipe of Megatron-Bridge: a function that returns a `ConfigContainer`.

Its fields are those of Megatron-LM's arguments (NVIDIA-NeMo/Megatron-Bridge@067f987df0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from autopar.errors import UsageError
from autopar.integrations.convert.precisions import WORDS

from .configuration import Configuration
from .megatron import KNOWN, configuration_of
from .megatron_framework import READ
from .python import Record, Unread, Value, configured, is_plain, named_unread

SOURCE = "megatron-bridge"
COMMON: Mapping[str, Mapping[str, int]] = {
    "_pretrain_common": {"global-batch-size": 32, "micro-batch-size": 2, "seq-length": 4096},
    "_sft_common": {"global-batch-size": 128, "micro-batch-size": 1, "seq-length": 2048},
    "_peft_common": {"global-batch-size": 128, "micro-batch-size": 1, "seq-length": 2048},
}
"""The functions that recipes begin with, and the values there that a layout rests on."""
SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap", "dist", "dataset")
RENAMED = {"virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank"}
"""Fields that have another name than the argument."""
TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "bf16_mixed": {"bf16": ""},
    "fp16_mixed": {"fp16": ""},
    "bf16_with_fp8_delayed_scaling_mixed": {
        "bf16": "",
        "fp8-format": "hybrid",
        "fp8-recipe": "delayed",
    },
    **{words.bridge: {"bf16": "", **words.megatron} for words in WORDS.values()},
}
"""The arguments of each name of `mixed_precision`."""
USUAL = "bf16_mixed"
"""The precision that recipes begin with."""
GETTER = "get_mixed_precision_config"
BENCHMARK = "_perf_precision"
BENCHMARKED = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""The precision for each word that the recipes of benchmarks give `_perf_precision`."""
LAYOUT = "pipeline_model_parallel_layout"
UNSURE = {LAYOUT: "layers are dealt out evenly", "seq_length": "the length is the model's"}
"""Fields that are left out where they do not show, and what that means."""
_FORMATS = (("fp8", "fp8-format"), ("fp8_recipe", "fp8-recipe"), ("fp4", "fp4-format"))
_RANKS = re.compile(r"_(\d+)gpu_")


def read_recipe(path: Path, text: str, given: Mapping[str, str]) -> Configuration:
    """The configuration that a recipe of the file returns."""
    read = configured(path, text, given, closed=("_mixed", GETTER, BENCHMARK))
    record = read.record
    if record.hides or not (record.name == "ConfigContainer" or record.name in COMMON):
        raise UsageError(
            f"{SOURCE}: {record.path}, line {record.line}: what {record.made}(...) gives does not "
            "show: give the file in its own folders, so that what it imports is read, too"
        )
    lost = [f"{call} is not read, and may set more" for call in read.calls]
    options: dict[str, str] = {
        name: str(value) for name, value in COMMON.get(record.name, {}).items()
    }
    for name in SECTIONS:
        options |= dict(_options(record.record(name), lost))
    options |= _precision(record)
    options |= _distributed(record)
    # Recipes carry the number of devices in their names, and nowhere else.
    if (ranks := _RANKS.search(read.function)) and "world-size" not in given:
        options["world-size"] = ranks[1]
    options |= {name: value for name, value in given.items() if name in KNOWN}
    if isinstance(record.fields.get("peft"), Record) or record.name == "_peft_common":
        lost.append("peft: adapters alone are trained there; a plan trains all parameters")
    made = configuration_of(options)
    return replace(made, source=SOURCE, lost=(*made.lost, *lost))


def _options(section: Record, lost: list[str]) -> Iterator[tuple[str, str]]:
    """The arguments of a section's fields."""
    for name, value in section.fields.items():
        argument = RENAMED.get(name, name.replace("_", "-"))
        if argument not in KNOWN | READ:
            continue
        if isinstance(value, Unread) and value.text in TYPES:
            yield argument, TYPES[value.text]
        elif isinstance(value, Unread | Record) and name in UNSURE:
            lost.append(f"line {value.line}: {name} does not show: {UNSURE[name]}")
        elif not is_plain(value):
            raise UsageError(named_unread(SOURCE, name, value))
        elif value is True:
            yield argument, ""
        elif value is not None and value is not False and value != []:
            yield argument, _words(name, value)


def _words(name: str, value: Value) -> str:
    if name == LAYOUT and not isinstance(value, str):
        return _letters(value)
    parts = value if isinstance(value, list) else [value]
    return " ".join(map(str, parts))


def _letters(value: Value) -> str:
    """A layout of lists of words as letters, by stages."""
    stages = value if isinstance(value, list) else [value]
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    made = []
    for stage in stages:
        words = stage if isinstance(stage, list) else [stage]
        unknown = [word for word in words if word not in letters]
        if unknown:
            raise UsageError(f"{SOURCE}: {unknown[0]!r} is no part of a layout: {list(letters)}")
        made.append("".join(letters[str(word)] for word in words))
    return "|".join(made)


def _precision(record: Record) -> dict[str, str]:
    """The arguments of `mixed_precision`: a name, a call of that name, or an object's fields."""
    value = record.fields.get("mixed_precision", USUAL)
    name = value
    fields: Mapping[str, Value] = {}
    if isinstance(value, Record):
        name = value.name
        fields = value.fields
        if name == "MixedPrecisionConfig":
            return _of_fields(fields)
        given = value.arguments[0] if value.arguments else None
        if name == BENCHMARK:
            name = BENCHMARKED.get(str(given), given)
        elif name == "mixed_precision" or (name == GETTER and isinstance(given, Record)):
            name = USUAL
        elif name == GETTER:
            name = given
    if not isinstance(name, str) or name not in PRECISIONS:
        shown = named_unread(SOURCE, "mixed_precision", value)
        raise UsageError(f"{shown}: it must be one of {', '.join(PRECISIONS)}")
    options = dict(PRECISIONS[name])
    return {**options, **_of_fields(fields)} if fields else options


def _of_fields(fields: Mapping[str, Value]) -> dict[str, str]:
    """The arguments that fields of a precision set."""
    options: dict[str, str] = {}
    for name, argument in _FORMATS:
        value = fields.get(name)
        if isinstance(value, str):
            options[argument] = value
    for name in ("bf16", "fp16"):
        if fields.get(name) is True:
            options[name] = ""
    if fields.get("grad_reduce_in_fp32") is False:
        options["grad-reduce-in-bf16"] = ""
    if fields.get("fp8_param_gather") is True or fields.get("fp8_param") is True:
        options["fp8-param-gather"] = ""
    return options


def _distributed(record: Record) -> dict[str, str]:
    """The arguments of the optimizer and its state: distributed unless both sections deny it."""
    optimizer = record.fields.get("optimizer")
    options: dict[str, str] = {}
    said = [
        record.record(name).fields.get("use_distributed_optimizer") for name in ("ddp", "optimizer")
    ]
    if True in said or False not in said:
        options["use-distributed-optimizer"] = ""
    if isinstance(optimizer, Record) and "muon" in optimizer.name:
        options["optimizer"] = "muon"
    return options
