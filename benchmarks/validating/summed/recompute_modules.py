"""Modules of a layer that selective recompute names, and their operators.

Source: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_config.py
(recompute_modules) and tensor_parallel/random.py (CheckpointWithoutOutput).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Operators of a layer that are recomputed together, by the beginnings of their names.

    `discards`: their results are given up after use and made again where they are read; the others
    save what goes into the module, and results where a reader does.
    """

    names: tuple[str, ...]
    discards: bool = False


LAYER = re.compile(r"(?:layers\.\d+|mtp\.\d+\.layer\d*)\.")
"""The beginning of an operator's name: its layer, also one that predicts a further token."""
MODULES: Mapping[str, Module] = {
    "core_attn": Module(names=("attention.core",)),
    "layernorm": Module(names=("norm1", "norm2"), discards=True),
    "mla_up_proj": Module(
        names=tuple(
            f"attention.{name}"
            for name in (
                "q_norm",
                "query",
                "q_view",
                "kv_norm",
                "kv_up",
                "kv_view",
                "up",
                "rotate",
                "rope_view",
                "spread",
                "keys",
                "transpose",
            )
        ),
        discards=True,
    ),
    "mlp": Module(names=("mlp.",)),
    "moe": Module(names=("experts",)),
    # The calls between the products of experts, which are no operators of their own here.
    "moe_act": Module(names=(), discards=True),
    "shared_experts": Module(names=("experts.shared.",)),
}
"""By their names in Megatron-Core (--recompute-modules)."""


def has_operator(module: str, operator: str) -> bool:
    """Whether a module has an operator, by its name behind that of its layer."""
    own = LAYER.match(operator)
    return own is not None and operator[own.end() :].startswith(MODULES[module].names)
