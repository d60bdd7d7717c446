"""`ParallelModule`: a planned model as an ordinary `nn.Module`.

Its parameters are DTensors, its arithmetic is this rank's local program.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.runtime.execution.autograd_node import differentiable_call
from autopar.runtime.execution.engine import Engine
from autopar.runtime.execution.gradient_state import GradientState
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.uncompiled import runs_as_it_is
from autopar.runtime.ranks.world import World
from autopar.sharding.layout import Layout
from autopar.sharding.program import Program

from .batch_parts import BatchParts
from .call_inputs import CallInputs
from .call_outputs import CallOutputs
from .changes import Remaking
from .clipping import clip_grad_norm
from .gradients_elsewhere import OtherStages
from .guards import Guards
from .held_shards import HeldShards, Values
from .modes import Modes
from .original_modules import facts_of, recall
from .padding import Dims, Padded, equal_losses, padded, padded_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOptions:
    """The choices of a caller that no plan makes.

    `device`: where the module computes. `whole`: outputs are whole on every rank, else DTensors.
    `exact_random`: random numbers are those of torch's generator on one device. `debug`: batches
    are compared in every call, and all elements of batches and weights. `parts`: a call gets this
    rank's part of the batch. `remaking` makes the executions of evaluation and of changed modules.
    """

    device: torch.device | str = "cpu"
    whole: bool = True
    exact_random: bool = False
    debug: bool = False
    parts: bool = False
    remaking: Remaking | None = None


_DEFAULTS = ModuleOptions()

# Parts that copies of a module share; all others are copied with it.
_SHARED = (
    "_engine",
    "_storages",
    "_modes",
    "_guards",
    "_inputs",
    "other_stages",
    "gradient_state",
    "_graph",
    "_outputs",
    "_places",
    "_stand_in_places",
    "_buffer_places",
    "_parts",
)


class ParallelModule(HeldShards):
    """A model under a plan, whose parameters keep the original names.

    `values`: every parameter and constant whole, as a tensor or as a function that makes it (called
    one at a time). `aliases`: second names of tied parameters.

    With a `model`, calls, outputs and state dict are those of the original. With `whole`, outputs
    are plain tensors, whole on every rank; split outputs are gathered, which the plan does not
    price. Without `whole`, split outputs are DTensors. Either way a loss made of the outputs, the
    same on every rank, gives the gradients of one device. Without a `model`, `forward` takes the
    inputs of the graph and returns this rank's outputs in their planned layouts, the loss last if
    it is none of them.

    `loss(...)` gives the planned loss (the model's own scalar, the given function's, or the mean
    square of the outputs), whole on every rank, and gathers nothing. With several micro-batches or
    stages, gradients flow from the loss only. With `parts` a call gets this rank's part of the
    batch.
    """

    def __init__(
        self,
        execution: Program | Execution,
        groups: DeviceGroups | World,
        values: Values,
        *,
        model: LoadedModel | None = None,
        aliases: Mapping[str, str] | None = None,
        options: ModuleOptions = _DEFAULTS,
    ) -> None:
        super().__init__()
        self._device = torch.device(options.device)
        engine = Engine(execution, groups, self._device, self._stored, exact=options.exact_random)
        self._engine = engine
        self._storages = engine.storages
        self._modes = Modes(engine, options.remaking)
        self._graph = engine.graph
        self._parts = BatchParts(engine.graph, engine.world) if options.parts else None
        self._inputs = CallInputs(
            engine.graph,
            model,
            parts=self._parts,
            device=self._device,
            debug=options.debug,
            resizes=self._modes.follows,
        )
        self._outputs = CallOutputs(engine, model, whole=options.whole)
        self._structured = model is not None
        self._pads: dict[bool, Dims | None] = {}
        self._loss_is_output = model is not None and self._graph.loss in model.source.outputs
        if model is not None and model.torch is not None:
            recall(self, model.module, model.torch.reads)
            self._modes.facts = facts_of(self, model.torch)
        self.gradient_state = GradientState()
        self.other_stages = self._others(engine)
        self._hold(values, model, aliases, debug=options.debug)
        self._guards = Guards(self, self._modes)

    def planned_in(self, original: nn.Module, reads: Mapping[str, frozenset[str]]) -> None:
        """Be in the modes in which the original was planned, and know whether there are others."""
        self.train(original.training)
        self._modes.planned_in(original, reads)
        self._guards = Guards(self, self._modes)
        self._guards.take_over(original)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; shares that wait to be summed are dropped too."""
        super().zero_grad(set_to_none)
        self.gradient_state.pending.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A module with parameters and buffers of its own, on the same process groups."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        # Copies of parameters are leaves of autograd, with shards of their own.
        for parameter in self.parameters():
            memo[id(parameter)] = nn.Parameter(
                parameter.detach().clone(), requires_grad=parameter.requires_grad
            )
        own = {name: value for name, value in self.__dict__.items() if name not in _SHARED}
        other.__dict__.update({name: getattr(self, name) for name in _SHARED})
        other.__dict__.update(copy.deepcopy(own, memo))
        other._places = {
            name: (memo[id(module)], leaf) for name, (module, leaf) in self._places.items()
        }
        other._stand_in_places = {
            name: (memo[id(module)], leaf) for name, (module, leaf) in self._stand_in_places.items()
        }
        other._buffer_places = {
            name: (memo[id(module)], leaf) for name, (module, leaf) in self._buffer_places.items()
        }
        other.gradient_state = GradientState()
        other._engine = self._engine.copied(other._stored)
        other._modes = self._modes.on(other._engine)
        other.other_stages = other._others(other._engine)
        if other.other_stages is not None:
            other.other_stages.adopt(other.stand_ins().values())
        other._guards = Guards(other, other._modes)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: a rank has a part of the parameters, on its process groups."""
        raise PlanError(
            "a planned module cannot be pickled, as torch.save(module) does: save its "
            "state_dict(), or use autopar.save"
        )

    def _others(self, engine: Engine) -> OtherStages | None:
        anchor = self.gradient_state.anchor
        staged = engine.world.staged
        return OtherStages(engine, anchor, self.graph_parameters) if staged else None

    def gradients_are_reduced(self) -> None:
        """Tell this rank about the gradients of other stages (collective: every rank calls it)."""
        if self.other_stages is not None:
            self.other_stages.look(self.graph_parameters(), self.stand_ins())

    # --- calls ---

    def compile(self, **options: Any) -> None:
        """`torch.compile(..., **options)` of the work between gathers of units.

        That is a layer or more at a time.
        """
        self._modes.compile(options)

    @runs_as_it_is
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in their original structure."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise PlanError(
                "transforms of functions (grad, vmap, jacrev and others of torch.func) do not see "
                "into a planned module: call it plainly, with loss.backward()"
            )
        if not self._structured:
            return self.local_outputs(*args, **kwargs)
        self._require_no_gradient_from_outputs()
        inputs = self._inputs.agreed(args, kwargs)
        places = range(len(self._engine.outputs))
        # On one device every output that is made of parameters leads back to them.
        fitted = self._in_bucket(inputs)
        given = inputs if fitted is None else fitted.inputs
        engine, outputs = self._run(given, places, carries=torch.is_grad_enabled())
        return self._outputs.structured([outputs[place] for place in places], engine, fitted)

    def _require_no_gradient_from_outputs(self) -> None:
        """Refuse a call whose outputs would be thought to lead back to the parameters."""
        if not self._engine.gives_gradients_at_once or not torch.is_grad_enabled():
            return
        if self.loss_index is not None and not self._loss_is_output:
            raise PlanError(
                f"the plan runs {self._engine.in_words}, each with its backward pass, so that no "
                "gradient leads from the outputs back: call loss(...) for the planned loss, run "
                "under torch.no_grad() for the outputs alone, or plan without stages"
            )

    @runs_as_it_is
    def local_outputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """This rank's outputs in their planned layouts, the loss last if it is none of them."""
        places = range(len(self._engine.outputs))
        _, outputs = self._run(self._inputs.agreed(args, kwargs), places)
        return tuple(outputs[place] for place in places)

    @runs_as_it_is
    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The planned loss, whole on every rank.

        `loss(...).backward()` gives every parameter its gradient.
        """
        if self.loss_index is None:
            raise PlanError("the plan is for inference and has no loss; plan with mode='train'")
        inputs = self._inputs.agreed(args, kwargs)
        fitted = self._in_bucket(inputs)
        given = inputs if fitted is None else fitted.inputs
        _, outputs = self._run(given, [self.loss_index])
        return outputs[self.loss_index]

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step: loss, gradients, update; returns the loss.

        `batch`: a tensor, or arguments as a tuple or dict.
        """
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        if isinstance(batch, Mapping):
            kwargs = batch
        elif isinstance(batch, tuple | list):
            args = tuple(batch)
        else:
            args = (batch,)
        optimizer.zero_grad()
        loss = self.loss(*args, **kwargs)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over all stages.

        `parameters`: of these alone (None: of all).
        Returns the norm before, whole on every rank.
        """
        # Figures of the others' gradients follow, too.
        every: dict[str, Any] = {**self.graph_parameters(), **self.stand_ins()}
        if parameters is not None:
            chosen = {id(parameter) for parameter in parameters}
            every = {name: value for name, value in every.items() if id(value) in chosen}
        return clip_grad_norm(self._engine, every, max_norm, norm_type)

    def _in_bucket(self, inputs: Mapping[str, Tensor]) -> Padded | None:
        """The inputs padded to a bucket of lengths, where the loss is the same so."""
        place = self.loss_index
        fitted = padded(self._graph, inputs) if self._inputs.other_shapes(inputs) else None
        if fitted is None or place is None:
            return None
        if self.training not in self._pads:
            try:
                with torch.no_grad():
                    engine, exact = self._run(inputs, [place])
                    larger, other = self._run(fitted.inputs, [place])
                equal = equal_losses(exact[place], other[place])
                dims = padded_dims(engine.graph, larger.graph) if equal else None
                self._pads[self.training] = dims
            except PlanError:
                # The bucket has no program, such as one above the model's positions.
                self._pads[self.training] = None
        dims = self._pads[self.training]
        return None if dims is None else replace(fitted, dims=dims)

    def _run(
        self, inputs: Mapping[str, Tensor], wanted: Sequence[int], *, carries: bool = False
    ) -> tuple[Engine, dict[int, Tensor]]:
        """The engine of the inputs' sizes, and the outputs at the places `wanted`.

        `inputs`: by their names in the graph.
        `carries`: gradients may come back from all of them.
        """
        engine = self._modes.engine(
            training=self.training,
            changes=self._guards.changes(),
            modes=self._guards.present_modes,
            carries=carries,
            shapes=self._inputs.other_shapes(inputs),
        )
        whole = dict(inputs)
        for name in engine.constants:
            # Autograd may keep a constant's old value: changing constants are copied.
            value = engine.lifted.get(name)
            if value is None:
                value = self._constant(name)
            whole[name] = value.clone() if name in engine.graph.updates else value
        if self._parts is not None:
            whole = self._parts.joined(whole, engine)
        outputs, fresh = differentiable_call(self, engine, whole, wanted)
        with torch.no_grad():
            for name, value in fresh.items():
                # Written in place, since the caller and copies of the module hold this tensor.
                self._constant(name).copy_(value)
        return engine, outputs

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
        """Backward passes inside keep this rank's shares of gradients.

        The first one after it sums them over the ranks, into `.grad`.
        """
        before = self.gradient_state.synchronize
        self.gradient_state.synchronize = False
        try:
            yield
        finally:
            self.gradient_state.synchronize = before

    def full_outputs(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The whole outputs on every rank, from the result of `local_outputs`.

        The collectives are no part of the planned program.
        """
        return self._outputs.full(outputs)
