"""Inputs stay where the caller has them: of each no more goes to the rank's device than the parts
that it reads there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costmodel.memory.peak import predicted_memory
from autopar.ir import DTYPE_BYTES, Graph
from autopar.order.execution import Execution, execution
from autopar.runtime.execution.engine import Engine
from autopar.runtime.random_numbers.draw_state import Draws
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import R, S
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Assignment, Compute, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import Schedule
from benchmarks.tracked_memory import bytes_of_views, fake_world
from tests.runtime.helpers import GraphBuilder
from tests.sharding.direct_assignment import pinned_assignment

RANKS = 4
BATCH = 16
WIDTH = 8


class _Arrivals(TorchDispatchMode):
    """The shapes that go from the host to the rank's device, which is none here."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = next((a for a in args if isinstance(a, Tensor)), None)
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and given is not None
            and (given.device.type, out.device.type) == ("cpu", "meta")
        ):
            self.shapes[tuple(out.shape)] += 1
        return out


def _graph() -> Graph:
    """A product of rows that are split, beside the count of rows marked, for which every rank needs
    all of the marks.
    """
    build = GraphBuilder("float32")
    rows = build.input("rows", BATCH, WIDTH)
    marks = build.input("marks", BATCH)
    count = build.one("aten.sum.default", (), self=marks)
    product = build.one(
        "aten.linear.default", (BATCH, WIDTH), input=rows, weight=build.parameter("w", WIDTH, WIDTH)
    )
    scaled = build.one("aten.mul.Tensor", (BATCH, WIDTH), self=product, other=count)
    return build.finish("counted", [scaled])


def _assigned() -> tuple[Analysis, Assignment]:
    analysis = analyse(_graph(), train=True)
    mesh = Mesh(axes=(Axis(name="data", size=RANKS, level="nic"),))
    wanted = {op.name: (S(0),) for op in analysis.warm}
    return analysis, pinned_assignment(analysis, mesh, wanted)


def _moved(plan: Program | Execution, graph: Graph, *, train: bool) -> Counter[tuple[int, ...]]:
    """The bytes that go to the device of a rank when it runs a call (with `train` a step) on inputs
    that are on the host.
    """
    weights = {t.name: torch.ones(t.shape, device="meta") for t in graph.parameters}
    inputs = {name: torch.ones(graph.tensors[name].shape) for name in graph.inputs}
    mesh = plan.assignment.mesh if isinstance(plan, Program) else plan.chunks[0].mesh
    with fake_world(RANKS), _Arrivals() as seen:
        engine = Engine(plan, DeviceGroups.create(mesh), torch.device("meta"), weights.__getitem__)
        call = engine.begin(inputs, keep=train, draws=Draws())
        engine.begin_backward(call, 1.0)
        with torch.no_grad():
            call.run(engine.training_order if train else engine.forward_order)
        assert not train or engine.home({0: call.passings[0].gradients}).keys() == weights.keys()
    return seen.shapes


def test_a_device_gets_the_part_that_it_reads() -> None:
    analysis, assignment = _assigned()
    program = build_program(analysis.graph, assignment)
    assert _moved(program, analysis.graph, train=False) == {(BATCH // RANKS, WIDTH): 1, (BATCH,): 1}
    stored = predicted_memory(program, analysis, optimizer="none").parameters
    assert stored == DTYPE_BYTES["float32"] * (WIDTH * WIDTH + BATCH // RANKS * WIDTH + BATCH)


def test_parts_that_lie_together_are_views_on_the_host() -> None:
    """Rows one after the other, and what is whole; columns, and rows in several pieces, are copied,
    and tracked as what is made.
    """
    analysis, assignment = _assigned()
    program = build_program(analysis.graph, assignment)
    whole = BATCH * DTYPE_BYTES["float32"]
    for placement, rows in (
        (S(0), WIDTH * whole // RANKS),
        (S(1), 0),
        (S(0, 2), 0),
        (R, WIDTH * whole),
    ):
        steps = [
            replace(
                step,
                decision=replace(step.decision, inputs=((placement,), *step.decision.inputs[1:])),
            )
            if isinstance(step, Compute) and step.operator.inputs[0] == "rows"
            else step
            for step in program.steps
        ]
        assert bytes_of_views(replace(program, steps=tuple(steps))) == rows + whole


@pytest.mark.parametrize("train", [True, False])
def test_of_a_micro_batch_the_part_that_it_reads(train: bool) -> None:
    analysis, assignment = _assigned()
    actual = execution(assignment, analysis, Schedule(micro_batches=2))
    moved = _moved(actual, analysis.graph, train=train)
    assert moved == {(BATCH // 2 // RANKS, WIDTH): 2, (BATCH,): 1}, (
        "the marks are counted once for all micro-batches"
    )
    tensors = actual.micro.program.graph.tensors
    assert tensors["rows"].shape == (BATCH // 2, WIDTH), "what is on the device at once"
    assert tensors["marks"].shape == (BATCH,), "counted once for all micro-batches"


@pytest.mark.parametrize("again", [True, False])
def test_inside_what_is_recomputed_too(again: bool) -> None:
    """A segment that is computed again takes its part from the host once more, and never the whole
    input.
    """
    analysis, assignment = _assigned()
    names = tuple(op.name for op in analysis.warm[:2])
    actual = execution(assignment, analysis, Schedule(recompute=(names,) if again else ()))
    assert any(segment.recomputed for segment in actual.whole.segments) == again
    assert _moved(actual, analysis.graph, train=True) == {
        (BATCH // RANKS, WIDTH): 2 if again else 1,
        (BATCH,): 1,
    }
    assert assignment.chains["rows"] == (((R,), (S(0),)),)
