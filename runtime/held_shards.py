"""`HeldShards`: a rank's shards of a planned model's parameters, buffers and constants, under the original names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.model import LoadedModel

from .agreement import DIGEST, update_digest
from .engine import Engine
from .original_modules import Recalling
from .other_stages import OtherStages
from .parameters import attach, local_of
from .weight_files import FileTensor
from .weights import saved_buffers

Values = Mapping[str, Tensor | Callable[[], Tensor]]


class HeldShards(Recalling):
    """The parameters and buffers of a planned module, and its state dict."""

    _device: torch.device
    _engine: Engine
    _graph: Graph
    other_stages: OtherStages | None

    def _hold(self, values: Values, model: LoadedModel | None, aliases: Mapping[str, str] | None) -> None:
        """Take this rank's part of every given value; `weights_digest` covers all values."""
        engine, checksum = self._engine, hashlib.sha256()
        names = [*(t.name for t in self._graph.parameters), *engine.constants]
        missing = [name for name in names if name not in values]
        if missing:
            raise PlanError(f"no values are given for {', '.join(missing[:10])}" + (" and more" if len(missing) > 10 else ""))
        self._places: dict[str, tuple[nn.Module, str]] = {}
        owned = {}
        for tensor in self._graph.parameters:  # weights of other stages count too: all ranks must have equal ones
            alone = tensor.name in engine.execution.schedule.reductions.local  # each rank has its own
            value = self._given(tensor.name, values, hashlib.sha256() if alone else checksum)
            if engine.holds(tensor.name):
                owned[tensor.name] = self._parameter(tensor.name, value)
        for name, parameter in owned.items():
            self._places[name] = attach(self, name, parameter)
        found = aliases or (model.torch.aliases if model is not None and model.torch is not None else {})
        for alias, name in found.items():
            if name in owned:
                attach(self, alias, owned[name])
        self._elsewhere = {name: name for name in names if name not in owned and name not in engine.constants}
        self._elsewhere |= {alias: name for alias, name in found.items() if name in self._elsewhere}
        changed = set(self._graph.updates)
        given = {name: self._whole(name, values, checksum) for name in engine.constants}
        self._constants = {name: value.clone() if name in changed else value for name, value in given.items()}
        self._buffer_places: dict[str, tuple[nn.Module, str]] = {}
        for paths, buffer in saved_buffers(model.module) if model is not None and model.torch is not None else ():
            own = values.get(paths[0], buffer)
            self.attach_buffer(paths, own if isinstance(own, Tensor) else own())
        self.weights_digest = checksum.digest()[:DIGEST]

    def attach_buffer(self, paths: Sequence[str], value: Tensor) -> None:
        """Register a buffer under its names; a constant of the program is read from there from now on."""
        own = value.detach().to(self._device, copy=True)
        for path in paths:
            place = attach(self, path, own)
            if path in self._constants:
                self._buffer_places[path] = place

    def _given(self, name: str, values: Values, checksum: Any) -> Tensor | FileTensor:
        """A given value, checked against the graph; a value in a file is not read yet."""
        given, wanted = values[name], self._graph.tensors[name]
        value = given if isinstance(given, FileTensor) else (given if isinstance(given, Tensor) else given()).detach()
        master = self._engine.master(name)
        if tuple(value.shape) != wanted.shape or value.dtype not in (getattr(torch, wanted.dtype), master):
            raise PlanError(f"{name!r} is {value.dtype} {list(value.shape)}, the plan's model has {wanted.dtype} {list(wanted.shape)}")
        if isinstance(value, FileTensor):
            checksum.update(value.fact)
            return value
        value = value.to(master)
        update_digest(checksum, value)
        return value

    def _whole(self, name: str, values: Values, checksum: Any) -> Tensor:
        """The given value of a constant."""
        value = self._given(name, values, checksum)
        return (value() if isinstance(value, FileTensor) else value).to(self._device)

    def _parameter(self, name: str, given: Tensor | FileTensor) -> nn.Parameter:
        """This rank's shard of a given value."""
        storage, layout = self._engine.storage_of(name)
        return nn.Parameter(storage.placed(given, layout), requires_grad=self._graph.tensors[name].trainable)

    def _stored(self, name: str) -> Tensor:
        """This rank's shard of a parameter, wherever the user's changes have put it."""
        module, leaf = self._places[name]
        return local_of(getattr(module, leaf))

    def _constant(self, name: str) -> Tensor:
        if name in self._buffer_places:
            module, leaf = self._buffer_places[name]
            found: Tensor = getattr(module, leaf)
            return found
        return self._constants[name]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; whole tensors, and DTensors that lie in another way, are cut into this rank's shards."""
        names = {id(parameter): name for name, parameter in self.graph_parameters().items()}
        own: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        given = {path: value for path, value in state_dict.items() if path not in self._elsewhere}
        for path, value in list(given.items()):
            mine = own.get(path)
            if mine is None or not isinstance(value, Tensor) or value.shape != mine.shape:
                continue
            if isinstance(value, DTensor) and isinstance(mine, DTensor) and value._spec == mine._spec:
                continue
            storage, layout = self._engine.storage_of(names[id(mine)])
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if type(whole) in (Tensor, nn.Parameter):
                given[path] = storage.placed(whole.detach().to(self._device, mine.dtype), layout)
        missing = self._missing_elsewhere(state_dict)
        if missing and strict:
            raise RuntimeError(f"the state dict has no {', '.join(map(repr, missing[:5]))}, which other stages hold")
        found = super().load_state_dict(given, strict=strict, assign=assign)
        found.missing_keys.extend(missing)
        return found

    def _missing_elsewhere(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Missing parameters of other stages in a whole state dict; a rank's own state dict has none of them."""
        there = [path for path in self._elsewhere if path in state_dict]
        for path in there:
            name = self._elsewhere[path]
            if tuple(state_dict[path].shape) != self._graph.tensors[name].shape:
                raise RuntimeError(f"size mismatch for {path}: {list(state_dict[path].shape)} for {list(self._graph.tensors[name].shape)}")
        return [path for path in self._elsewhere if path not in state_dict] if there else []

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parameters; with stages, one more at the end represents the others' (see `other_stages`)."""
        yield from super().parameters(recurse)
        if self.other_stages is not None:
            yield self.other_stages.parameter

    def graph_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the graph, in its order."""
        return {name: getattr(module, leaf) for name, (module, leaf) in self._places.items()}

    def host_parameters(self) -> list[nn.Parameter]:
        """The parameters whose optimizer state the plan has in host memory (see `host_states`)."""
        held = self._engine.host
        return [value for name, value in self.graph_parameters().items() if name in held]

    def full_value(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank from this rank's shard of parameter `name` (or of its gradient)."""
        return self._engine.whole_parameter(name, local_of(local).detach())

    def full_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors on every rank, from each rank's shards of parameters (or gradients)."""
        names = [tensor.name for tensor in self._graph.parameters]
        there = torch.tensor([float(name in values) for name in names], device=self._device)
        if self._engine.world.staged:
            dist.all_reduce(there)
        found = [name for name, some in zip(names, there.tolist(), strict=True) if some]
        return {name: self._engine.whole_parameter(name, local_of(values[name]).detach() if name in values else None) for name in found}
