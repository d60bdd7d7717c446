"""Guards: what a planned module's programs rest on, checked at each call.

A program is of the model as it was. What its code has read is looked at here: attributes of its
modules, objects behind them, and facts outside (`autopar/facts/`); then the modes of submodules,
which parameters are trained, their types and their devices. A change gets a program of its own
(`changes.py`), or is refused by name. Each rank looks for itself: all run the same script, so that
they see the same changes, and compare these before they make a program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError

from .changes import Change, refused
from .clipping import Parameters
from .held_shards import HeldShards
from .modes import Modes
from .original_modules import CONTAINERS, Recalling


class Guards:
    """The guards of a planned module, for its present submodules."""

    def __init__(self, module: HeldShards, modes: Modes) -> None:
        self.module = module
        self.modes = modes
        parts = {path: part for path, part in module.named_modules() if isinstance(part, Recalling)}
        self.parts = {path: part for path, part in parts.items() if path in modes.parts}
        originals = [(part, part._original) for part in parts.values() if part._original]
        self.entries = [entry for part, own in originals for entry in own.entries(part)]
        self.members = {
            path: (part, list(part._modules.values()))
            for path, part in parts.items()
            if type(part) in CONTAINERS
        }
        graph = module._graph
        self.trains = modes.main.trains
        self.trained = {tensor.name: tensor.trainable for tensor in graph.parameters}
        self.dtypes = {name: module._storages.dtype_of(name) for name in self.trained}
        self.shards = {
            name: (parameter, parameter.untyped_storage()._cdata, parameter._local_tensor)
            for name, parameter in module.graph_parameters().items()
            if isinstance(parameter, DTensor)
        }

    def take_over(self, original: nn.Module) -> None:
        """Give the submodules the original's modes, and parameters its hooks.

        What no program trains is refused.
        """
        for path, part in self.parts.items():
            part.training = self.modes.parts[path]
        own = self.module.graph_parameters()
        for name, parameter in original.named_parameters():
            if name in own:
                _take_over_hooks(parameter, own[name])
            if self.trains and parameter.requires_grad and not self.trained.get(name, True):
                raise PlanError(
                    f"{name!r} requires a gradient, but the plan trains no {parameter.dtype}: "
                    "freeze it (requires_grad_(False)), or plan the model on one device"
                )

    def present_modes(self) -> dict[str, bool]:
        """The modes of all parts."""
        return {path: part.training for path, part in self.module.named_modules()}

    def changes(self) -> tuple[Change, ...]:
        """Changes since the model was planned that another program may follow.

        All others are refused.
        """
        changes = self.modes.changed_parts(self.parts, training=self.module.training)
        changes += [change for entry in self.entries if (change := entry.changed()) is not None]
        changes += [Change.of_fact(f) for f in self.modes.facts if not f.holds(f.present())]
        self._require_members()
        self.module.require_places()
        parameters = self.module.graph_parameters()
        self._require_shards(parameters)
        # Stand-ins change like the parameters, so that all ranks see the same changes.
        every: dict[str, Any] = {**parameters, **self.module.stand_ins()}
        # There may be thousands, and torch asks Python for each of their attributes otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            if self.trains and torch.is_grad_enabled():
                changes += self._unfrozen(every)
            self._require_types(every)
        return tuple(changes)

    def _require_members(self) -> None:
        """Refuse containers of modules with other members."""
        for path, (part, members) in self.members.items():
            if list(part._modules.values()) != members:
                raise PlanError(
                    f"the members of {path!r} have changed since the model was planned, and the "
                    "program would not follow: change them before autopar.plan, and parallelize "
                    "again"
                )

    def _require_types(self, parameters: Parameters) -> None:
        """Refuse parameters of other types or on other devices."""
        kind = self.module._device.type
        for name, parameter in parameters.items():
            planned = self.dtypes[name]
            if parameter.dtype != planned:
                raise PlanError(
                    f"parameters have become {parameter.dtype}, which the plan has as {planned}: "
                    "plan again with the dtype that you want (or master, the type of stored "
                    "parameters)"
                )
            if parameter.device.type != kind:
                raise PlanError(
                    f"parameters have been moved to {parameter.device.type}, the ranks work on "
                    f"{kind}"
                )

    def _require_shards(self, parameters: Parameters) -> None:
        """Refuse DTensors whose `.data` was set, which leaves their shards as they were."""
        for name, (parameter, storage, shard) in self.shards.items():
            present = parameters.get(name)
            if (
                present is parameter
                and present.untyped_storage()._cdata != storage
                and parameter._local_tensor is shard
            ):
                raise PlanError(
                    f"the data of {name!r} was set (p.data = ..., or vector_to_parameters), which "
                    "leaves a DTensor's shard as it was: write into it instead (p.data.copy_(...), "
                    "or p.copy_(...) under no_grad)"
                )

    def _unfrozen(self, parameters: Parameters) -> list[Change]:
        """Parameters that have been unfrozen, on whichever stage."""
        changes = [
            Change.unfrozen(name)
            for name, parameter in parameters.items()
            if parameter.requires_grad and not self.trained[name]
        ]
        self._require_stored_as_trained(changes)
        return changes

    def _require_stored_as_trained(self, changes: list[Change]) -> None:
        """Refuse to train parameters of 16 bits where trained ones are stored in float32."""
        types = self.module._engine.execution.schedule.types
        for change in changes:
            tensor = self.module._graph.tensors[change.path]
            trained = getattr(torch, types.stored(replace(tensor, trainable=True)))
            if trained != self.dtypes[change.path]:
                raise refused(change, f"trained parameters are stored in {trained}")


def _take_over_hooks(original: nn.Parameter, planned: nn.Parameter) -> None:
    """Register the hooks on an original's gradient on the planned one."""
    for hook in (original._backward_hooks or {}).values():
        planned.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        planned.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
