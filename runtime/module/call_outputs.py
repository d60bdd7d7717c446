"""The outputs of a call as the caller sees them, from this rank's outputs in planned layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.model import LoadedModel
from autopar.runtime.execution.engine import Engine
from autopar.runtime.parameters.torch_layouts import placements_of
from autopar.runtime.redistribution.steps import apply_chain, gather_full, whole_chain
from autopar.sharding.layout import R

from .padding import Padded


class CallOutputs:
    """Turns outputs of the graph into the original model's.

    `whole`: split outputs are gathered, else they are DTensors.
    """

    def __init__(self, engine: Engine, model: LoadedModel | None, *, whole: bool) -> None:
        self.engine = engine
        self.whole = whole
        self._record = model.torch if model is not None else None
        self._has_loss_function = model is not None and model.loss is not None

    def structured(self, local: Sequence[Tensor], engine: Engine, fitted: Padded | None) -> Any:
        """The outputs in their original structure, from all outputs of an engine.

        `fitted`: the call in its bucket, if it was padded.
        """
        names = (name for name, _ in engine.outputs)
        values = dict(zip(names, local, strict=True))
        record = self._record
        if record is None:
            made = engine.graph.outputs
            outputs = tuple(self._global(values[name], name, engine, fitted) for name in made)
            return outputs[0] if len(outputs) == 1 else outputs
        # Outputs that are no tensors were fixed when the model was planned.
        leaves = list(record.output_values or (None,) * len(record.output_names))
        for place, name in enumerate(record.output_names):
            if name is not None:
                leaves[place] = self._global(values[name], name, engine, fitted)
        structured = pytree.tree_unflatten(leaves, record.out_spec)
        # The loss function's value stands behind the model's own outputs.
        return structured[0] if self._has_loss_function else structured

    def full(self, local: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The whole outputs on every rank, from all outputs of the engine."""
        whole = []
        for value, (_, layout) in zip(local, self.engine.outputs, strict=True):
            # With stages outputs have no layout: they are whole already.
            whole.append(gather_full(value, layout, self.engine.groups) if layout else value)
        return tuple(whole)

    def _global(self, value: Tensor, name: str, engine: Engine, fitted: Padded | None) -> Tensor:
        """An output that is whole, or a DTensor of which this rank holds a part."""
        whole = self._in_bucket(value, name, engine)
        return whole if fitted is None else fitted.cut_back(name, whole)

    def _in_bucket(self, value: Tensor, name: str, engine: Engine) -> Tensor:
        """The output with its padding, if there is any."""
        layout = dict(engine.outputs)[name]
        if all(placement == R for placement in layout):
            return value
        groups = engine.groups
        if self.whole:
            return apply_chain(value, whole_chain(layout), groups, gradient=True)
        tensor = engine.graph.tensors[name]
        # That of the whole; torch would derive the stride from this rank's part.
        stride = torch.empty(tensor.shape, device="meta").stride()
        places = placements_of(layout, groups.mesh.shape)
        return DTensor.from_local(
            value,
            engine.device_mesh(),
            places,
            run_check=False,
            shape=torch.Size(tensor.shape),
            stride=stride,
        )
