"""Finds the first operator of a graph whose value the model, as it was written, never computes.

Values are told apart by figures that views and permutations leave as they are: the number of
elements, their mean and their mean square. An operator is the first one to differ if all of its
inputs are among the model's values and its results, on the way to what differs, are not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir import Graph, Operator

from .sides import Sides

NEAR = 1e-5
"""The relative difference of two figures that rounding may make."""


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The figures of all that is computed while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.figures: dict[int, list[tuple[float, float]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note its results."""
        result = func(*args, **(kwargs or {}))
        self.note(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def note(self, values: Iterable[Tensor]) -> None:
        """Note the figures of values."""
        with torch.utils._python_dispatch._disable_current_modes():
            for value in values:
                self.figures.setdefault(value.numel(), []).append(_figures(value))

    def sort(self) -> None:
        """Be ready to be asked."""
        for figures in self.figures.values():
            figures.sort()

    def hold(self, value: Tensor) -> bool:
        """Whether a value was computed, in any layout."""
        figures = self.figures.get(value.numel(), [])
        square, mean = _figures(value)
        near = NEAR * square
        place = bisect_left(figures, (square - near, float("-inf")))
        while place < len(figures) and figures[place][0] <= square + near:
            if abs(figures[place][1] - mean) <= NEAR * square**0.5:
                return True
            place += 1
        return False


def _figures(value: Tensor) -> tuple[float, float]:
    """The mean square and the mean of all elements."""
    wide = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    wide = torch.nan_to_num(wide.detach().double(), posinf=1e30, neginf=-1e30)
    if not wide.numel():
        return 0.0, 0.0
    return float((wide * wide).mean()), float(wide.mean())


def first_difference(sides: Sides, name: str, *, of_gradient: bool) -> str:
    """The first operator with another value than the model has, in words; "" where none is found.

    `name`: the output that differs, or the parameter whose gradient does.
    """
    values = _Values()
    with values:
        sides.written()
    values.note([*sides.tensors().values()])
    values.sort()
    known = {key for key, value in sides.tensors().items() if values.hold(value)}

    def seen(operator: Operator, results: tuple[Tensor, ...]) -> None:
        known.update(
            key for key, value in zip(operator.outputs, results, strict=False) if values.hold(value)
        )

    sides.read(seen)
    graph = sides.graph
    wanted = {graph.updates.get(name, name)} if not of_gradient else {*graph.outputs}
    for operator in _differing(graph, known, wanted):
        if all(key in known for key in operator.inputs):
            return f"; the first operator with another value is {operator.name!r} ({operator.kind})"
    return readers(graph, name) if of_gradient else ""


def _differing(graph: Graph, known: set[str], wanted: set[str]) -> Iterator[Operator]:
    """The operators whose unknown results lead to `wanted` by unknown values alone, in order."""
    lost = wanted - known
    differing = []
    for operator in reversed(graph.operators):
        if not lost.isdisjoint(operator.outputs):
            lost.update(key for key in operator.inputs if key not in known)
            differing.append(operator)
    return reversed(differing)


def readers(graph: Graph, name: str) -> str:
    """The first operator that reads a tensor, in words."""
    first = next((op for op in graph.operators if name in op.inputs), None)
    return f"; its first reader is {first.name!r} ({first.kind})" if first else "; nothing reads it"
