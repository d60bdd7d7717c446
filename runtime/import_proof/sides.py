"""The two sides of a proof: the module as it was written, and the graph as it was read.

Both run on the same parameters, inputs and random numbers. The gradients are those of

    sum of w_i * y_i over all elements y_i of all float outputs, w_i drawn once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.runtime.checking.differences import nudged
from autopar.runtime.checking.reference import Original
from autopar.runtime.models.graph_run import Watch, run_operators

from .trials import NoTrial, Trial

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Outputs by name, with buffers after the pass, and gradients by name; None: there is none."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


class Sides:
    """Runs both sides of a trial. `leaves`: what gets gradients, by name."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.graph = trial.model.source
        imported = trial.model.torch
        assert imported is not None
        self.imported = imported
        self.buffers = {
            name: value.clone()
            for name, value in trial.module.named_buffers(remove_duplicate=False)
        }
        parameters = dict(trial.module.named_parameters())
        self.leaves: dict[str, Tensor] = {
            tensor.name: parameters[tensor.name]
            for tensor in self.graph.parameters
            if tensor.trainable
        }
        self.parameters = parameters
        leaves, spec = pytree.tree_flatten(trial.model.call)
        self.call = pytree.tree_unflatten([_own(leaf) for leaf in leaves], spec)

    def written(self) -> Side:
        """The module, called as in its example."""
        module = self.trial.module
        original = Original(self.trial.model, module, self.call)
        # An earlier pass may have changed them.
        for name, value in module.named_buffers(remove_duplicate=False):
            value.data.copy_(self.buffers[name])
        with _drawing_alike():
            given = pytree.tree_leaves(original())
            names = self.imported.output_names
            if len(given) != len(names):
                raise NoTrial(f"it gives {len(given)} outputs, its graph has {len(names)}")
            outputs = {
                name: value
                for name, value in zip(names, given, strict=True)
                if name is not None and isinstance(value, Tensor)
            }
            return self._side(outputs, dict(module.named_buffers(remove_duplicate=False)))

    def perturbed(self) -> Side:
        """The module as written, with its parameters off by a rounding."""
        before = {value: value.data for value in self.parameters.values()}
        try:
            for value, data in before.items():
                value.data = nudged(data)
            return self.written()
        finally:
            for value, data in before.items():
                value.data = data

    def tensors(self) -> dict[str, Tensor]:
        """Inputs, parameters, buffers and constants, by their names in the graph."""
        inputs = [leaf for leaf in pytree.tree_leaves(self.call) if isinstance(leaf, Tensor)]
        return {
            **self.imported.constants,
            **{name: value.clone() for name, value in self.buffers.items()},
            **self.parameters,
            **dict(zip(self.graph.inputs, inputs, strict=True)),
        }

    def read(self, watch: Watch | None = None) -> Side:
        """The graph, operator by operator."""
        tensors = self.tensors()
        with _drawing_alike():
            run_operators(self.graph, tensors, [[]] * len(self.graph.operators), watch)
            outputs = {name: tensors[name] for name in self.graph.outputs}
            after = {name: tensors[made] for name, made in self.graph.updates.items()}
            return self._side(outputs, {**self.buffers, **after})

    def _side(self, outputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Side:
        present = {
            **{name: _copied(value) for name, value in outputs.items()},
            **{name: _copied(buffers[name]) for name in self.graph.updates},
        }
        total = weighed(
            [outputs[n] if outputs[n].requires_grad else None for n in self.graph.outputs]
        )
        if total is None:
            return Side(outputs=present, gradients=dict.fromkeys(self.leaves))
        given = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        return Side(outputs=present, gradients=dict(zip(self.leaves, given, strict=True)))


def _own(leaf: Any) -> Any:
    """An input of the trial's own."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _copied(value: Tensor) -> Tensor:
    """A copy of a result, of a complex one both parts."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).clone()


@contextmanager
def _drawing_alike() -> Iterator[None]:
    """Random numbers from one seed; the caller's generator goes on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def weighed(outputs: Sequence[Tensor | None]) -> Tensor | None:
    """The weighed sum of all outputs; None without any."""
    total = None
    for place, value in enumerate(outputs):
        if value is None:
            continue
        value = torch.view_as_real(value) if value.is_complex() else value
        draw = torch.Generator().manual_seed(SEED + place + 1)
        # The mean, so that large outputs do not hide small ones.
        weights = torch.randn(value.shape, generator=draw, dtype=torch.float64) / value.numel()
        part = (value * weights.to(value)).sum().double()
        total = part if total is None else total + part
    return total
