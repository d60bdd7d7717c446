"""A view of a gathered parameter is gathered for every backward pass that reads it; torch itself
says which operators give views.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.order.scheduled import scheduled
from autopar.order.units import Mode
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import B, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Redistribute
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import Schedule
from tests.sharding.assigned import graph_of
from tests.sharding.direct_assignment import pinned_assignment

Way = Callable[[Tensor], Tensor]


class _Factor(nn.Module):
    """A product whose second factor is made of a weight, [4, 12]; only the first factor has a
    gradient that needs it.
    """

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(4, 12))
        self.first = nn.Linear(8, way(self.weight).shape[0])

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.first(x) @ self.way(self.weight)
        return product


WAYS: dict[str, tuple[Way, bool]] = {
    "itself": (lambda w: w, True),
    "transposed": (lambda w: w.transpose(0, 1), True),
    "in other rows": (lambda w: w.reshape(6, 8), True),
    "twice in other rows": (lambda w: w.reshape(12, 4).reshape(6, 8), True),
    "flat between": (lambda w: w.reshape(48).reshape(6, 8), True),
    "a block of it": (lambda w: w.reshape(2, 2, 12)[1].reshape(8, 3), True),
    "one row, transposed twice": (lambda w: w.reshape(1, 48).t().reshape(6, 8), True),
    "another layout": (lambda w: w.reshape(12, 4).contiguous(), True),
    "its sine": (lambda w: w.sin(), True),
    "doubled": (lambda w: w * 2, False),
    "doubled in other rows": (lambda w: (w * 2).reshape(6, 8), False),
}
"""Of a weight a factor, and whether the backward pass reads the weight."""


@pytest.mark.parametrize("name", WAYS)
def test_the_backward_pass_has_what_it_reads(name: str) -> None:
    way, read = WAYS[name]
    module = _Factor(way)
    shared = (
        way(module.weight).untyped_storage().data_ptr()
        == module.weight.untyped_storage().data_ptr()
    )
    assert read or not shared
    analysis = analyse(graph_of(module, 16, 8), train=True)
    rows = {
        op.name: S(0) if op.inputs[0] in ("x", "linear") or op.name == analysis.warm[-1].name else B
        for op in analysis.warm
    }
    assignment = pinned_assignment(
        analysis, Mesh.of(data=2), {name: [p] for name, p in rows.items()}, split_storage=[0]
    )
    plan = scheduled(
        build_program(analysis.graph, assignment), Schedule(unit_bytes=1, gathered="per_pass")
    )
    members = {
        unit.number: plan.program.steps[unit.members[0]]
        for unit in plan.units
        if unit.mode is Mode.PER_PASS
    }
    (unit,) = (
        number
        for number, step in members.items()
        if isinstance(step, Redistribute) and step.tensor == "weight"
    )
    assert any(unit in segment.wanted for segment in plan.segments) is read
