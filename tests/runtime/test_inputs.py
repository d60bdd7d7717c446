"""Inputs stay where the caller has them: of each no more goes to the rank's device than the parts that it reads there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costmodel.memory import predicted_memory
from autopar.ir import DTYPE_BYTES, Graph
from autopar.order.execution import execution
from autopar.runtime.collectives import DeviceGroups
from autopar.runtime.local_program import Time
from autopar.runtime.lowering import lower, lower_preamble, lower_scheduled
from autopar.runtime.measuring.memory import fake_world
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import R, S
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.pinned import pinned_assignment
from autopar.sharding.program import Assignment, build_program
from autopar.sharding.schedule import Schedule
from tests.runtime.helpers import GraphBuilder

RANKS, BATCH, WIDTH = 4, 16, 8


class _Arrivals(TorchDispatchMode):
    """The shapes that go from the host to the rank's device, which is none here."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = next((a for a in args if isinstance(a, Tensor)), None)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and given is not None and (given.device.type, out.device.type) == ("cpu", "meta"):
            self.shapes[tuple(out.shape)] += 1
        return out


def _graph() -> Graph:
    """A product of rows that are split, beside the count of rows marked, for which every rank needs all of the marks."""
    build = GraphBuilder("float32")
    rows, marks = build.input("rows", BATCH, WIDTH), build.input("marks", BATCH)
    count = build.one("aten.sum.default", (), self=marks)
    product = build.one("aten.linear.default", (BATCH, WIDTH), input=rows, weight=build.parameter("w", WIDTH, WIDTH))
    scaled = build.one("aten.mul.Tensor", (BATCH, WIDTH), self=product, other=count)
    return build.finish("counted", [scaled])


def _assigned() -> tuple[Analysis, Assignment]:
    analysis = analyse(_graph(), train=True)
    mesh = Mesh(axes=(Axis(name="data", size=RANKS, level="nic"),))
    wanted = {op.name: (S(0),) for op in analysis.warm}
    return analysis, pinned_assignment(analysis, mesh, wanted)


def _values(names: Sequence[str], graph: Graph, device: str) -> list[Tensor]:
    return [torch.ones(graph.tensors[name].shape, device=device) for name in names]


def test_a_device_gets_the_part_that_it_reads() -> None:
    analysis, assignment = _assigned()
    program = build_program(analysis.graph, assignment)
    with fake_world(RANKS), _Arrivals() as seen:
        local = lower(program, DeviceGroups.create(assignment.mesh), device="meta")
        local.module(*_values(local.parameters, analysis.graph, "meta"), *_values(local.inputs, analysis.graph, "cpu"))
    assert seen.shapes == {(BATCH // RANKS, WIDTH): 1, (BATCH,): 1}
    stored = predicted_memory(program, analysis, optimizer="none").parameters
    assert stored == DTYPE_BYTES["float32"] * (WIDTH * WIDTH + BATCH // RANKS * WIDTH + BATCH)


def test_of_a_micro_batch_the_part_that_it_reads() -> None:
    analysis, assignment = _assigned()
    found = execution(assignment, analysis, Schedule(micro_batches=2))
    assert found.split is not None
    with fake_world(RANKS), _Arrivals() as seen:
        groups = DeviceGroups.create(assignment.mesh)
        local = lower_scheduled(found.whole, groups, device="meta", time=Time(split=found.split, count=2, index=0))
        cut = [torch.ones(BATCH // 2, WIDTH) if name == "rows" else torch.ones((), device="meta") for name, _ in local.sources]
        local.module(*_values(local.parameters, analysis.graph, "meta"), *cut)
        assert seen.shapes == {(BATCH // 2 // RANKS, WIDTH): 1}
        (counted,) = {name for name, _ in local.sources} - {"rows"}
        preamble, given = lower_preamble(found.whole, groups, [counted], device="meta")
        preamble(*_values(given, analysis.graph, "cpu"))
        assert seen.shapes.pop((BATCH,)) == 1 and given == ("marks",)
    tensors = found.micro.program.graph.tensors
    assert tensors["rows"].shape == (BATCH // 2, WIDTH), "what is on the device at once"
    assert tensors["marks"].shape == (BATCH,), "counted once for all micro-batches"


@pytest.mark.parametrize("again", [True, False])
def test_inside_what_is_recomputed_too(again: bool) -> None:
    """The part is cut before the recomputed segment that reads it, and kept, not the whole input."""
    analysis, assignment = _assigned()
    names = tuple(op.name for op in analysis.warm[:2])
    plan = execution(assignment, analysis, Schedule(recompute=(names,) if again else ())).whole
    with fake_world(RANKS), _Arrivals() as seen:
        local = lower_scheduled(plan, DeviceGroups.create(assignment.mesh), device="meta")
        weights = [value.requires_grad_() for value in _values(local.parameters, analysis.graph, "meta")]
        local.module(*weights, *_values(local.inputs, analysis.graph, "cpu"))[local.loss or 0].backward()
    assert seen.shapes == {(BATCH // RANKS, WIDTH): 1, (BATCH,): 1}
    assert assignment.chains["rows"] == (((R,), (S(0),)),)
