"""The data that a rank adds to a checkpoint, and the manifest that all ranks' data make."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.errors import RunError, UsageError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.agreement import digest

from .compression_leftovers import leftover_tensors
from .manifest import Group, Manifest, Scalar
from .module_state import Tensors, model_tensors, random_states
from .saved_optimizer import groups_of, kind_of, optimizer_tensors


class Positioned(Protocol):
    """An object with a position in the data, such as `autopar.sampler`."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at this position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The data that each rank sends to rank 0."""

    numbers: dict[str, Scalar]
    groups: list[Group]
    manifest: Manifest


def gather_state(
    module: nn.Module,
    optimizer: Optimizer | None,
    step: int,
    sampler: Positioned | None,
    extra: Any,
    keep: int | None,
) -> tuple[Tensors, RankFacts, str | None]:
    """This rank's tensors, its facts, and the plan as text."""
    if step < 0 or (keep is not None and keep < 1):
        raise UsageError(
            f"step is {step} and keep is {keep};"
            " a step is at least 0, and at least 1 checkpoint is kept"
        )
    state = model_tensors(module, writing=True)
    states: tuple[Tensors, dict[str, Scalar]] = ({}, {})
    if optimizer is not None:
        states = optimizer_tensors(optimizer, module)
    plan = module.engine.plan if isinstance(module, ParallelModule) else None
    text = plan.to_json() if plan is not None else None
    model = type(module).__name__
    fingerprint = None
    if isinstance(module, ParallelModule):
        model = module.engine.graph.name
        fingerprint = module.engine.graph.fingerprint()
    position = None
    if sampler is not None:
        position = _plain_data("the sampler's state", sampler.state_dict())
    manifest = Manifest(
        # The version is for people: files are read by their own version number.
        made_by=autopar.__version__,
        step=step,
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        model=model,
        model_fingerprint=fingerprint,
        plan_fingerprint=digest(text).hex() if text is not None else None,
        plan=str(plan) if plan is not None else "",
        optimizer=kind_of(optimizer) if optimizer is not None else None,
        sampler=position,
        extra=_plain_data("extra", extra),
        tensors={},
        files={},
    )
    groups = groups_of(optimizer, module) if optimizer is not None else []
    state |= states[0] | random_states(module) | leftover_tensors(module)
    return state, RankFacts(numbers=states[1], groups=groups, manifest=manifest), text


def _plain_data(what: str, value: Any) -> Any:
    """The value as it will be read again, in JSON.

    Nothing else is saved, since a stranger's pickle is a stranger's program.
    """
    try:
        # Through JSON and back: tuples become lists now, not after resuming.
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what} is to be plain data (numbers, texts, lists, dicts): {error}"
        ) from error


def joined_manifest(told: list[RankFacts]) -> Manifest:
    """The manifest, without tensors and files, from the data of all ranks."""
    numbers: dict[str, Scalar] = {}
    for rank, facts in enumerate(told):
        for path, number in facts.numbers.items():
            # Compared as texts, in which a NaN equals itself.
            if repr(numbers.setdefault(path, number)) != repr(number):
                both = f"{numbers[path].value} and, on rank {rank}, {number.value}"
                raise RunError(f"{path} is {both}: a checkpoint holds one number for all ranks")
    counts = {len(facts.groups) for facts in told}
    if len(counts) > 1:
        raise RunError(f"the ranks' optimizers have unequal numbers of groups: {sorted(counts)}")
    groups = []
    for parts in zip(*(facts.groups for facts in told), strict=True):
        # Ranks of several stages have their own parameters in each group.
        names = dict.fromkeys(name for part in parts for name in part.names)
        groups.append(Group(names=tuple(names), options=parts[0].options))
    return told[0].manifest.model_copy(update={"scalars": numbers, "groups": tuple(groups)})


def device_of(module: nn.Module) -> torch.device:
    """The device on which ranks of this module compare data."""
    return module.engine.device if isinstance(module, ParallelModule) else torch.device("cpu")
