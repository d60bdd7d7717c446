"""Targets: the projects that run a plan, by version, each with the framework that prices it."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import UsageError, unknown

from .framework import OWN, Framework
from .table import framework_named

_FSDP = {"2.11": "torchtitan-2026.03"}
"""FSDP2 of torch, which torchtitan runs, too."""
VERSIONS: Mapping[str, Mapping[str, str]] = {
    OWN: {"": OWN},
    "megatron": {
        "core": "megatron-core overlapped",
        "2022": "megatron-2022",
        "2021": "megatron-2021",
    },
    "megatron-bridge": {"0.6": "megatron-bridge"},
    "torchtitan": {
        "main": "torchtitan-2026.03",
        "0.3": "torchtitan-2026.03",
        "0.2": "torchtitan-2025.06",
    },
    "fsdp2": _FSDP,
    "accelerate": _FSDP,
    "transformers": _FSDP,
    "deepspeed": {"0.18": "deepspeed zero-1"},
    # What a script does around these calls of torch is not known: it has the habits of most.
    "dtensor": {"2.11": "neutral"},
    "pipelining": {"2.11": "neutral"},
}
"""The framework of each version of a target whose habits were read; the first is the default."""


def target_named(text: str) -> tuple[str, str]:
    """The name of a target and its version, "" for the default.

    >>> target_named("torchtitan@0.2"), target_named("megatron")
    (('torchtitan', '0.2'), ('megatron', ''))
    """
    name, at, version = text.partition("@")
    if name not in VERSIONS:
        raise UsageError(unknown("target", name, VERSIONS))
    if at and version not in VERSIONS[name]:
        raise UsageError(unknown(f"version of {name}", version, VERSIONS[name]))
    return name, version


def framework_of(target: str, zero: int | None = None) -> Framework:
    """The framework of a target, with or without its version.

    `zero`: the stage of ZeRO, if it is known.
    """
    name, version = target_named(target)
    of_version = VERSIONS[name]
    known = of_version[version] if version else next(iter(of_version.values()))
    # What reductions run under is a default of the stage (runtime/zero/config.py, overlap_comm).
    if name == "deepspeed" and zero == 3:
        known = "deepspeed zero-3"
    return framework_named(known)
