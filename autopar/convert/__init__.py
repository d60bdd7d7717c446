"""Plans as the configurations of other projects: each target says by name what of a plan it cannot express."""

from __future__ import annotations

from ..errors import UsageError, unknown
from ..plan import Plan
from .deepspeed import deepspeed
from .dtensor import dtensor
from .fsdp2 import fsdp2
from .huggingface import tensor_plan
from .megatron import megatron
from .pipelining import pipelining
from .setup import Converted, Setup, setup_of
from .torchtitan import torchtitan

__all__ = ["TARGETS", "Converted", "Setup", "convert", "setup_of"]

TARGETS = {
    "dtensor": dtensor, "hf-tp-plan": tensor_plan, "torchtitan": torchtitan, "megatron": megatron, "deepspeed": deepspeed, "fsdp2": fsdp2,
    "pipelining": pipelining,
}  # fmt: skip
"""By name: the functions that write a plan's setup for a target, or raise a `UsageError` that names what the target lacks."""


def convert(plan: Plan, to: str) -> Converted:
    """The plan as the target `to` writes it, with sentences on what is left out."""
    if to not in TARGETS:
        raise UsageError(unknown("target", to, TARGETS))
    return TARGETS[to](setup_of(plan))
