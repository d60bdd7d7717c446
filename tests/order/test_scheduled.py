"""The collectives of a step under a schedule: what runs once, with every micro-batch, and again."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import PlanError
from autopar.ir import Role
from autopar.order.execution import execution
from autopar.order.scheduled import Scheduled, makes, reads, scheduled
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.pinned import pinned_assignment
from autopar.sharding.program import Assignment, Compute, build_program
from autopar.sharding.schedule import Schedule

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=96, sequence=16, dropout=False)
MESH = Mesh.of(data=2)


def _zero3() -> tuple[Assignment, Analysis]:
    """Data parallel, every parameter stored split."""
    analysis = analyse(transformer(SHAPE, batch=8).graph, train=True)
    wanted = {}
    for op in analysis.warm:
        options = analysis.offers[op.name].options
        scalar = not analysis.graph.tensors[op.outputs[0]].shape
        rows = [o for o in options if (o.inputs if scalar else o.outputs)[0] == S(0)]
        wanted[op.name] = [S(0) if rows else B]
    return pinned_assignment(analysis, MESH, wanted, split_storage=[0]), analysis


def _of(schedule: Schedule) -> Scheduled:
    return execution(*_zero3(), schedule).micro


def _of_parameters(plan: Scheduled) -> Counter[tuple[str, str]]:
    tensors = plan.program.graph.tensors
    return Counter((c.phase, c.kind) for c in plan.collectives() if tensors[c.tensor].role is Role.PARAMETER)


def test_one_micro_batch_with_nothing_again_is_the_program() -> None:
    assignment, analysis = _zero3()
    program = build_program(analysis.graph, assignment)
    assert scheduled(program).collectives() == program.collectives()
    assert [part.steps for part in scheduled(program).parts] == [tuple(range(len(program.steps)))]


def test_gathers_and_reductions_of_each_mode() -> None:
    gathers = Counter({key: n for key, n in _of_parameters(_of(Schedule())).items() if key[1] != "all_reduce"})
    count = gathers["forward", "all_gather"]
    assert count > 10 and gathers["backward", "reduce_scatter"] == count
    kept = _of_parameters(_of(Schedule(micro_batches=4)))
    assert kept == gathers, "gathered once, reduced once, whatever the number of micro-batches"
    shards = _of_parameters(_of(Schedule(micro_batches=4, accumulated="shards")))
    assert shards["forward", "all_gather"] == count and shards["backward", "reduce_scatter"] == 4 * count
    again = _of(Schedule(micro_batches=4, gathered="again"))
    found = _of_parameters(again)
    regathered = sum(map(len, again.regathered.values()))
    assert found["forward", "all_gather"] == found["backward", "reduce_scatter"] == 4 * count
    assert found["backward", "all_gather"] == 4 * regathered
    tensors = {again.program.steps[i].tensor for found in again.regathered.values() for i in found}  # type: ignore[union-attr]
    biases = {t.name for t in again.program.graph.parameters if t.name.endswith("attention.bias") or t.name.endswith("bias")}
    assert count // 3 < regathered < count, "weights are needed again, what is only added is not"
    assert not {name for name in tensors & biases if "norm" not in name}


def _layer(analysis: Analysis, number: int) -> tuple[str, ...]:
    return tuple(op.name for op in analysis.warm if op.name.startswith(f"layers.{number}."))


def test_a_segment_runs_again_before_its_backward_pass() -> None:
    assignment, analysis = _zero3()
    layers = tuple(_layer(analysis, number) for number in range(2))
    assert all(layers)
    for gathered in ("kept", "again"):
        plan = execution(assignment, analysis, Schedule(recompute=layers, gathered=gathered)).micro  # type: ignore[arg-type]
        names = [
            tuple(s.operator.name for i in part.steps if isinstance(s := plan.program.steps[i], Compute))
            for part in plan.parts
            if part.again
        ]
        assert names == list(layers), "each segment in one piece"
        found = _of_parameters(plan)
        inside = [i for part in plan.parts if part.again for i in part.steps if i in plan.modes]
        if gathered == "kept":
            assert not inside and found["backward", "all_gather"] == 0
        else:
            assert found["backward", "all_gather"] == len(inside) + sum(map(len, plan.regathered.values()))
            assert not set(inside) & {i for found in plan.regathered.values() for i in found}, "once, with the segment"


def test_parts_hold_every_step_once_and_in_an_order_that_runs() -> None:
    assignment, analysis = _zero3()
    names = [op.name for op in analysis.warm]
    for first in range(0, len(names) - 12, 5):
        plan = execution(assignment, analysis, Schedule(recompute=(tuple(names[first : first + 12 : 2]), tuple(names[first + 12 :])))).micro
        order = [index for part in plan.parts for index in part.steps]
        assert sorted(order) == list(range(len(plan.program.steps)))
        made = {place for index in order for place in makes(plan.program.steps[index])}
        known: set[object] = set()
        for index in order:
            step = plan.program.steps[index]
            assert all(place in known or place not in made for place in reads(step)), "nothing is read before it is made"
            known.update(makes(step))


def test_unknown_and_repeated_operators_are_named() -> None:
    assignment, analysis = _zero3()
    name = analysis.warm[3].name
    for wrong in ((("no such",),), ((name,), (name,))):
        with pytest.raises(PlanError, match=r"recomputes .* not in the model, or named twice"):
            execution(assignment, analysis, Schedule(recompute=wrong))
