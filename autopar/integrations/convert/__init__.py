"""Plans as the configurations of other projects.

Each target names the parts of a plan that it cannot express.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.costmodel.frameworks import VERSIONS, target_named
from autopar.errors import UsageError, unknown
from autopar.plan import Plan

from .accelerate import REACH as ACCELERATE
from .accelerate import accelerate
from .deepspeed import REACH as DEEPSPEED
from .deepspeed import deepspeed
from .dtensor import REACH as DTENSOR
from .dtensor import dtensor
from .fsdp2 import REACH as FSDP2
from .fsdp2 import fsdp2
from .megatron import REACH as MEGATRON
from .megatron import megatron
from .megatron_bridge import REACH as MEGATRON_BRIDGE
from .megatron_bridge import config_container
from .pipelining import REACH as PIPELINING
from .pipelining import pipelining
from .precisions import unsaid
from .reach import FOLDED, KINDS, REPLICAS, WEIGHTS, Reach
from .setup import Converted, Setup, setup_of
from .torchtitan import REACH as TORCHTITAN
from .torchtitan import torchtitan
from .transformers import REACH as TRANSFORMERS
from .transformers import distributed_config

__all__ = [
    "FOLDED",
    "KINDS",
    "REACHES",
    "REPLICAS",
    "TARGETS",
    "WEIGHTS",
    "Converted",
    "Reach",
    "Setup",
    "convert",
    "setup_of",
]

TARGETS = {
    "dtensor": dtensor,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "megatron-bridge": config_container,
    "deepspeed": deepspeed,
    "fsdp2": fsdp2,
    "pipelining": pipelining,
    "transformers": distributed_config,
    "accelerate": accelerate,
}
"""The writers of a plan's setup, by target.

Each raises a `UsageError` that names what the target lacks.
"""

REACHES = {
    "dtensor": DTENSOR,
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "megatron-bridge": MEGATRON_BRIDGE,
    "deepspeed": DEEPSPEED,
    "fsdp2": FSDP2,
    "pipelining": PIPELINING,
    "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE,
}
"""The plans that each target can say; a plan has to lie in one of the parts."""


def convert(plan: Plan, to: str, version: str | None = None) -> Converted:
    """The plan in the format of the target `to`, with sentences on the parts left out.

    `to`: with the target's version (`torchtitan@0.2`) or without. `version`: the same, apart.
    """
    name, _, said = to.partition("@")
    if name not in TARGETS:
        raise UsageError(unknown("target", name, TARGETS))
    if said:
        target_named(to)
    present = next(iter(VERSIONS[name]))
    version = version if version is not None or said == present else said or None
    setup = setup_of(plan)
    setup = replace(setup, lost=(*setup.lost, *unsaid(plan, name)))
    if version is None:
        return TARGETS[name](setup)
    if name == "torchtitan":
        return torchtitan(setup, version)
    if version not in VERSIONS[name]:
        raise UsageError(f"{name} has one format: --version is for torchtitan")
    later = f"the file is as {name} {present} reads it, not {version}"
    return TARGETS[name](replace(setup, lost=(*setup.lost, later)))
