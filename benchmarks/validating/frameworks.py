"""The frameworks of published runs, as the cost model describes them, and their recipes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from autopar.costmodel.known.frameworks import Framework, framework_named

from .missing import Missing
from .sizes import DATA

NAMES: Mapping[str, str] = {
    "Megatron-LM 2021": "megatron-2021",
    "Megatron-LM 2021 + DeepSpeed ZeRO-3": "megatron-2021 zero-3",
    "Megatron-LM 2022": "megatron-2022",
    "Megatron-Core r0.8.0": "megatron-core",
    "NeMo 24.03": "nemo-2024.03",
    "NeMo 24.07": "nemo-2024.07",
    "Megatron-DeepSpeed (BLOOM)": "megatron-deepspeed bloom",
    "Aleph Alpha internal (Megatron-style)": "scaling",
    "torchtitan 2024-12": "torchtitan-2024.12",
    "torchtitan 2025-06": "torchtitan-2025.06",
    "torchtitan 2025-06 (Trainy)": "torchtitan-2025.06",
    "PyTorch FSDP + compile": "fms-fsdp",
    "Parax(Alpa) data_parallel": "alpa",
    "Parax(Alpa) zero_2": "alpa",
    "vTrain": "megatron-deepspeed",
}
"""By the word that a row uses."""

# Kernels of attention, by the word that a row uses; where it uses none, the framework's own.
ATTENTION: Mapping[str, str] = {
    "unfused": "fused",  # scale, mask and softmax in Megatron's one kernel; XLA fuses them as well
    "fused": "fused",
    "torch": "unfused",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
    "flash_attention2 + RMS kernel": "flash2",
    "SDPA/flash": "flash2",
    "SDPA flash2": "flash2",
}


def framework_of(name: str, *, compiled: bool = False, precision: str = "") -> Framework:
    """The framework that a row names."""
    if name.startswith("Megatron-Bridge"):
        return framework_named("megatron-bridge")
    if name.startswith("llm-foundry"):  # the tables of one precision are of one date
        return framework_named(
            "llm-foundry-2023.05" if precision == "bf16" else "llm-foundry-2023.10"
        )
    if name not in NAMES:
        raise Missing(f"framework not described: {name or 'none'}")
    known = NAMES[name]
    return framework_named(
        f"{known} compiled" if compiled and known.startswith("torchtitan") else known
    )


@functools.cache
def _recipes() -> list[dict[str, Any]]:
    recipes: list[dict[str, Any]] = json.loads((DATA / "recipes.json").read_text(encoding="utf-8"))[
        "recipes"
    ]
    return recipes


def recipe_of(framework: str, model: str, gpu: str, precision: str) -> Mapping[str, Any]:
    """The choices of a recipe in a Megatron-Bridge container.

    Without the container: the nearest with the same model and precision.
    """
    container = framework.removeprefix("Megatron-Bridge ").partition(" ")[0]
    name = model.partition(" (")[0]
    device = gpu.partition("-")[0]

    def distance(entry: Mapping[str, Any]) -> tuple[bool, bool, float]:
        nearest = min(abs(_version(other) - _version(container)) for other in entry["containers"])
        return entry["gpu"] != device, entry["precision"] != precision, nearest

    own = [entry for entry in _recipes() if entry["model"] == name]
    best = min(own, key=distance, default=None)
    return {} if best is None or distance(best)[0] else best["choices"]


def _version(text: str) -> float:
    year, month, *patch = text.split(".")
    return 12 * int(year) + int(month) + 0.1 * int(patch[0] if patch else 0)
