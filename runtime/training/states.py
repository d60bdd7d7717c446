"""The contents of a checkpoint: tensors of a module, an optimizer and torch's generators by name, and plain data.

Names are those of the model's graph, which are those of the original module, so any plan, and the plain module, reads
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.errors import PlanError, RunError

from ..module import ParallelModule
from ..parameters import local_of
from ..weights import saved_buffers
from .manifest import MODEL, OPTIMIZER, RANDOM, Entry, Group, Manifest, Scalar
from .storage import dtype_name, torch_dtype

Tensors = dict[str, Tensor]
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer for how it computes, not what: on resuming, those of the present process stay."""
SHOWN = 10
"""Differences that a message lists."""


def parameters_of(module: nn.Module) -> Tensors:
    """The parameters that this rank has, by name."""
    return dict(module.graph_parameters()) if isinstance(module, ParallelModule) else dict(module.named_parameters())


def buffers_of(module: nn.Module) -> Tensors:
    """The buffers that are saved, and the constants that a call changes."""
    if not isinstance(module, ParallelModule):
        return {paths[0]: buffer for paths, buffer in saved_buffers(module)}
    changing = {name: module._constant(name) for name in module.engine.graph.updates}
    return dict(module.named_buffers()) | changing


def model_tensors(module: nn.Module, *, writing: bool = False) -> Tensors:
    """Parameters and buffers; for `writing`, without those that other stages update."""
    buffers = buffers_of(module)
    if writing and isinstance(module, ParallelModule):
        if module.engine.execution.schedule.reductions.local:
            raise RunError("every rank has parameters of its own (layerwise_parallel), which one checkpoint for any plan cannot hold")
        buffers = {name: value for name, value in buffers.items() if module.engine.makes(name)}
    return {MODEL + name: value.detach() for name, value in (*parameters_of(module).items(), *buffers.items())}


def _expected(module: nn.Module) -> dict[str, Entry]:
    """Shape and type of everything that a checkpoint of this model has, on whichever rank it lies."""
    held = parameters_of(module) | buffers_of(module)
    found = {name: Entry(shape=tuple(value.shape), dtype=dtype_name(value.dtype)) for name, value in held.items()}
    if isinstance(module, ParallelModule):
        master = module.engine.master
        found |= {t.name: Entry(shape=t.shape, dtype=dtype_name(master(t.name))) for t in module.engine.graph.parameters}
    return found


def differences(module: nn.Module, manifest: Manifest) -> list[str]:
    """The differences between a checkpoint and a module, in words."""
    here, there = _expected(module), manifest.named(MODEL)
    found = [f"{name!r} is in the model, not in the checkpoint" for name in here if name not in there]
    found += [f"{name!r} is in the checkpoint, not in the model" for name in there if name not in here]
    for name in (name for name in here if name in there):
        mine, saved = here[name], there[name]
        if (mine.shape, mine.dtype) != (saved.shape, saved.dtype):
            found.append(f"{name!r} is {mine.dtype} {list(mine.shape)}, saved as {saved.dtype} {list(saved.shape)}")
    return found


# --- optimizers ---


def kind_of(optimizer: Optimizer) -> str:
    """The name of the innermost optimizer, without its wrappers."""
    inner = getattr(optimizer, "inner", None)
    return kind_of(inner) if isinstance(inner, Optimizer) else type(optimizer).__name__


class Packing(Protocol):
    """An optimizer with a different state in checkpoints, because a shard's state does not describe the whole."""

    def plain_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter in a checkpoint."""

    def own_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse: a parameter's state in the optimizer, from that in a checkpoint."""


def _packing(optimizer: Optimizer) -> Packing | None:
    inner = getattr(optimizer, "inner", None)
    if isinstance(inner, Optimizer):
        return _packing(inner)
    return cast("Packing", optimizer) if hasattr(optimizer, "plain_state") else None


def _named(optimizer: Optimizer, module: nn.Module) -> Iterator[tuple[list[tuple[str, Tensor]], dict[str, Any]]]:
    """Every group: its named parameters, and its options. The stand-in for other stages has no name."""
    names = {id(parameter): name for name, parameter in parameters_of(module).items()}
    stages = module.other_stages if isinstance(module, ParallelModule) else None
    for number, group in enumerate(optimizer.param_groups):
        own = [value for value in group["params"] if stages is None or value is not stages.parameter]
        if strange := [value for value in own if id(value) not in names]:
            shape = list(strange[0].shape)
            raise PlanError(f"group {number} of the optimizer has a parameter of shape {shape} that is none of the module's")
        yield [(names[id(value)], value) for value in own], {name: value for name, value in group.items() if name != "params"}


def optimizer_tensors(optimizer: Optimizer, module: nn.Module) -> tuple[Tensors, dict[str, Scalar]]:
    """The state: tensors, which lie as their parameters do, and numbers."""
    tensors: Tensors = {}
    numbers: dict[str, Scalar] = {}
    packing = _packing(optimizer)
    for pairs, _ in _named(optimizer, module):
        for name, parameter in pairs:
            state = optimizer.state.get(parameter, {})
            for key, value in (packing.plain_state(parameter, state) if packing and state else state).items():
                path = f"{OPTIMIZER}{name}.{key}"
                if isinstance(value, Tensor) and (value.dim() or isinstance(value, DTensor)):
                    _require_told(path, value, parameter)
                    tensors[path] = value.detach()
                else:
                    numbers[path] = _number(path, value)
    return tensors, numbers


def _require_told(path: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse a split parameter's state that does not know its place in the whole."""
    split = isinstance(parameter, DTensor) and any(not placement.is_replicate() for placement in parameter.placements)
    if split and not isinstance(value, DTensor):
        raise RunError(f"{path} has the shape {list(value.shape)}, whose place in the whole is not known, so it cannot be saved")


def _number(path: str, value: Any) -> Scalar:
    if isinstance(value, Tensor):
        return Scalar(dtype=dtype_name(value.dtype), value=value.item())
    if value is None or isinstance(value, bool | int | float):
        return Scalar(dtype="none" if value is None else type(value).__name__, value=value)
    raise RunError(f"{path} is a {type(value).__name__}; a checkpoint holds tensors and numbers")


def _scalar(held: Scalar) -> Any:
    if held.dtype in ("none", "int", "float", "bool"):
        return held.value
    return torch.tensor(held.value, dtype=torch_dtype(held.dtype))


def groups_of(optimizer: Optimizer, module: nn.Module) -> list[Group]:
    """The groups, with the names of this rank's parameters."""
    found = []
    for pairs, options in _named(optimizer, module):
        given = {name: _plain(name, value) for name, value in options.items() if name not in HOW}
        found.append(Group(names=tuple(name for name, _ in pairs), options=given))
    return found


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(f"the optimizer's option {name} is a {type(value).__name__}; a checkpoint holds numbers and texts")


def optimizer_differences(optimizer: Optimizer, module: nn.Module, manifest: Manifest) -> list[str]:
    """The differences between the saved state and an optimizer, in words."""
    if manifest.optimizer is None:
        return ["the checkpoint has no optimizer"]
    if kind_of(optimizer) != manifest.optimizer:
        return [f"the optimizer is {kind_of(optimizer)}, that of the checkpoint {manifest.optimizer}"]
    own = groups_of(optimizer, module)
    if len(own) != len(manifest.groups):
        return [f"the optimizer has {len(own)} groups of parameters, that of the checkpoint {len(manifest.groups)}"]
    found = []
    everywhere = not isinstance(module, ParallelModule) or not module.engine.world.staged
    for number, (mine, saved) in enumerate(zip(own, manifest.groups, strict=True)):
        there = set(saved.names)
        left = there - set(mine.names) if everywhere else set()
        words = [("optimizer", "that of the checkpoint", name) for name in mine.names if name not in there]
        words += [("checkpoint", "that of the optimizer", name) for name in sorted(left)]
        found += [f"{name!r} is in group {number} of the {one}, not in {other}" for one, other, name in words]
    return found


def empty_states(optimizer: Optimizer, module: nn.Module, manifest: Manifest) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Tensors to fill, by their names in the checkpoint, and the states of parameters that contain them."""
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
    if entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    value = torch.zeros(entry.shape, dtype=dtype, device=local_of(parameter).device)
    if isinstance(parameter, DTensor):
        return DTensor.from_local(value, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False)
    return value


def load_optimizer(optimizer: Optimizer, module: nn.Module, manifest: Manifest, states: Mapping[str, dict[str, Any]]) -> None:
    """Give an optimizer its state and the options of its groups."""
    if (packing := _packing(optimizer)) is not None:
        own = {name: value for pairs, _ in _named(optimizer, module) for name, value in pairs}
        states = {name: packing.own_state(own[name], state) for name, state in states.items()}
    packed = optimizer.state_dict()["param_groups"]
    numbered: dict[int, dict[str, Any]] = {}
    every = zip(optimizer.param_groups, _named(optimizer, module), packed, manifest.groups, strict=True)
    for mine, (pairs, options), group, saved in every:
        names = {id(value): name for name, value in pairs}
        for number, parameter in zip(group["params"], mine["params"], strict=True):
            if (name := names.get(id(parameter), "")) in states:
                numbered[number] = dict(states[name])
        group.update({name: _as_before(name, options.get(name), value) for name, value in saved.options.items()})
    try:
        optimizer.load_state_dict({"state": numbered, "param_groups": packed})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise PlanError(f"the checkpoint does not hold what {kind_of(optimizer)} keeps of its parameters ({what})") from error
    for pairs, _ in _named(optimizer, module):
        for name, parameter in pairs:
            for key, value in states.get(name, {}).items():
                now = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and key != "step" and isinstance(now, Tensor) and now.dtype != value.dtype:
                    raise RunError(f"{kind_of(optimizer)} takes back {key} of {name!r} as {now.dtype}, which was saved as {value.dtype}")


def _as_before(name: str, now: Any, saved: Any) -> Any:
    """An option of an optimizer's group in the form that it has there."""
    try:
        if isinstance(now, Tensor):
            return torch.full_like(now, saved)
        return tuple(saved) if isinstance(now, tuple) else saved
    except TypeError as error:
        raise PlanError(f"the checkpoint's option {name!r} of the optimizer is {saved!r}, which is of another form than {now!r}") from error


# --- random numbers ---


def random_states(module: nn.Module) -> Tensors:
    """The states of rank 0's generators, by which all ranks draw."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    found = {f"{RANDOM}cpu": torch.get_rng_state()}
    if isinstance(module, ParallelModule) and module.engine.device.type == "cuda":
        found[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(module.engine.device)
    return found


def set_random_states(found: Mapping[str, Tensor]) -> None:
    """Go on drawing where rank 0 was."""
    if f"{RANDOM}cpu" in found:
        torch.set_rng_state(found[f"{RANDOM}cpu"])
    if f"{RANDOM}cuda" in found:
        torch.cuda.set_rng_state(found[f"{RANDOM}cuda"])
