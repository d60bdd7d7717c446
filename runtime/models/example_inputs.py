"""Example inputs for a graph, drawn from a seed, for runs without data."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

from autopar.ir import Graph, Operator, Ref
from autopar.ir.graph import Tensor
from autopar.model import LoadedModel
from autopar.sharding.rules import RULES

_TABLES = {
    "aten.embedding.default": ("weight", "indices"),
    "aten.embedding_bag.padding_idx": ("weight", "indices"),
}
DEFAULT_HIGH = 2
"""Integers that look nothing up are drawn below this."""


def example_values(graph: Graph, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One value for every input.

    Floats are normal, integers lie within the table that they look up, masks are one.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = rows_looked_up(graph)
    values = {
        name: _draw(graph.tensors[name], rows.get(name, DEFAULT_HIGH), generator)
        for name in graph.inputs
    }
    for operator in graph.operators:
        if "embedding_bag" in operator.kind and (offsets := operator.inputs[2]) in values:
            # Each bag has the element of its number, and the last one all others.
            starts = torch.arange(len(values[offsets])).to(values[offsets])
            values[offsets] = starts.clamp(max=graph.tensors[operator.inputs[1]].shape[0])
    return tuple(values.values())


def with_values(model: LoadedModel, seed: int) -> LoadedModel:
    """The model with example inputs that hold values: drawn where it has none, or only shapes."""
    inputs = model.inputs
    if inputs is not None and not any(value.is_meta for value in inputs):
        return model
    drawn = example_values(model.graph, seed)
    if inputs is not None:
        pairs = zip(inputs, drawn, strict=True)
        drawn = tuple(new if value.is_meta else value for value, new in pairs)
    if model.call is None:
        return model.with_inputs(drawn, None)
    values = iter(drawn)
    call = tree_map_only(torch.Tensor, lambda _: next(values), model.call)
    return model.with_inputs(drawn, call)


def _draw(tensor: Tensor, high: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    # A random mask may hide all keys of a query, whose softmax would be NaN.
    if "mask" in tensor.name.lower():
        return torch.ones(tensor.shape, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        # Drawn in one type, so that the same seed gives the same inputs, rounded, in every type.
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
    if "position" in tensor.name.lower() and tensor.shape:
        places = torch.arange(tensor.shape[-1]).expand(tensor.shape)
        # A table of positions may be shorter than the sequence.
        if high > DEFAULT_HIGH:
            places = places.clamp(max=high - 1)
        return places.to(dtype).contiguous()
    return torch.randint(0, high, tensor.shape, generator=generator).to(dtype)


def rows_looked_up(graph: Graph) -> dict[str, int]:
    """The rows of the smallest table that an input indexes, directly or through views."""
    # The input whose numbers a tensor holds.
    source = {name: name for name in graph.inputs}
    rows: dict[str, int] = {}
    for operator in graph.operators:
        if operator.kind in _TABLES:
            table, indices = (operator.attributes.get(name) for name in _TABLES[operator.kind])
            if not isinstance(table, Ref) or not isinstance(indices, Ref):
                continue
            name = source.get(operator.inputs[indices.index])
            if name is not None:
                axis = operator.attributes.get("axis", 0)
                shape = graph.tensors[operator.inputs[table.index]].shape
                size = shape[axis if isinstance(axis, int) else 0]
                rows[name] = min(size, rows.get(name, size))
        elif _keeps_numbers(operator) and operator.inputs[0] in source:
            source.update(dict.fromkeys(operator.outputs, source[operator.inputs[0]]))
    return rows


def _keeps_numbers(operator: Operator) -> bool:
    """Whether an operator only views or copies its single input."""
    entry = RULES.get(operator.kind)
    if entry is None or len(operator.inputs) != 1:
        return False
    return entry.view or entry.linear == ((0,),)
