"""The arguments of Megatron-LM's training scripts: a shell script, a list, or YAML of its tests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import UsageError, unknown
from autopar.integrations.convert.megatron import LAYER_WISE
from autopar.integrations.convert.precisions import WORDS
from autopar.integrations.importing.pipeline_layout import chunks_of
from autopar.planning.model.recompute import MODULES

from .configuration import Configuration, degree, left_out, number, stage
from .megatron_arguments import run_of
from .megatron_framework import MERGED, READ, dispatcher_of, precision_of, schedule_of
from .megatron_older import OLDER, ZERO, modern

SOURCE = "megatron"
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
KNOWN = {
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "micro-batch-size",
    "global-batch-size",
    "seq-length",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "optimizer",
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-torch-fsdp2",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "bf16",
    "fp16",
    "accumulate-allreduce-grads-in-fp32",
    "grad-reduce-in-bf16",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-activations",
    "optimizer-cpu-offload",
    "world-size",
    "data-parallel-sharding-strategy",
    "use-custom-fsdp",
    "use-megatron-fsdp",
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "group-query-attention",
    "ffn-hidden-size",
    "num-experts",
    "no-gradient-accumulation-fusion",
    "ckpt-format",
}
"""Arguments that bear on a plan."""
SIZES: Mapping[str, str] = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "ffn-hidden-size": "ffn",
    "num-experts": "experts",
}
"""Sizes of a model by argument."""
INSIDE = "moe_act"
"""The module of recompute that is inside a layer of experts, which is one operator here."""
TABLE = "MODEL_ARGS"
"""The table of arguments in the YAML of Megatron's own tests."""
_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
# The values of --data-parallel-sharding-strategy, as stages of ZeRO.
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_megatron(text: str, given: Mapping[str, str] | None = None) -> Configuration:
    """The configuration in a script, or a text of arguments.

    `given`: values of variables that the script leaves to its caller, and of its arguments by
    their numbers.
    """
    run = run_of(text, KNOWN | READ | OLDER, given)
    configuration = configuration_of(modern(run.options))
    lost = (*configuration.lost, *run.lost)
    return replace(configuration, lost=lost, launched=run.launched)


def read_table(data: Mapping[str, Any]) -> Configuration:
    """The configuration in a table of arguments, as Megatron's tests have it in YAML."""
    table = data.get(TABLE, data)
    if not isinstance(table, Mapping):
        raise UsageError(f"{SOURCE}: {TABLE} is no table")
    given = {str(name): value for name, value in table.items() if str(name).startswith("--")}
    given = given or _dotted(table)
    if not given:
        raise UsageError(f"{SOURCE}: no argument that begins with -- is in {TABLE}")
    return configuration_of(
        {
            name.removeprefix("--"): "" if value is True else _words(value)
            for name, value in given.items()
            if value is not False
        }
    )


def _dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the fields of NeMo's recipes, such as `model.config.num_layers`."""
    fields = {str(name).rpartition(".")[2]: value for name, value in table.items()}
    names = {name.replace("_", "-"): value for name, value in fields.items()}
    given = {f"--{name}": value for name, value in names.items() if name in KNOWN | READ}
    ranks = [value for key in ("num_nodes", "devices") if isinstance(value := fields.get(key), int)]
    return {**given, "--world-size": math.prod(ranks)} if given and len(ranks) == 2 else given


def _words(value: object) -> str:
    parts = value if isinstance(value, list) else [value]
    # Aliases of YAML may nest without end.
    if not all(isinstance(part, (str, int, float, bool, type(None))) for part in parts):
        raise UsageError(f"{SOURCE}: an argument is a table, or a list of lists")
    text = " ".join(map(str, parts))
    # Lists are written as texts in brackets, too.
    return " ".join(text[1:-1].replace(",", " ").split()) if re.fullmatch(r"\[.*\]", text) else text


def configuration_of(options: Mapping[str, str]) -> Configuration:
    """The configuration of arguments by name."""
    lost: list[str] = left_out(
        {f"--{name}" for name in options if name not in KNOWN | READ | {ZERO}}
    )
    tensor, stages, context, expert = (
        degree(SOURCE, options, f"{name}-parallel-size")
        for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    if expert > 1:
        dispatcher_of(options)
    lost += _of_recipes(options)
    optimizer = str(options.get("optimizer", "adam"))
    if optimizer not in OPTIMIZERS:
        lost += left_out([f"--optimizer {optimizer}"])
    interleave = _chunks(options, stages, lost)
    return Configuration(
        source=SOURCE,
        data=_data(options, tensor * stages * context, f"{tensor} x {stages} x {context}"),
        zero=_zero(options),
        tensor=tensor,
        sequence_parallel="sequence-parallel" in options,
        context=context,
        context_scheme="ulysses" if options.get("cp-comm-type") == "a2a" else "context",
        expert=expert,
        expert_tensor=number(SOURCE, options, "expert-tensor-parallel-size"),
        stages=stages,
        schedule=schedule_of(
            stages, interleave, merged=min(expert, interleave) > 1 and MERGED in options
        ),
        interleave=interleave,
        batch=number(SOURCE, options, "global-batch-size"),
        sequence=number(SOURCE, options, "seq-length"),
        recompute=_recompute(options),
        recompute_modules=_modules(options, lost),
        dtype=next((name for flag, name in _TYPES.items() if flag in options), None),
        precision=precision_of(options),
        reduce=_gradients(options),
        optimizer=OPTIMIZERS.get(optimizer),
        offload="optimizer" if "optimizer-cpu-offload" in options else None,
        micro_batch=degree(SOURCE, options, "micro-batch-size"),
        arguments=options,
        sizes=_sizes(options),
        lost=tuple(lost),
    )


def _gradients(options: Mapping[str, str]) -> str | None:
    """The type in which gradients travel, where that is one of 16 bits."""
    if "bf16" in options:
        return "bfloat16" if "grad-reduce-in-bf16" in options else None
    if "fp16" in options:
        return None if "accumulate-allreduce-grads-in-fp32" in options else "float16"
    return None


def _of_recipes(options: Mapping[str, str]) -> list[str]:
    """Sentences on what plans do otherwise than a recipe of products."""
    lost = []
    recipe = options.get("fp8-recipe", "delayed")
    if "fp8-format" in options and recipe == "delayed":
        lost.append("--fp8-recipe delayed: plans take the scale of a tensor from itself, now")
    words = WORDS.get(precision_of(options) or "")
    if words is None:
        return lost
    narrow = "fp8-param-gather" in options
    if narrow and not words.gather:
        lost.append("--fp8-param-gather: plans gather parameters of this recipe in 16 bits")
    if words.gather and not narrow and "use-distributed-optimizer" in options:
        lost.append(f"no --{words.gather}: plans gather narrow copies of weights")
    return lost


def _sizes(options: Mapping[str, str]) -> Mapping[str, int]:
    """The sizes of the model that the arguments name, by argument."""
    sizes = {name: number(SOURCE, options, name) for name in SIZES}
    return {name: size for name, size in sizes.items() if size is not None}


def _data(options: Mapping[str, str], group: int, words: str) -> int | None:
    """Devices that split the batch: the ranks by those of a group; None without their number."""
    world = number(SOURCE, options, "world-size")
    if world is None:
        return None
    if world % group:
        raise UsageError(f"{SOURCE}: {world} ranks do not make groups of {words}")
    return world // group


def _zero(options: Mapping[str, str]) -> int:
    if ZERO in options:
        return stage(SOURCE, number(SOURCE, options, ZERO))
    if "use-torch-fsdp2" in options:
        return 3
    if {"use-custom-fsdp", "use-megatron-fsdp"} & set(options):
        named = options.get("data-parallel-sharding-strategy", "no_shard")
        if named not in _SHARDING:
            raise UsageError(
                f"{SOURCE}: --data-parallel-sharding-strategy {named} is none of "
                f"{', '.join(_SHARDING)}"
            )
        return _SHARDING[named]
    layer_wise = options.get("optimizer") == LAYER_WISE
    return 1 if layer_wise or "use-distributed-optimizer" in options else 0


def _chunks(options: Mapping[str, str], stages: int, lost: list[str]) -> int:
    """Chunks of the model that a stage holds."""
    if "pipeline-model-parallel-layout" in options:
        chunks = len(chunks_of(options["pipeline-model-parallel-layout"]))
        if chunks % stages:
            raise UsageError(
                f"{SOURCE}: a layout of {chunks} chunks does not go over {stages} stages"
            )
        return chunks // stages
    virtual = number(SOURCE, options, "num-virtual-stages-per-pipeline-rank")
    if virtual is not None or "num-layers-per-virtual-pipeline-stage" not in options or stages == 1:
        return virtual or 1
    each = degree(SOURCE, options, "num-layers-per-virtual-pipeline-stage")
    layers = number(SOURCE, options, "num-layers")
    if layers is None:
        lost.append(
            "--num-layers-per-virtual-pipeline-stage without --num-layers: the chunks of a stage "
            "are searched"
        )
        return 1
    # Both ends may count as layers.
    layers += sum(
        f"account-for-{end}-in-pipeline-split" in options for end in ("embedding", "loss")
    )
    if each < 1 or layers % (stages * each):
        raise UsageError(
            f"{SOURCE}: {layers} layers do not make {stages} stages of chunks of {each}"
        )
    return layers // (stages * each)


def _recompute(options: Mapping[str, str]) -> str:
    granularity = options.get("recompute-granularity", "")
    if granularity not in ("", "full", "selective"):
        raise UsageError(
            f"{SOURCE}: --recompute-granularity {granularity} is neither full nor selective"
        )
    if granularity:
        return granularity
    return "selective" if "recompute-activations" in options else "none"


def _modules(options: Mapping[str, str], lost: list[str]) -> tuple[str, ...]:
    """The modules of selective recompute that a plan has, too; by default attention's core."""
    named = options.get("recompute-modules", "core_attn").split()
    for name in named:
        if name not in (*MODULES, INSIDE):
            raise UsageError(unknown("recompute module", name, (*MODULES, INSIDE)))
    inside = [name for name in named if name == INSIDE]
    if inside:
        lost.append(
            f"--recompute-modules {' '.join(inside)}: a plan makes a layer's products of experts "
            "and the calls between them as one operator"
        )
    return tuple(name for name in named if name != INSIDE)
