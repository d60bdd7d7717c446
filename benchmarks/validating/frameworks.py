"""The frameworks of published runs, as the cost model describes them, and their recipes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.costmodel.frameworks import Framework, framework_named

from .missing import Missing
from .sizes import DATA, Row, number

NEUTRAL = "neutral"
"""The framework of rows whose own was not read; their facts say that it is open."""
# By the words of a row, the first that fits.
NAMED: Sequence[tuple[str, str]] = (
    (r"Megatron-LM 2021 \+ DeepSpeed ZeRO-3", "megatron-2021 zero-3"),
    (r"\bBLOOM\b", "megatron-deepspeed bloom"),
    (r"Megatron-DeepSpeed|MT-NLG|Megatron-Turing|vTrain", "megatron-deepspeed"),
    (r"Megatron-Bridge", "megatron-bridge"),
    (r"MoE.?(Model)?Zoo|Megatron.*\bMoE\b", "moe zoo"),
    (r"Aleph ?Alpha|Aleph-Alpha", "scaling"),
    (r"AutoModel", "automodel"),
    (r"MaxText", "maxtext"),
    (r"nanotron", "nanotron"),
    (r"LiBai|OneFlow", "libai"),
    (r"\bAlpa\b|Parax", "alpa"),
    (r"Mist\b", "mist"),
    (r"FSDP \+ compile|fms-fsdp", "fms-fsdp"),
    (r"^Meta\b|^Llama.3|Meta.s? internal|\bherd\b", "llama-3"),
    (r"Megatron-Core|MCore", "megatron-core"),
    (r"DeepSpeed.*(ZeRO-?3|zero.?3)", "deepspeed zero-3"),
    (r"DeepSpeed", "deepspeed zero-1"),
)
DATED: Mapping[str, Sequence[tuple[float, str]]] = {
    "torchtitan": (
        (2024.5, "torchtitan-2024.12"),
        (2025.25, "torchtitan-2025.06"),
        (2026.0, "torchtitan-2026.03"),
    ),
    "NeMo": ((2024.0, "nemo-2024.03"), (2024.25, "nemo-2024.07"), (2025.0, "megatron-bridge")),
    "Megatron-LM": (
        (2019.0, "megatron-2021"),
        (2022.0, "megatron-2022"),
        (2023.0, "megatron-core"),
    ),
    "llm-foundry|Composer": ((2023.0, "llm-foundry-2023.05"), (2023.75, "llm-foundry-2023.10")),
}
"""Frameworks that changed, with the year from which each description holds."""
SWEPT = 128
"""Devices from which on H100 runs of llm-foundry are those of its sweep of January 2024."""
SWEPT_IN_TRITON = ("MPT-13b", "MPT-30b")
"""Models to which that sweep gives the attention written in Triton (benchmarking/sweep.py)."""
YEAR = re.compile(r"\b(?:20)?(2\d)(?:[.-](\d\d))?\b")
UNDATED: Mapping[str, str] = {"Megatron-LM": "megatron-2022"}
"""Descriptions of those that a row does not date; otherwise the latest."""

# Kernels of attention, by the words that a row uses; where it uses none, the framework's own.
ATTENTION: Sequence[tuple[str, str]] = (
    ("flash_attentionv1|flash.?(attention)?.?v?1", "flash1"),
    ("triton", "triton"),
    ("flash.?(attention)?.?v?3|fa3", "flash3"),
    ("cudnn|te fused|transformer engine", "cudnn"),
    ("flash.?(attention)?.?v?2|fa2|sdpa|xformers", "flash2"),
    # Scale, mask and softmax in Megatron's one kernel; XLA fuses them as well.
    ("^unfused$|^fused$|^fused softmax", "fused"),
    ("^torch$|^eager$|^naive$", "unfused"),
)
OWN_FLASH = ("flash", "flash attention", "flashattention", "splash", "pallas")
"""Words for the framework's own kernel."""


def attention_of(text: str) -> str:
    """The kernel of attention that a row names, or none.

    >>> attention_of("SDPA flash2"), attention_of("flash"), attention_of("unfused")
    ('flash2', '', 'fused')
    """
    words = text.lower().partition("(")[0].strip()
    if not words or words in OWN_FLASH:
        return ""
    for pattern, kernel in ATTENTION:
        if re.search(pattern, words):
            return kernel
    raise Missing(f"attn_impl not described: {text}")


def framework_of(name: str, *, compiled: bool = False, precision: str = "") -> Framework:
    """The framework that a row names."""
    known = described(name, precision)
    return framework_named(
        f"{known} compiled" if compiled and known.startswith("torchtitan") else known
    )


def framework_of_row(row: Row, *, compiled: bool) -> Framework:
    """The framework of a row, of which its devices and its model may say when it ran."""
    name = row["framework"]
    large = row["gpu"].startswith("H100") and number(row, "gpus") >= SWEPT
    if large and described(name).startswith("llm-foundry") and row["model"] not in SWEPT_IN_TRITON:
        return framework_named("llm-foundry-2024.01")
    return framework_of(name, compiled=compiled, precision=row["precision"])


def described(name: str, precision: str = "") -> str:
    """The name of the description of the framework that a row names.

    >>> described("torchtitan 2025-06 (Trainy)"), described("Megatron-LM 2021"), described("ours")
    ('torchtitan-2025.06', 'megatron-2021', 'neutral')
    """
    for words, known in NAMED:
        if re.search(words, name, re.IGNORECASE):
            return known
    for words, versions in DATED.items():
        if re.search(words, name, re.IGNORECASE):
            return _of_its_time(words, versions, name, precision)
    if not name.strip():
        raise Missing("not given: framework")
    return NEUTRAL


def _of_its_time(
    words: str, versions: Sequence[tuple[float, str]], name: str, precision: str
) -> str:
    date = YEAR.search(name)
    if "llm-foundry" in words:  # the tables of one precision are of one date
        return versions[precision != "bf16"][1]
    if date is None:
        return UNDATED.get(words, versions[-1][1])
    # The middle of a year where its month is not given.
    when = 2000 + int(date[1]) + (int(date[2]) - 1 if date[2] else 6) / 12
    return next(
        (known for since, known in reversed(versions) if since <= when + 1e-9), versions[0][1]
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
