"""A rank's shards of a planned model's parameters, buffers and constants, under original names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.model import LoadedModel
from autopar.runtime.execution.engine import Engine
from autopar.runtime.files.module_weights import saved_buffers
from autopar.runtime.files.weight_files import FileTensor
from autopar.runtime.parameters.storage import Storages, local_of
from autopar.runtime.ranks.contents import Contents
from autopar.runtime.stand_ins import Elsewhere

from .gradients_elsewhere import OtherStages
from .original_modules import Recalling, attach, held

Values = Mapping[str, Tensor | Callable[[], Tensor]]


class HeldShards(Recalling):
    """The parameters and buffers of a planned module, and its state dict."""

    _device: torch.device
    _engine: Engine
    _storages: Storages
    _graph: Graph
    other_stages: OtherStages | None

    def _hold(
        self,
        values: Values,
        model: LoadedModel | None,
        aliases: Mapping[str, str] | None,
        *,
        debug: bool,
    ) -> None:
        """Take this rank's part of every value.

        `weights_digest` covers all values: a sample of large ones, with `debug` all elements.
        """
        contents = Contents(whole=debug)
        names = [*(tensor.name for tensor in self._graph.parameters), *self._engine.constants]
        missing = [name for name in names if name not in values]
        if missing:
            more = " and more" if len(missing) > 10 else ""
            raise PlanError(f"no values are given for {', '.join(missing[:10])}{more}")
        record = model.torch if model is not None else None
        if not aliases:
            aliases = record.aliases if record is not None else {}
        self._hold_parameters(values, aliases, contents)
        self._hold_constants(values, contents)
        if model is not None and record is not None:
            for saved in (True, False):
                for paths, buffer in saved_buffers(model.module, saved=saved):
                    value = values.get(paths[0], buffer)
                    whole = value if isinstance(value, Tensor) else value()
                    # One that is not saved, and not read either, may have no values.
                    if saved or not whole.is_meta:
                        self.attach_buffer(paths, whole, saved=saved)
        self.weights_digest = contents.digest()

    def _hold_parameters(
        self, values: Values, aliases: Mapping[str, str], contents: Contents
    ) -> None:
        engine = self._engine
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._stand_in_places: dict[str, tuple[nn.Module, str]] = {}
        every: dict[str, nn.Parameter] = {}
        # Weights of other stages are looked at, too: all ranks must have equal ones.
        for tensor in self._graph.parameters:
            # Parameters that each rank has of its own may differ, and are not part of the digest.
            alone = tensor.name in engine.execution.schedule.reductions.local
            value = self._given(tensor.name, values, Contents() if alone else contents)
            places = self._places
            if self._storages.holds(tensor.name):
                every[tensor.name] = self._parameter(tensor.name, value)
            else:
                assert self.other_stages is not None
                every[tensor.name] = self.other_stages.stand_in(tensor.name)
                places = self._stand_in_places
            places[tensor.name] = attach(self, tensor.name, every[tensor.name])
        for alias, name in aliases.items():
            if name in every:
                attach(self, alias, every[name])
        # Paths in a whole state dict whose parameters other stages hold, with the graph's names.
        self._elsewhere = {name: name for name in self._stand_in_places}
        self._elsewhere |= {alias: n for alias, n in aliases.items() if n in self._elsewhere}

    def _hold_constants(self, values: Values, contents: Contents) -> None:
        self._constants: dict[str, Tensor] = {}
        self._buffer_places: dict[str, tuple[nn.Module, str]] = {}
        for name in self._engine.constants:
            value = self._given(name, values, contents)
            whole = (value() if isinstance(value, FileTensor) else value).to(self._device)
            # Calls write new values into constants that change: these are the module's own.
            self._constants[name] = whole.clone() if name in self._graph.updates else whole

    def attach_buffer(self, paths: Sequence[str], value: Tensor, *, saved: bool = True) -> None:
        """Register a buffer under its names; `saved`: in the state dict.

        A constant of the program is read from there from now on.
        """
        # A copy, since the original module keeps its buffers.
        own = value.detach().to(self._device, copy=True)
        for path in paths:
            place = attach(self, path, own, saved=saved)
            if path in self._constants:
                self._buffer_places[path] = place
                self._constants[path] = own

    def _given(self, name: str, values: Values, contents: Contents) -> Tensor | FileTensor:
        """A value, checked against the graph; a value in a file is not read yet."""
        value = values[name]
        if not isinstance(value, FileTensor):
            value = (value if isinstance(value, Tensor) else value()).detach()
        wanted = self._graph.tensors[name]
        master = self._storages.dtype_of(name)
        planned = getattr(torch, wanted.dtype)
        if tuple(value.shape) != wanted.shape or value.dtype not in (planned, master):
            raise PlanError(
                f"{name!r} is {value.dtype} {list(value.shape)}, the plan's model has "
                f"{wanted.dtype} {list(wanted.shape)}"
            )
        if isinstance(value, FileTensor):
            # The file's own digest stands for its contents, of which ranks read different parts.
            contents.add_fact(value.fact)
            return value
        value = value.to(master)
        contents.add(value)
        return value

    def _parameter(self, name: str, value: Tensor | FileTensor) -> nn.Parameter:
        """This rank's shard of a value."""
        shard = self._storages.of(name).placed(name, value)
        return nn.Parameter(shard, requires_grad=self._graph.tensors[name].trainable)

    def _stored(self, name: str) -> Tensor:
        """This rank's shard of a parameter, wherever the user's changes have put it."""
        return local_of(held(*self._places[name]))

    def _constant(self, name: str) -> Tensor:
        if name in self._buffer_places:
            module, leaf = self._buffer_places[name]
            buffer: Tensor = getattr(module, leaf)
            return buffer
        # The program of another mode may read buffers that the planned one does not.
        return self._constants[name] if name in self._constants else self.get_buffer(name)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's; whole tensors are cut into this rank's shards.

        So are DTensors that lie in another way than this module's.
        """
        names = {id(parameter): name for name, parameter in self.graph_parameters().items()}
        own: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        values = {path: value for path, value in state_dict.items() if path not in self._elsewhere}
        for path, value in values.items():
            parameter = own.get(path)
            name = names.get(id(parameter))
            if name is not None and isinstance(value, Tensor):
                values[path] = self._as_shard(value, own[path], name)
        missing = self._missing_elsewhere(state_dict)
        if missing and strict:
            listed = ", ".join(map(repr, missing[:5]))
            raise RuntimeError(f"the state dict has no {listed}, which other stages hold")
        keys = super().load_state_dict(values, strict=strict, assign=assign)
        keys.missing_keys.extend(missing)
        return keys

    def _as_shard(self, value: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
        """A value for a parameter, cut as that is; unchanged where torch itself has to judge it."""
        if value.shape != parameter.shape:
            return value
        whole = value
        if isinstance(value, DTensor):
            if isinstance(parameter, DTensor) and value._spec == parameter._spec:
                return value
            # Gathering is a collective, so every rank must load the same state dict.
            whole = value.full_tensor()
        if type(whole) not in (Tensor, nn.Parameter):
            return value
        whole = whole.detach().to(self._device, parameter.dtype)
        return self._storages.of(name).placed(name, whole)

    def _missing_elsewhere(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Parameters of other stages that a whole state dict lacks.

        A rank's own state dict has none of them, and lacks nothing.
        """
        there = [path for path in self._elsewhere if path in state_dict]
        for path in there:
            name = self._elsewhere[path]
            if tuple(state_dict[path].shape) != self._graph.tensors[name].shape:
                raise RuntimeError(
                    f"size mismatch for {path}: {list(state_dict[path].shape)} for "
                    f"{list(self._graph.tensors[name].shape)}"
                )
        return [path for path in self._elsewhere if path not in state_dict] if there else []

    def graph_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the graph, in its order."""
        return {name: held(*place) for name, place in self._places.items()}

    def stand_ins(self) -> dict[str, Elsewhere]:
        """The stand-ins for parameters of other stages, by their names in the graph."""
        return {name: held(*place) for name, place in self._stand_in_places.items()}

    def require_places(self) -> None:
        """Refuse parameters and stand-ins in one another's places."""
        names = [name for name, p in self.graph_parameters().items() if not _has_data(p)]
        for name, value in self.stand_ins().items():
            # Parameters of one stage can be tied there.
            stages = self.other_stages.stages[name] if self.other_stages is not None else None
            if not isinstance(value, Elsewhere) or value.origin.stages != stages:
                names.append(name)
        if names:
            raise PlanError(
                f"{names[0]!r} was replaced, or tied to another parameter, since the model was "
                "planned in stages: do it before autopar.plan, and parallelize again"
            )

    def host_parameters(self) -> list[nn.Parameter]:
        """The parameters whose optimizer state the plan has in host memory (see `host_states`)."""
        there = self._engine.host
        return [value for name, value in self.graph_parameters().items() if name in there]

    def full_value(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank from our shard of a parameter (or of its gradient)."""
        return self._storages.whole(name, local_of(local).detach())

    def full_values(self, values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The whole tensors on every rank, from each rank's shards of parameters (or gradients).

        Collective: every rank calls it, also one that holds none of them.
        """
        names = [tensor.name for tensor in self._graph.parameters]
        given = {name: value for name, value in values.items() if value is not None}
        present = torch.tensor([float(name in given) for name in names], device=self._device)
        # Ranks of one stage do not know which gradients another has.
        if self._engine.world.staged:
            dist.all_reduce(present)
        whole = {}
        for name, holders in zip(names, present.tolist(), strict=True):
            if holders:
                shard = local_of(given[name]).detach() if name in given else None
                # A collective for each name: all ranks have the same list in the same order.
                whole[name] = self._storages.whole(name, shard)
        return whole


def _has_data(parameter: Tensor) -> bool:
    """Whether a parameter of this rank is one still, with data of its own."""
    if isinstance(parameter, (DTensor, Elsewhere)):
        return isinstance(parameter, DTensor)
    try:
        # A stand-in whose data was set as this parameter's has left it without any.
        parameter.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
