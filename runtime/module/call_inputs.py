"""The inputs of the graph from the arguments of a call, checked on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.model import LoadedModel

from .arguments import Arguments, other_input
from .batch_parts import BatchParts
from .batches import Batches
from .changes import Shapes
from .data_assertions import require


class CallInputs:
    """Turns the arguments of calls into inputs of the graph."""

    def __init__(
        self,
        graph: Graph,
        model: LoadedModel | None,
        *,
        parts: BatchParts | None,
        device: torch.device,
        debug: bool,
        resizes: bool,
    ) -> None:
        self.graph = graph
        self.parts = parts
        self.device = device
        self._record = model.torch if model is not None else None
        asserts = self._record is not None and bool(self._record.checks)
        self.resizes = resizes and parts is None and not asserts
        self._arguments = Arguments.of(model) if model is not None else None
        self._batches = Batches(debug=debug)

    def agreed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs of a call, the same on every rank, except those that come in parts."""
        apart = self.parts.shapes if self.parts is not None else ()
        return self._batches.agreed(lambda: self._checked(args, kwargs), self.device, apart)

    def _checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs, of which the model's assertions hold; parts of a batch are not asked."""
        inputs = self._named(args, kwargs)
        for name, tensor in inputs.items():
            self._require_as_planned(name, tensor)
        # The program itself moves the needed parts to another device.
        if self.device.type == "cpu":
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        if self._record is not None and self._record.checks and self.parts is None:
            require(self._record.checks, {**self._record.constants, **inputs})
        return inputs

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inputs by their names in the graph, in its order."""
        if self._arguments is not None:
            args = tuple(self._arguments.tensors(args, kwargs))
            kwargs = {}
        names = self.graph.inputs
        inputs = dict(zip(names, args, strict=False)) | dict(kwargs)
        # The counts differ if an input is given twice, by place and by name.
        if set(inputs) != set(names) or len(args) + len(kwargs) != len(names):
            by_name = ", ".join(kwargs) or "none"
            raise PlanError(
                f"the model takes the inputs {', '.join(names)}; given are {len(args)} "
                f"and {by_name} by name"
            )
        return {name: inputs[name] for name in names}

    def other_shapes(self, inputs: Mapping[str, Tensor]) -> Shapes | None:
        """The shapes of inputs that are not as planned; None where all are."""
        shapes = tuple(tuple(inputs[name].shape) for name in self.graph.inputs)
        planned = tuple(self.graph.tensors[name].shape for name in self.graph.inputs)
        return None if shapes == planned or self.parts is not None else shapes

    def _require_as_planned(self, name: str, tensor: Tensor) -> None:
        """Refuse an input of another type, or of other sizes where no program can follow."""
        wanted = self.graph.tensors[name]
        shape = wanted.shape
        if self.parts is not None:
            shape = self.parts.shapes.get(name, shape)
        as_planned = tuple(tensor.shape) == shape
        follows = self.resizes and tensor.dim() == len(shape) and 0 not in tensor.shape
        if not (as_planned or follows) or tensor.dtype != getattr(torch, wanted.dtype):
            raise PlanError(other_input(name, tensor, wanted, shape))
        if tensor.requires_grad and torch.is_grad_enabled():
            raise PlanError(
                f"input {name!r} requires a gradient, which a plan has for parameters only; "
                "give it detached"
            )
