"""The state of an optimizer in a checkpoint: tensors by parameter, numbers, and group options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.errors import PlanError, RunError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.stand_ins import Elsewhere

from .durable_files import dtype_name, torch_dtype
from .manifest import OPTIMIZER, Entry, Group, Manifest, Scalar
from .module_state import Tensors, parameters_of

# On resuming, options that say how an optimizer computes, not what, are those of this process.
HOW = ("foreach", "fused", "capturable", "differentiable")


def kind_of(optimizer: Optimizer) -> str:
    """The name of the innermost optimizer, without its wrappers."""
    inner = getattr(optimizer, "inner", None)
    return kind_of(inner) if isinstance(inner, Optimizer) else type(optimizer).__name__


class Packing(Protocol):
    """An optimizer that has another state in checkpoints than in memory.

    It has one because a shard's state does not describe the whole.
    """

    def plain_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter in a checkpoint."""

    def own_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter in the optimizer, from that in a checkpoint."""


def _packing(optimizer: Optimizer) -> Packing | None:
    """The innermost optimizer, if it packs its state for checkpoints."""
    inner = getattr(optimizer, "inner", None)
    if isinstance(inner, Optimizer):
        return _packing(inner)
    return cast("Packing", optimizer) if hasattr(optimizer, "plain_state") else None


def _named(
    optimizer: Optimizer, module: nn.Module
) -> Iterator[tuple[list[tuple[str, Tensor]], dict[str, Any]]]:
    """Every group: its named parameters, and its options.

    Stand-ins are left out: the ranks that hold the parameters save their state.
    """
    names = {parameter: name for name, parameter in parameters_of(module).items()}
    for number, group in enumerate(optimizer.param_groups):
        own = [value for value in group["params"] if not isinstance(value, Elsewhere)]
        if strange := [value for value in own if value not in names]:
            shape = list(strange[0].shape)
            raise PlanError(
                f"group {number} of the optimizer has a parameter of shape {shape}"
                " that is none of the module's"
            )
        options = {name: value for name, value in group.items() if name != "params"}
        yield [(names[value], value) for value in own], options


def optimizer_tensors(optimizer: Optimizer, module: nn.Module) -> tuple[Tensors, dict[str, Scalar]]:
    """The state of an optimizer: tensors, which lie as their parameters do, and numbers."""
    tensors: Tensors = {}
    numbers: dict[str, Scalar] = {}
    packing = _packing(optimizer)
    for pairs, _ in _named(optimizer, module):
        for name, parameter in pairs:
            state = optimizer.state.get(parameter, {})
            # Codes of a shard have no meaning under another plan; numbers have.
            if packing and state:
                state = packing.plain_state(parameter, state)
            for key, value in state.items():
                path = f"{OPTIMIZER}{name}.{key}"
                # Tensors without dims, like the step of Adam, are numbers that all ranks share.
                if isinstance(value, Tensor) and (value.dim() or isinstance(value, DTensor)):
                    # A plain tensor beside a split parameter may be a shard, or may not: nobody can
                    # tell.
                    _require_told(path, value, parameter)
                    tensors[path] = value.detach()
                else:
                    numbers[path] = _number(path, value)
    return tensors, numbers


def _require_told(path: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse a split parameter's state that does not know its place in the whole."""
    split = isinstance(parameter, DTensor) and any(
        not placement.is_replicate() for placement in parameter.placements
    )
    if split and not isinstance(value, DTensor):
        raise RunError(
            f"{path} has the shape {list(value.shape)}, whose place in the whole is not known,"
            " so it cannot be saved"
        )


def _number(path: str, value: Any) -> Scalar:
    """A number of the state, as the manifest holds it."""
    if isinstance(value, Tensor):
        return Scalar(dtype=dtype_name(value.dtype), value=value.item())
    if value is None or isinstance(value, bool | int | float):
        return Scalar(dtype="none" if value is None else type(value).__name__, value=value)
    raise RunError(f"{path} is a {type(value).__name__}; a checkpoint holds tensors and numbers")


def _scalar(held: Scalar) -> Any:
    """A number of the state, as the optimizer has it."""
    if held.dtype in ("none", "int", "float", "bool"):
        return held.value
    return torch.tensor(held.value, dtype=torch_dtype(held.dtype))


def groups_of(optimizer: Optimizer, module: nn.Module) -> list[Group]:
    """The groups, with the names of this rank's parameters."""
    groups = []
    for pairs, options in _named(optimizer, module):
        plain = {name: _plain(name, value) for name, value in options.items() if name not in HOW}
        groups.append(Group(names=tuple(name for name, _ in pairs), options=plain))
    return groups


def _plain(name: str, value: Any) -> Any:
    """An option as plain data."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(
        f"the optimizer's option {name} is a {type(value).__name__};"
        " a checkpoint holds numbers and texts"
    )


def optimizer_differences(optimizer: Optimizer, module: nn.Module, manifest: Manifest) -> list[str]:
    """The differences between the saved state and an optimizer, in words."""
    if manifest.optimizer is None:
        return ["the checkpoint has no optimizer"]
    # By name: a class of another module may be the same optimizer, and versions move classes.
    if kind_of(optimizer) != manifest.optimizer:
        return [
            f"the optimizer is {kind_of(optimizer)}, that of the checkpoint {manifest.optimizer}"
        ]
    own = groups_of(optimizer, module)
    if len(own) != len(manifest.groups):
        return [
            f"the optimizer has {len(own)} groups of parameters,"
            f" that of the checkpoint {len(manifest.groups)}"
        ]
    lines = []
    # A rank of several stages has some of the parameters only, and cannot miss the others.
    everywhere = not isinstance(module, ParallelModule) or not module.engine.world.staged
    for number, (mine, saved) in enumerate(zip(own, manifest.groups, strict=True)):
        missing = sorted(set(saved.names) - set(mine.names)) if everywhere else []
        lines += [
            f"{name!r} is in group {number} of the optimizer, not in that of the checkpoint"
            for name in mine.names
            if name not in set(saved.names)
        ]
        lines += [
            f"{name!r} is in group {number} of the checkpoint, not in that of the optimizer"
            for name in missing
        ]
    return lines


def empty_states(
    optimizer: Optimizer, module: nn.Module, manifest: Manifest
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Tensors to fill, by their names in the checkpoint, and the states that contain them."""
    targets: Tensors = {}
    states: dict[str, dict[str, Any]] = {}
    own = {name: value for pairs, _ in _named(optimizer, module) for name, value in pairs}
    for rest, entry in manifest.named(OPTIMIZER).items():
        name, _, key = rest.rpartition(".")
        if name in own:
            targets[OPTIMIZER + rest] = states.setdefault(name, {})[key] = _empty(entry, own[name])
    for path, number in manifest.scalars.items():
        name, _, key = path.removeprefix(OPTIMIZER).rpartition(".")
        if name in own:
            states.setdefault(name, {})[key] = _scalar(number)
    return targets, states


def _empty(entry: Entry, parameter: Tensor) -> Tensor:
    """A tensor that lies as the parameter does, where it has its shape; else whole."""
    dtype = torch_dtype(entry.dtype)
    # Moments lie as the parameter does, so that every rank reads its part alone.
    if entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    value = torch.zeros(entry.shape, dtype=dtype, device=local_of(parameter).device)
    if isinstance(parameter, DTensor):
        # Nothing tells how a state of another shape was split, so every rank reads all of it.
        whole = [Replicate()] * parameter.device_mesh.ndim
        return DTensor.from_local(value, parameter.device_mesh, whole, run_check=False)
    return value


def load_optimizer(
    optimizer: Optimizer,
    module: nn.Module,
    manifest: Manifest,
    states: Mapping[str, dict[str, Any]],
) -> None:
    """Give an optimizer its state and the options of its groups."""
    if (packing := _packing(optimizer)) is not None:
        own = {name: value for pairs, _ in _named(optimizer, module) for name, value in pairs}
        states = {name: packing.own_state(own[name], state) for name, state in states.items()}
    packed = optimizer.state_dict()["param_groups"]
    numbered: dict[int, dict[str, Any]] = {}
    groups = zip(
        optimizer.param_groups, _named(optimizer, module), packed, manifest.groups, strict=True
    )
    # A state dict names parameters by number, in the order of the groups.
    for mine, (pairs, options), group, saved in groups:
        names = {value: name for name, value in pairs}
        for number, parameter in zip(group["params"], mine["params"], strict=True):
            name = names.get(parameter, "")
            if name in states:
                numbered[number] = dict(states[name])
        for name, value in saved.options.items():
            group[name] = _as_before(name, options.get(name), value)
    try:
        optimizer.load_state_dict({"state": numbered, "param_groups": packed})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"the checkpoint does not hold what {kind_of(optimizer)} keeps of its parameters"
            f" ({type(error).__name__}: {error})"
        ) from error
    _require_types(optimizer, module, states)


def _require_types(
    optimizer: Optimizer, module: nn.Module, states: Mapping[str, dict[str, Any]]
) -> None:
    """Refuse an optimizer that has turned its state into another type, as torch's own do."""
    for pairs, _ in _named(optimizer, module):
        for name, parameter in pairs:
            for key, value in states.get(name, {}).items():
                now = optimizer.state[parameter].get(key)
                tensors = isinstance(value, Tensor) and isinstance(now, Tensor)
                if tensors and key != "step" and now.dtype != value.dtype:
                    raise RunError(
                        f"{kind_of(optimizer)} takes back {key} of {name!r} as {now.dtype},"
                        f" which was saved as {value.dtype}"
                    )


def _as_before(name: str, now: Any, saved: Any) -> Any:
    """An option of an optimizer's group in the form that it has there."""
    try:
        if isinstance(now, Tensor):
            return torch.full_like(now, saved)
        # JSON has no tuples, and optimizers unpack betas from one.
        return tuple(saved) if isinstance(now, tuple) else saved
    except TypeError as error:
        raise PlanError(
            f"the checkpoint's option {name!r} of the optimizer is {saved!r},"
            f" which is of another form than {now!r}"
        ) from error
