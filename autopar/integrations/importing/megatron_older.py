"""Arguments of earlier Megatron-LM and of Megatron-DeepSpeed in the words of the present one.

Names are those of deepspeedai/Megatron-DeepSpeed (megatron/arguments.py), which was parted from
Megatron-LM's 2023 version.
"""

from __future__ import annotations

from collections.abc import Mapping

_RENAMED = {
    "model-parallel-size": "tensor-model-parallel-size",
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "ds-sequence-parallel-size": "context-parallel-size",
}
_RECOMPUTES = ("checkpoint-activations", "activations-checkpoint-method")
ZERO = "zero-stage"
OLDER = frozenset({*_RENAMED, *_RECOMPUTES, ZERO, "no-pipeline-parallel"})
"""Arguments of theirs that bear on a plan."""


def modern(options: Mapping[str, str]) -> dict[str, str]:
    """The options, by the present names where these do not say the same already.

    >>> modern({"model-parallel-size": "8", "checkpoint-activations": ""})
    {'tensor-model-parallel-size': '8', 'recompute-granularity': 'full'}
    """
    made = {name: value for name, value in options.items() if name not in OLDER or name == ZERO}
    for older, name in _RENAMED.items():
        if older in options:
            made.setdefault(name, options[older])
    if options.get("ds-sequence-parallel-size", "1") != "1":
        # DeepSpeed's sequence parallelism is Ulysses.
        made.setdefault("cp-comm-type", "a2a")
    if any(name in options for name in _RECOMPUTES):
        made.setdefault("recompute-granularity", "full")
    if made.get("num-experts") == "1":
        # Their number for a layer without experts.
        del made["num-experts"]
    return made
