"""Gathers before a step whose batch comes in equal parts, part i on device i of a stage.

An input that every reader cuts into just these parts is read as it comes. Any other input is
gathered on the stage, over the mesh axes from the innermost outwards, which keeps the parts in the
order of the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import Graph
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Redistribute

from .execution import Chunk, Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class PartGather:
    """An all-gather of an input on a mesh axis; `nbytes`: bytes of the gathered result."""

    name: str
    axis: int
    nbytes: int


def batch_of(graph: Graph) -> int:
    """The size of the batch: of the first dim of the first input that has one; 0 without any."""
    return next((shape[0] for name in graph.inputs if (shape := graph.tensors[name].shape)), 0)


def comes_in_parts(graph: Graph, name: str) -> bool:
    """Whether an input runs over the batch."""
    shape = graph.tensors[name].shape
    return bool(shape) and shape[0] == batch_of(graph)


def gathered_inputs(execution: Execution, stage: int) -> tuple[str, ...]:
    """The inputs that a stage needs whole, or in other parts than the ones that come."""
    chunks = execution.chunks[stage :: execution.stages]
    if chunks[0].mesh.devices == 1:
        return ()
    graph = execution.graph
    return tuple(
        name
        for name in graph.inputs
        if comes_in_parts(graph, name) and not all(_as_it_comes(chunk, name) for chunk in chunks)
    )


def _as_it_comes(chunk: Chunk, name: str) -> bool:
    """Whether a chunk reads only those parts of an input that its devices hold."""
    program = chunk.whole.program
    if name in program.assignment.outputs:
        return False
    reached: set[Layout] = set()
    for step in program.steps:
        if isinstance(step, Redistribute):
            if step.tensor != name:
                continue
            # A micro-batch takes samples from all parts, so that no device holds just its own.
            if chunk.split is not None or not (
                step.chain[0] in reached or _cut_first(step.chain, chunk.mesh)
            ):
                return False
            reached.add(step.chain[-1])
        elif any(
            read == name and layout not in reached
            for read, layout in zip(step.operator.inputs, step.decision.inputs, strict=False)
        ):
            return False
    return True


def _cut_first(chain: Sequence[Layout], mesh: Mesh) -> bool:
    """Whether a chain first of all slices what is whole until every device has its part."""
    for before, after in itertools.pairwise(chain):
        pairs = zip(before, after, strict=True)
        if not all(
            a == b or (a.kind in (Kind.REPLICATED, Kind.BROADCAST) and b.kind is Kind.SPLIT)
            for a, b in pairs
        ):
            return False
        if _is_cut(after, mesh):
            return True
    return False


def _is_cut(layout: Layout, mesh: Mesh) -> bool:
    """Whether a layout gives every device its part of dim 0."""
    pairs = zip(layout, mesh.shape, strict=True)
    return all(
        size == 1 or (p.kind is Kind.SPLIT and p.dim == 0 and p.parts == 1) for p, size in pairs
    )


def part_gathers(execution: Execution, stage: int) -> Iterator[PartGather]:
    """The all-gathers of a stage before a step, in their order."""
    mesh = execution.chunks[stage].mesh
    for name in gathered_inputs(execution, stage):
        for axis in reversed(range(len(mesh.shape))):
            if mesh.shape[axis] > 1:
                yield PartGather(
                    name=name,
                    axis=axis,
                    nbytes=execution.graph.tensors[name].bytes // math.prod(mesh.shape[:axis]),
                )
