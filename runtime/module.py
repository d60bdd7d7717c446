"""`ParallelModule`: a planned model as an ordinary `nn.Module`, with DTensor parameters and local arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.sharding.layout import Layout, R
from autopar.sharding.program import Program

from .arguments import Arguments, other_input
from .batch_parts import BatchParts
from .batches import Batches
from .checks import require
from .clipping import clip_grad_norm
from .collectives import DeviceGroups
from .engine import Engine
from .held_shards import HeldShards, Values
from .modes import Modes
from .original_modules import recall
from .other_stages import OtherStages
from .parameters import placements_of
from .redistribution import apply_chain, gather_full, whole_chain
from .stepping import Pending, differentiable_call
from .uncompiled import runs_as_it_is
from .world import World


class ParallelModule(HeldShards):
    """A model under a plan. Parameters keep the original names; the arithmetic is this rank's local program.

    `values`: every parameter and constant whole, as a tensor or as a function that makes it (called one at a time).
    `aliases`: second names of tied parameters.

    With a `model`, calls, outputs and state dict are those of the original. With `whole`, outputs are plain tensors,
    whole on every rank; split outputs are gathered, which the plan does not price. Without `whole`, split outputs are
    DTensors. Either way a loss made of the outputs, the same on every rank, gives the gradients of one device. Without
    a `model`, `forward` takes the inputs of the graph and returns this rank's outputs in their planned layouts, the
    loss last if it is none of them.

    `loss(...)` gives the planned loss (the model's own scalar, the given function's, or the mean square of the
    outputs), whole on every rank, and gathers nothing. With several micro-batches or stages, gradients flow from the
    loss only. With `parts` a call gets this rank's part of the batch.
    """

    def __init__(
        self,
        execution: Program | Execution,
        groups: DeviceGroups | World,
        values: Values,
        *,
        model: LoadedModel | None = None,
        device: torch.device | str = "cpu",
        aliases: Mapping[str, str] | None = None,
        whole: bool = True,
        exact_random: bool = False,
        debug: bool = False,
        evaluation: Callable[[], Execution] | None = None,
        parts: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._engine = Engine(execution, groups, self._device, self._stored, exact=exact_random)
        self._modes = Modes(self._engine, evaluation)
        self._batches = Batches(debug=debug)
        engine = self._engine
        self._graph = engine.graph
        self._parts = BatchParts(engine.graph, engine.world) if parts else None
        self._record = model.torch if model is not None else None
        self._arguments = Arguments.of(model) if model is not None else None
        self._whole_outputs, self._structured = whole, model is not None
        self._has_loss_function = model is not None and model.loss is not None
        self._loss_is_output = model is not None and self._graph.loss in model.source.outputs
        if model is not None and model.torch is not None:
            recall(self, model.module)
        self._hold(values, model, aliases)
        self._anchor = torch.zeros((), requires_grad=True)
        self._pending = Pending()
        self._synchronize = True
        self.other_stages = OtherStages(self) if engine.world.staged else None

    def planned_in(self, original: nn.Module) -> None:
        """Be in the mode in which the original was planned, and know whether there is another."""
        self.train(original.training)
        self._modes.planned = original.training
        other = [name for name, part in original.named_modules() if _has_modes(part)]
        if not original.training and other:
            self._modes.only = (
                f"the model was in evaluation when it was planned, and its {other[0]!r} does something else in training: "
                "call train() before autopar.plan"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; shares that wait to be summed are dropped too."""
        super().zero_grad(set_to_none)
        self._pending.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters and buffers of its own, on the same process groups."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        shared = (
            "_engine", "_modes", "_batches", "other_stages", "_graph", "_record", "_arguments", "_pending", "_places", "_buffer_places",
            "_anchor", "_parts",
        )  # fmt: skip
        for parameter in self.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        own = {name: value for name, value in self.__dict__.items() if name not in shared}
        other.__dict__.update({name: getattr(self, name) for name in shared} | copy.deepcopy(own, memo))
        other._places = {name: (memo[id(module)], leaf) for name, (module, leaf) in self._places.items()}
        other._buffer_places = {name: (memo[id(module)], leaf) for name, (module, leaf) in self._buffer_places.items()}
        other._pending = Pending()
        other._engine = self._engine.copied(other._stored)
        other._modes = self._modes.on(other._engine)
        other.other_stages = OtherStages(other) if self.other_stages is not None else None
        return other

    # --- calls ---

    def compile(self, **options: Any) -> None:
        """`torch.compile(..., **options)` of the work between gathers of units: a layer or more at a time."""
        self._modes.compile(options)

    @runs_as_it_is
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in their original structure."""
        if not self._structured:
            return self.local_outputs(*args, **kwargs)
        if self._engine.gives_gradients_at_once and torch.is_grad_enabled() and self.loss_index is not None and not self._loss_is_output:
            raise PlanError(
                f"the plan runs {self._engine.in_words}, each with its backward pass, so that no gradient leads from the outputs "
                "back: call loss(...) for the planned loss, run under torch.no_grad() for the outputs alone, or plan with one micro-batch"
            )
        local = self.local_outputs(*args, **kwargs)
        made = {name: value for value, (name, _) in zip(local, self._engine.outputs, strict=True)}
        record = self._record
        if record is None:
            outputs = tuple(self._global(made[name], name) for name in self._graph.outputs)
            return outputs[0] if len(outputs) == 1 else outputs
        fixed = record.output_values or (None,) * len(record.output_names)
        named = {name: self._global(made[name], name) for name in record.output_names if name is not None}
        leaves = [named[name] if name is not None else value for name, value in zip(record.output_names, fixed, strict=True)]
        found = pytree.tree_unflatten(leaves, record.out_spec)
        return found[0] if self._has_loss_function else found

    @runs_as_it_is
    def local_outputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """This rank's outputs in their planned layouts, the loss last where it is not among them."""
        places = range(len(self._engine.outputs))
        found = self._run(self._agreed(args, kwargs), places)
        return tuple(found[place] for place in places)

    @runs_as_it_is
    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The planned loss, whole on every rank; `loss(...).backward()` gives every parameter its gradient."""
        if self.loss_index is None:
            raise PlanError("the plan is for inference and has no loss; plan with mode='train'")
        return self._run(self._agreed(args, kwargs), [self.loss_index])[self.loss_index]

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step: loss, gradients, update; returns the loss. `batch`: a tensor, or arguments as a tuple or dict."""
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})
        optimizer.zero_grad()
        loss = self.loss(*args, **kwargs)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over all stages; returns the norm before, whole on every rank."""
        return clip_grad_norm(self, max_norm, norm_type)

    def _run(self, inputs: Mapping[str, Tensor], wanted: Sequence[int]) -> dict[int, Tensor]:
        """The outputs at the places `wanted`, from the inputs of the graph by name."""
        self._require_as_planned()
        whole = dict(inputs)
        for name in self._engine.constants:
            # Autograd may keep a constant's old value: changing constants are copied.
            value = self._constant(name)
            whole[name] = value.clone() if name in self._graph.updates else value
        engine = self._modes.engine(training=self.training)
        if self._parts is not None:
            whole = self._parts.joined(whole, engine)
        found, fresh = differentiable_call(self, engine, whole, wanted)
        with torch.no_grad():
            for name, value in fresh.items():
                self._constant(name).copy_(value)
        return found

    def _require_as_planned(self) -> None:
        """Refuse parameters of another type or on another device than planned."""
        for name, parameter in self.graph_parameters().items():
            planned = self._engine.master(name)
            if parameter.dtype != planned:
                raise PlanError(
                    f"parameters have become {parameter.dtype}, which the plan has as {planned}: plan again with the dtype that you want "
                    "(or master, the type of stored parameters)"
                )
            if parameter.device.type != self._device.type:
                raise PlanError(f"parameters have been moved to {parameter.device.type}, the ranks work on {self._device.type}")

    def _agreed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs of a call, checked to be the same on every rank, except those that come in parts."""
        apart = self._parts.shapes if self._parts is not None else ()
        return self._batches.agreed(lambda: self._checked(self._inputs(args, kwargs)), self._device, apart)

    def _checked(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, of which the model's assertions hold; parts of a batch are not asked."""
        if self._record is not None and self._record.checks and self._parts is None:
            require(self._record.checks, {**self._record.constants, **inputs})
        return inputs

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        inputs = args if self._arguments is None else tuple(self._arguments.tensors(args, kwargs))
        named: Mapping[str, Any] = kwargs if self._arguments is None else {}
        names = self._graph.inputs
        given = dict(zip(names, inputs, strict=False)) | dict(named)
        if len(inputs) > len(names) or set(given) != set(names) or len(inputs) + len(named) != len(names):
            by_name = ", ".join(named) or "none"
            raise PlanError(f"the model takes the inputs {', '.join(names)}; given are {len(inputs)} and {by_name} by name")
        for name in names:
            wanted, tensor = self._graph.tensors[name], given[name]
            shape = wanted.shape if self._parts is None else self._parts.shapes.get(name, wanted.shape)
            if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, wanted.dtype):
                raise PlanError(other_input(name, tensor, wanted, shape))
            if tensor.requires_grad and torch.is_grad_enabled():
                raise PlanError(f"input {name!r} requires a gradient, which a plan has for parameters only; give it detached")
        # The program itself moves the needed parts to another device.
        return {name: given[name].to(self._device) if self._device.type == "cpu" else given[name] for name in names}

    # --- its parts ---

    @property
    def engine(self) -> Engine:
        """The engine that runs the plan."""
        return self._engine

    @property
    def batch_parts(self) -> BatchParts | None:
        """The assembly of batches from parts, if calls get this rank's part."""
        return self._parts

    @property
    def outputs(self) -> tuple[tuple[str, Layout], ...]:
        """Every output with its layout, the loss last where it is not among them."""
        return self._engine.outputs

    @property
    def loss_index(self) -> int | None:
        """The index of the loss among the outputs."""
        return self._engine.loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep this rank's gradient shares; the first one after it sums them into `.grad`."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def full_outputs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The whole outputs on every rank, from the result of `local_outputs`; not part of the planned program."""
        pairs = zip(outputs, self._engine.outputs, strict=True)
        return tuple(gather_full(value, layout, self._engine.groups) if layout else value for value, (_, layout) in pairs)

    def _global(self, value: Tensor, name: str) -> Tensor:
        layout = dict(self._engine.outputs)[name]
        if all(placement == R for placement in layout):
            return value
        groups = self._engine.groups
        if self._whole_outputs:
            return apply_chain(value, whole_chain(layout), groups, gradient=True)
        tensor = self._graph.tensors[name]
        stride = torch.empty(tensor.shape, device="meta").stride()
        places = placements_of(layout, groups.mesh.shape)
        return DTensor.from_local(value, self._engine.device_mesh(), places, run_check=False, shape=torch.Size(tensor.shape), stride=stride)


def _has_modes(part: nn.Module) -> bool:
    """Whether a module behaves differently in training and in evaluation."""
    drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    return drops or (isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats)
