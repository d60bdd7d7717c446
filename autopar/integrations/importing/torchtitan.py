"""The configuration of torchtitan (TOML).

The sections `training`, `parallelism` and `activation_checkpoint` are read, and the degrees that
files of 2024 have in `training` and `experimental`.

The order of its devices from the outside in: pipeline, replicate, shard, context, tensor; experts
borrow from shard and context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError, unknown
from autopar.integrations.convert.precisions import WORDS
from autopar.order import schedules

from .configuration import Configuration, degree, left_out, number

SOURCE = "torchtitan"
SCHEDULES = {
    name.lower(): row
    for row in schedules.SCHEDULES.values()
    for name in (row.other_names.torchtitan, *row.other_names.torchtitan_alike)
    if name
}
"""Schedules by torchtitan's name in lower case."""
MODES = {"none": "none", "selective": "alternate", "full": "full", "memory_budget": None}
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "muon": "muon"}
CONVERTERS: Mapping[str, str] = {
    written: name
    for name, words in WORDS.items()
    if words.titan
    for written in (words.titan, words.titan.rpartition(".")[2])
}
"""Our recipe for each converter, by its full name and the short one of earlier versions."""
_TRAINING = {
    "local_batch_size",
    "global_batch_size",
    "seq_len",
    "mixed_precision_param",
    "mixed_precision_reduce",
    "dtype",
    "steps",
    "max_norm",
    "dataset",
    "dataset_path",
    "deterministic",
    "seed",
    "gc_freq",
    "gc_debug",
    "batch_size",
}
_COUNT = "pipeline_parallel_microbatches"
"""Micro-batches of a device in files of 2024 and early 2025."""
_PARALLEL = {
    _COUNT,
    "data_parallel_degree",
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_layers_per_stage",
    "context_parallel_rotate_method",
    "disable_loss_parallel",
    "enable_async_tensor_parallel",
    "enable_compiled_autograd",
}


def read_torchtitan(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a parsed file."""
    names = ("training", "parallelism", "activation_checkpoint", "optimizer", "model")
    training, parallel, checkpoint, optimizer, model = (_table(data, name) for name in names)
    parallel = {**_earlier(training, _table(data, "experimental")), **parallel}
    training = {key: value for key, value in training.items() if key not in parallel}
    lost = left_out(set(training) - _TRAINING, " of [training]")
    lost += left_out(set(parallel) - _PARALLEL, " of [parallelism]")
    lost += _inexact(parallel)
    precision = _precision(data, model, lost)
    tensor = degree(SOURCE, parallel, "tensor_parallel_degree")
    experts = degree(SOURCE, parallel, "expert_parallel_degree")
    stages = degree(SOURCE, parallel, "pipeline_parallel_degree")
    shards = _shards(parallel)
    replicas = degree(SOURCE, parallel, "data_parallel_replicate_degree")
    schedule, interleave = _schedule(parallel) if stages > 1 else (None, 1)
    batch, local, micro = _batches(training, parallel, stages)
    return Configuration(
        source=SOURCE,
        data=None if shards is None else replicas * (shards or 1),
        shards=shards,
        zero=_zero(parallel, shards, stages, lost),
        tensor=tensor,
        sequence_parallel=tensor > 1,
        context=degree(SOURCE, parallel, "context_parallel_degree"),
        expert=experts,
        # Experts lie on the ranks that split weights, too, unless a file of before says otherwise.
        expert_tensor=degree(SOURCE, parallel, "expert_tensor_parallel_degree")
        if experts > 1
        else None,
        stages=stages,
        schedule=schedule,
        interleave=interleave,
        batch=batch,
        sequence=number(SOURCE, training, "seq_len"),
        micro_batch=micro,
        local_batch=local,
        recompute=_mode(checkpoint, lost),
        dtype=_text(training.get("mixed_precision_param", training.get("dtype"))),
        master=_text(training.get("dtype")),
        precision=precision,
        # Its default, of which no plan is told unless the parameters have another type.
        reduce=_text(
            training.get("mixed_precision_reduce", "float32" if "dtype" in training else None)
        ),
        optimizer=_optimizer(optimizer, lost),
        lost=tuple(lost),
    )


def _earlier(training: Mapping[str, Any], experimental: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees that files of before [parallelism] have, in 2024 and early 2025."""
    tables = {**experimental, **training}
    degrees = {key: value for key, value in tables.items() if key in _PARALLEL}
    if "data_parallel_degree" in degrees:
        degrees.setdefault("data_parallel_shard_degree", degrees["data_parallel_degree"])
    return degrees


def _precision(data: Mapping[str, Any], model: Mapping[str, Any], lost: list[str]) -> str | None:
    """The recipe of the converter of linear products; others go to `lost`."""
    named = model.get("converters", ())
    converters = [named] if isinstance(named, str) else list(named)
    precision = None
    for converter in map(str, converters):
        name = CONVERTERS.get(converter)
        section = _section(data, WORDS[name].titan if name else converter)
        recipe = _text(section.get("recipe_name"))
        if name is None or recipe not in (None, *WORDS[name].recipes):
            lost += left_out({f"converter {converter}" + (f" ({recipe})" if recipe else "")})
            continue
        precision = name
        if any(section.get(option) is not True for option in WORDS[name].gathers):
            lost.append(
                f"converter {converter} without {' and '.join(WORDS[name].gathers)}: plans gather "
                "narrow copies of weights, with scales of one message"
            )
    return precision


def _section(data: Mapping[str, Any], converter: str) -> Mapping[str, Any]:
    """The section of a converter."""
    table: Any = data
    for part in converter.split("."):
        table = table.get(part, {}) if isinstance(table, Mapping) else {}
    return table if isinstance(table, Mapping) else {}


def _shards(parallel: Mapping[str, Any]) -> int | None:
    """Devices over which parameters are stored split; None: all that split the batch (-1)."""
    shards = number(SOURCE, parallel, "data_parallel_shard_degree", -1)
    return None if shards is None or shards < 0 else shards


def _inexact(parallel: Mapping[str, Any]) -> list[str]:
    """Sentences on degrees that no plan can have."""
    lost = []
    replicas = degree(SOURCE, parallel, "data_parallel_replicate_degree")
    if replicas > 1 and _shards(parallel) is None:
        lost.append(
            "data_parallel_replicate_degree beside all other devices as shards: parameters are "
            "stored split over all of them"
        )
    return lost


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{SOURCE}: [{name}] is no table")
    return table


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _zero(parallel: Mapping[str, Any], shards: int | None, stages: int, lost: list[str]) -> int:
    """The ZeRO stage of the policy.

    By default the backward pass gathers parameters again unless in a pipeline, whose stages gather
    theirs once a step. Torch's pipelines sum whole gradients and reduce them once a step.
    """
    if shards == 1:
        return 0
    policy = parallel.get("fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        raise UsageError(
            f"{SOURCE}: "
            + unknown("fsdp_reshard_after_forward", policy, ("default", "always", "never"))
        )
    if policy == "default":
        policy = "always" if stages == 1 else "never"
    if stages > 1 and policy == "always":
        lost.append(
            "fsdp_reshard_after_forward = always beside stages: gradients are reduced at every "
            "micro-batch, and not once a step"
        )
    if policy == "always":
        return 3
    return 2 if stages == 1 else 1


def _schedule(parallel: Mapping[str, Any]) -> tuple[str, int]:
    value = str(parallel.get("pipeline_parallel_schedule", "1F1B"))
    if value.lower() not in SCHEDULES:
        raise UsageError(f"{SOURCE}: " + unknown("pipeline schedule", value, SCHEDULES))
    row = SCHEDULES[value.lower()]
    return row.name, min(row.chunks, default=1)


def _batches(
    training: Mapping[str, Any], parallel: Mapping[str, Any], stages: int
) -> tuple[int | None, int | None, int | None]:
    """The global batch if it is given, the batch of a device, and that of a micro-batch.

    A device's batch is what it computes before its gradients are reduced.
    """
    whole = number(SOURCE, training, "global_batch_size", -1)
    local = number(SOURCE, training, "local_batch_size")
    if local is None:
        local = number(SOURCE, training, "batch_size")  # its name in earlier versions
    small = local
    if stages > 1:
        small = degree(SOURCE, parallel, "pipeline_parallel_microbatch_size")
        count = number(SOURCE, parallel, _COUNT)
        if local is not None and count:
            small = local // count if local % count == 0 else 0
    if local is not None and small is not None and (small < 1 or local % small):
        size = small or "equal size"
        raise UsageError(
            f"{SOURCE}: a local batch of {local} is not made of micro-batches of {size}"
        )
    if whole is not None and whole <= 0:
        whole = None
    return whole, local, small


def _mode(checkpoint: Mapping[str, Any], lost: list[str]) -> str | None:
    value = str(checkpoint.get("mode", "none"))
    if value not in MODES:
        raise UsageError(f"{SOURCE}: " + unknown("activation_checkpoint mode", value, MODES))
    if MODES[value] is None:
        lost.append(f"activation_checkpoint mode {value}: what is recomputed is searched")
    return MODES[value]


def _optimizer(table: Mapping[str, Any], lost: list[str]) -> str | None:
    value = str(table.get("name", "AdamW"))
    if value.lower() not in OPTIMIZERS:
        lost.extend(left_out([f"optimizer {value}"]))
        return None
    return OPTIMIZERS[value.lower()]
