"""`PlannedModule`: called like the original model, it returns what that returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.model import LoadedModel
from autopar.order.execution import Execution

from .collectives import DeviceGroups, apply_chain, whole_chain
from .module import ParallelModule, Values, placements_of


class PlannedModule(ParallelModule):
    """A `ParallelModule` with the calls, the outputs and the state dict of the original model.

    With `whole`, outputs are plain tensors, whole on every rank; those that the plan leaves split are gathered for it, which
    the plan does not price. Without, these are DTensors. Either way a loss made of the outputs, the same on every rank, gives
    the gradients of one device. `loss(...)` gives the planned loss (the model's own scalar, the given function's, or the
    mean square of the outputs) and gathers nothing.
    """

    def __init__(
        self, program: Execution, groups: DeviceGroups, values: Values, *, model: LoadedModel, device: torch.device, whole: bool
    ) -> None:
        aliases = model.torch.aliases if model.torch is not None else {}
        super().__init__(program, groups, values, device=device, aliases=aliases)
        self._record = model.torch
        self._whole_outputs = whole
        self._has_loss_function = model.loss is not None
        self._loss_is_output = self._program.graph.loss in model.source.outputs
        self._arguments = _Arguments.of(model)
        for paths, buffer in _saved_buffers(model.module) if model.torch is not None else ():
            self.attach_buffer(paths, buffer)

    def local_outputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """This rank's outputs in their planned layouts, the loss last where it is not among them."""
        if self._arguments is None:
            return super().forward(*args, **kwargs)
        return super().forward(*self._arguments.tensors(args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in their original structure."""
        if self._micro is not None and torch.is_grad_enabled() and self.loss_index is not None and not self._loss_is_output:
            raise PlanError(
                f"the plan runs {self._micro.count} micro-batches, each with its backward pass, so that no gradient leads from the outputs "
                "back: call loss(...) for the planned loss, run under torch.no_grad() for the outputs alone, or plan with one micro-batch"
            )
        local = self.local_outputs(*args, **kwargs)
        made = {name: value for value, (name, _) in zip(local, self.local_program.outputs, strict=True)}
        record = self._record
        if record is None:
            outputs = tuple(self._global(made[name], name) for name in self._program.graph.outputs)
            return outputs[0] if len(outputs) == 1 else outputs
        fixed = record.output_values or (None,) * len(record.output_names)
        named = {name: self._global(made[name], name) for name in record.output_names if name is not None}
        leaves = [named[name] if name is not None else value for name, value in zip(record.output_names, fixed, strict=True)]
        found = pytree.tree_unflatten(leaves, record.out_spec)
        return found[0] if self._has_loss_function else found

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The planned loss, whole on every rank; `loss(...).backward()` gives every parameter its gradient."""
        if self._arguments is None:
            return self.planned_loss(*args, **kwargs)
        return self.planned_loss(*self._arguments.tensors(args, kwargs))

    def _global(self, value: Tensor, name: str) -> Tensor:
        layout = dict(self.local_program.outputs)[name]
        if self._mesh is None or all(str(placement) == "R" for placement in layout):
            return value
        if self._whole_outputs:
            return apply_chain(value, whole_chain(layout), self._groups, gradient=True)
        tensor = self._program.graph.tensors[name]
        stride = torch.empty(tensor.shape, device="meta").stride()
        places = placements_of(layout, self._groups.mesh.shape)
        return DTensor.from_local(value, self._mesh, places, run_check=False, shape=torch.Size(tensor.shape), stride=stride)


def _saved_buffers(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The buffers that stand in the state dict, each with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if name not in part._non_persistent_buffers_set:
                found.setdefault(id(buffer), ([], buffer))[0].append(f"{prefix}.{name}" if prefix else name)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Planned:
    """The place of a planned argument among the leaves of the planned call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How the model was called when it was planned: `leaves` of the call, their structure, and the model's signature."""

    leaves: tuple[Any, ...]
    spec: Any
    signature: inspect.Signature | None

    @classmethod
    def of(cls, model: LoadedModel) -> _Arguments | None:
        """None for ONNX models, whose inputs are known by name."""
        if model.torch is None:
            return None
        spec = model.torch.in_spec
        if model.call is None:
            return cls(leaves=(), spec=spec, signature=None)
        leaves, own = pytree.tree_flatten(model.call)
        return cls(leaves=tuple(leaves), spec=own, signature=inspect.signature(model.module.forward))

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the planned one; what is no tensor must be as it was planned."""
        given, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec and self.signature is not None:
            given = self._ordered(args, kwargs)
        elif spec != self.spec:
            raise PlanError(f"the model was planned for arguments of the form {self.spec}, called with {spec}")
        for planned, value in zip(self.leaves, given, strict=bool(self.leaves)):
            if not _agree(planned, value):
                raise PlanError(f"the model was planned with {_text(planned)} where it is called with {_text(value)}")
        return [value for value in given if isinstance(value, Tensor)]

    def _ordered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call that passes the planned arguments in another way: by name, in another order, defaults left out."""
        assert self.signature is not None
        places = pytree.tree_unflatten([_Planned(i) for i in range(len(self.leaves))], self.spec)
        planned, given = self._bound(*places), self._bound(args, kwargs)
        ordered = list(self.leaves)
        for name, mine in planned.items():
            wanted, wanted_spec = pytree.tree_flatten(mine)
            values, spec = pytree.tree_flatten(given.get(name, inspect.Parameter.empty))
            agree = spec == wanted_spec and all(isinstance(w, _Planned) or _agree(w, v) for w, v in zip(wanted, values, strict=True))
            if not agree:
                shown = [_text(self.leaves[w.index]) if isinstance(w, _Planned) else _text(w) for w in wanted]
                raise PlanError(f"the model was planned for {name} = {', '.join(shown)}, called with {', '.join(map(_text, values))}")
            for place, value in zip(wanted, values, strict=True):
                if isinstance(place, _Planned):
                    ordered[place.index] = value
        return ordered

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the signature, defaults included, further keywords as if they were in it."""
        assert self.signature is not None
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(f"the model cannot be called so: {error}") from error
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            further = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found.update(value if further else {name: value})
        return found


def _agree(planned: Any, given: Any) -> bool:
    if isinstance(planned, Tensor) or isinstance(given, Tensor):
        return isinstance(planned, Tensor) and isinstance(given, Tensor)
    return planned is given or bool(planned == given)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "nothing" if value is inspect.Parameter.empty else repr(value)
