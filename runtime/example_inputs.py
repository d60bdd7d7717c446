"""Example inputs for a graph, drawn from a seed, for runs without data."""

from __future__ import annotations

import torch

from autopar.ir import Graph, Ref
from autopar.ir.graph import Tensor
from autopar.sharding.rules import RULES

_TABLES = {"aten.embedding.default": ("weight", "indices"), "onnx.Gather": ("data", "indices")}
DEFAULT_HIGH = 2
"""Integers that look nothing up are drawn below this."""


def example_values(graph: Graph, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One value for every input: floats normal, integers within the table that they look up, masks one."""
    generator = torch.Generator().manual_seed(seed)
    rows = _rows_looked_up(graph)
    return tuple(_draw(graph.tensors[name], rows.get(name, DEFAULT_HIGH), generator) for name in graph.inputs)


def _draw(tensor: Tensor, high: int, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if "mask" in tensor.name.lower():
        return torch.ones(tensor.shape, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
    if "position" in tensor.name.lower() and tensor.shape:
        return (
            torch.arange(tensor.shape[-1]).expand(tensor.shape).clamp(max=high - 1 if high > DEFAULT_HIGH else None).to(dtype).contiguous()
        )
    return torch.randint(0, high, tensor.shape, generator=generator).to(dtype)


def _rows_looked_up(graph: Graph) -> dict[str, int]:
    """For inputs that index a table, directly or through views: the rows of the smallest such table."""
    source = {name: name for name in graph.inputs}
    found: dict[str, int] = {}
    for operator in graph.operators:
        entry = RULES.get(operator.kind)
        if operator.kind in _TABLES:
            table, indices = (operator.attributes.get(name) for name in _TABLES[operator.kind])
            if isinstance(table, Ref) and isinstance(indices, Ref) and operator.inputs[indices.index] in source:
                name = source[operator.inputs[indices.index]]
                axis = operator.attributes.get("axis", 0)
                size = graph.tensors[operator.inputs[table.index]].shape[axis if isinstance(axis, int) else 0]
                found[name] = min(size, found.get(name, size))
        elif entry is not None and (entry.view or entry.linear == ((0,),)) and len(operator.inputs) == 1 and operator.inputs[0] in source:
            source.update(dict.fromkeys(operator.outputs, source[operator.inputs[0]]))
    return found
