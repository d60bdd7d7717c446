"""The arguments of Megatron-LM's training scripts, from a shell script or a list of one a line."""

from __future__ import annotations

import re
import shlex

from ..errors import UsageError
from .configuration import Configuration, degree, left_out, number

SOURCE = "megatron"
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
_KNOWN = {
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size", "micro-batch-size",
    "global-batch-size", "seq-length", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "optimizer",
    "sequence-parallel", "use-distributed-optimizer", "use-torch-fsdp2", "overlap-grad-reduce", "overlap-param-gather", "bf16", "fp16",
    "recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations", "optimizer-cpu-offload", "world-size",
    "data-parallel-sharding-strategy", "use-custom-fsdp", "use-megatron-fsdp", "num-layers",
    "no-gradient-accumulation-fusion", "ckpt-format",
}  # fmt: skip
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read_megatron(text: str) -> Configuration:
    """The configuration in a text of arguments; text before the first argument is ignored."""
    found = arguments(text)
    lost: list[str] = left_out({f"--{name}" for name in found if name not in _KNOWN})
    tensor, stages, context, expert = (
        degree(SOURCE, found, f"{name}-parallel-size") for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    world = number(SOURCE, found, "world-size")
    micro, batch = degree(SOURCE, found, "micro-batch-size"), number(SOURCE, found, "global-batch-size")
    data = None
    if world is not None:
        if world % (tensor * stages * context):
            raise UsageError(f"{SOURCE}: {world} ranks do not make groups of {tensor} x {stages} x {context}")
        data = world // (tensor * stages * context)
    optimizer = str(found.get("optimizer", "adam"))
    lost += left_out([f"--optimizer {optimizer}"]) if optimizer not in OPTIMIZERS else []
    interleave = _chunks(found, stages, lost)
    return Configuration(
        source=SOURCE, data=data, zero=_zero(found), tensor=tensor, sequence_parallel="sequence-parallel" in found, context=context,
        expert=expert, stages=stages, schedule=None if stages == 1 else "interleaved" if interleave > 1 else "1f1b", interleave=interleave,
        batch=batch, sequence=number(SOURCE, found, "seq-length"), recompute=_recompute(found),
        dtype="bfloat16" if "bf16" in found else "float16" if "fp16" in found else None, optimizer=OPTIMIZERS.get(optimizer),
        offload="optimizer" if "optimizer-cpu-offload" in found else None, micro_batch=micro, lost=tuple(lost),
    )  # fmt: skip


def arguments(text: str) -> dict[str, str]:
    r"""Options by name, without their dashes; a flag's value is "".

    >>> arguments("torchrun x.py \\\n --bf16 --seq-length 2048 --optimizer=adam # why")
    {'bf16': '', 'seq-length': '2048', 'optimizer': 'adam'}
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"{SOURCE}: the arguments cannot be read: {error}") from error
    found: dict[str, str] = {}
    last = ""
    for word in words:
        match = re.fullmatch(r"--([a-z0-9][a-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
        if match:
            last = match[1]
            found[last] = match[2] or ""
        elif last and not found[last]:
            found[last] = word
    return found


def _zero(found: dict[str, str]) -> int:
    if "use-torch-fsdp2" in found:
        return 3
    if {"use-custom-fsdp", "use-megatron-fsdp"} & set(found):
        named = found.get("data-parallel-sharding-strategy", "no_shard")
        if named not in _SHARDING:
            raise UsageError(f"{SOURCE}: --data-parallel-sharding-strategy {named} is none of {', '.join(_SHARDING)}")
        return _SHARDING[named]
    return 1 if "use-distributed-optimizer" in found else 0


def _chunks(found: dict[str, str], stages: int, lost: list[str]) -> int:
    """Chunks of the model that a stage holds."""
    virtual = number(SOURCE, found, "num-virtual-stages-per-pipeline-rank")
    if virtual is not None or "num-layers-per-virtual-pipeline-stage" not in found or stages == 1:
        return virtual or 1
    each, layers = degree(SOURCE, found, "num-layers-per-virtual-pipeline-stage"), number(SOURCE, found, "num-layers")
    if layers is None:
        lost.append("--num-layers-per-virtual-pipeline-stage without --num-layers: the chunks of a stage are searched")
        return 1
    if each < 1 or layers % (stages * each):
        raise UsageError(f"{SOURCE}: {layers} layers do not make {stages} stages of chunks of {each}")
    return layers // (stages * each)


def _recompute(found: dict[str, str]) -> str:
    granularity = found.get("recompute-granularity", "")
    if granularity not in ("", "full", "selective"):
        raise UsageError(f"{SOURCE}: --recompute-granularity {granularity} is neither full nor selective")
    return granularity or ("selective" if "recompute-activations" in found else "none")
