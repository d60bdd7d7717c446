"""Chunks of a plan with stages: who runs what, what they hand to one another, and that together
they are the whole program.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir import Graph, Role
from autopar.order.actions import Word
from autopar.order.execution import Chunk, Execution
from autopar.order.plan_on_mesh import Decided
from autopar.order.ranks import rank_order, tied_parameters
from autopar.order.stages import Pipelined, staged_execution
from autopar.order.value_flow import makes, reads
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, Layout, R, S, is_valid
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Compute, Program, Redistribute
from autopar.sharding.program_builder import build_program
from autopar.sharding.rules import without_parameters
from autopar.sharding.schedule import PLAIN, Schedule
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.order.order_checks import check_order
from tests.sharding.assigned import graph_of
from tests.sharding.direct_assignment import pinned_assignment

SHAPE = Shape(
    layers=4, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=96, sequence=16, dropout=False
)
Chains = Mapping[str, tuple[tuple[Layout, ...], ...]]
EMPTY: Chains = MappingProxyType({})
TWO = Mesh.of(data=2)
FOUR = Mesh.of(data=4)
SQUARE = Mesh.of(node=2, gpu=2)


class Skips(nn.Module):
    """A value of the first part is read by the last one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.b(y)) + y


@functools.cache
def _model(name: str) -> Graph:
    if name == "skips":
        return graph_of(Skips(), 16, 8)
    return transformer(replace(SHAPE, tied=name == "tied"), batch=16).graph


@functools.cache
def _analysis(name: str) -> Analysis:
    return analyse(_model(name), train=True)


@functools.cache
def _assignment(name: str, mesh: Mesh, split: bool) -> Assignment:
    """Data parallel over all axes, with `split` every parameter stored split over the last one."""
    analysis = _analysis(name)
    wanted = {}
    for op in analysis.warm:
        scalar = not analysis.graph.tensors[op.outputs[0]].shape
        rows = [
            o
            for o in analysis.offers[op.name].options
            if (o.inputs if scalar else o.outputs)[0] == S(0)
        ]
        wanted[op.name] = [S(0) if rows else B] * len(mesh.axes)
    return pinned_assignment(
        analysis, mesh, wanted, split_storage=[len(mesh.axes) - 1] if split else []
    )


def _firsts(name: str, count: int) -> tuple[str, ...]:
    """The operators with which so many chunks begin: what precedes the layers, then layers."""
    operators = [op.name for op in _model(name).operators]
    if name == "skips":
        starts = ["a/linear", "b/linear", "c/linear"]
    else:
        starts = [
            next(o for o in operators if o.startswith(f"layers.{number * 4 // count}."))
            for number in range(count)
        ]
    return (operators[0], *starts[1:count])


def _staged(
    name: str,
    meshes: Sequence[Mesh],
    *,
    split: bool = False,
    schedule: Schedule = PLAIN,
    interleave: int = 1,
    chains: Chains = EMPTY,
) -> Execution:
    first = _assignment(name, meshes[0], split)
    decided = Decided(
        decide=lambda operator, mesh: _assignment(name, mesh, split).decisions[operator],
        storage=first.storage,
        outputs=first.outputs,
        chains={**first.chains, **chains},
        host=frozenset(),
    )
    cut = Pipelined(
        firsts=_firsts(name, len(meshes)),
        meshes=meshes,
        pipeline="1f1b",
        interleave=interleave,
        schedule=schedule,
    )
    return staged_execution(_analysis(name), decided, cut)


CASES = {
    "two stages": ("plain", (TWO, TWO)),
    "four stages, a tied head": ("tied", (TWO,) * 4),
    "of two axes": ("tied", (SQUARE, SQUARE)),
    "unequal meshes": ("tied", (TWO, FOUR)),
    "unequal meshes of unequal axes": ("plain", (SQUARE, TWO, FOUR, TWO)),
    "values that skip a stage": ("skips", (TWO, TWO, TWO)),
    "they skip a larger one": ("skips", (TWO, FOUR, TWO)),
}


def _all(split: bool = False, **options: int) -> list[tuple[str, Execution]]:
    return [
        (name, _staged(name, meshes, split=split, schedule=Schedule(**options)))
        for name, meshes in CASES.values()
    ]  # type: ignore[arg-type]


def _operators(chunk: Chunk) -> list[str]:
    return [step.operator.name for step in chunk.whole.program.steps if isinstance(step, Compute)]


def test_every_operator_runs_in_one_chunk_or_is_made_again() -> None:
    for name, staged in _all():
        ran = Counter(itertools.chain.from_iterable(map(_operators, staged.chunks)))
        graph = _model(name)
        analysis = _analysis(name)
        free = {op.name for op in without_parameters(graph)} | set(analysis.cold)
        read = {tensor for op in graph.operators for tensor in op.inputs} | set(analysis.outputs)
        assert all(ran[op.name] == 1 for op in graph.operators if op.name not in free)
        assert all(ran[op.name] >= 1 for op in graph.operators if not read.isdisjoint(op.outputs))
        for chunk in staged.chunks:
            order = [op.name for op in graph.operators]
            assert _operators(chunk) == sorted(_operators(chunk), key=order.index), (
                "in the order of the model"
            )


def test_what_arrives_has_been_made_and_is_read() -> None:
    for _, staged in _all():
        for (source, target), values in staged.edges.items():
            assert source < target and values
            made = {
                p
                for s in staged.chunks[source].whole.program.steps
                if isinstance(s, Compute)
                for p in makes(s)
            }
            read = {p for s in staged.chunks[target].whole.program.steps for p in reads(s)}
            for value in values:
                assert (value.name, value.made) in made
                assert (value.name, value.taken) in read
                equal = staged.chunks[source].mesh.shape == staged.chunks[target].mesh.shape
                assert value.taken == (
                    value.made if equal else (R,) * len(staged.chunks[target].mesh.axes)
                )


def test_what_a_chunk_reads_and_does_not_make_arrives_once() -> None:
    for name, actual in _all():
        tensors = _model(name).tensors
        for number, chunk in enumerate(actual.chunks):
            steps = chunk.whole.program.steps
            made = {p[0] for s in steps if isinstance(s, Compute) for p in makes(s)}
            wanted = {
                p[0] for s in steps for p in reads(s) if tensors[p[0]].role is Role.ACTIVATION
            } - made
            arrived = [
                value.name
                for (_, target), values in actual.edges.items()
                if target == number
                for value in values
            ]
            assert sorted(arrived) == sorted(wanted)


def test_values_skip_stages() -> None:
    staged = _staged("skips", (TWO, TWO, TWO))
    assert {edge: [value.name for value in values] for edge, values in staged.edges.items()} == {
        (0, 1): ["a/linear:0"],
        (0, 2): ["a/linear:0"],
        (1, 2): ["b/linear:0"],
    }
    assert all(value.differentiable for values in staged.edges.values() for value in values)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "mesh", "count"),
    [("plain", TWO, 2), ("tied", TWO, 4), ("tied", SQUARE, 2), ("skips", TWO, 3)],
)
def test_chunks_on_equal_meshes_hold_the_steps_of_the_whole_program(
    name: str, mesh: Mesh, count: int, split: bool
) -> None:
    """Every redistribution of the model, in its chain, with the same gradients; a tied parameter's
    in each chunk that reads it so.
    """
    whole = build_program(_model(name), _assignment(name, mesh, split))
    staged = _staged(name, (mesh,) * count, split=split)

    def moves(program: Program) -> set[tuple[str, object, bool]]:
        return {
            (s.tensor, s.chain, s.gradient) for s in program.steps if isinstance(s, Redistribute)
        }

    assert set().union(*(moves(chunk.whole.program) for chunk in staged.chunks)) == moves(whole)
    decisions = {
        op: decision
        for chunk in staged.chunks
        for op, decision in chunk.whole.program.assignment.decisions.items()
    }
    assert decisions == dict(whole.assignment.decisions)


def test_gradients_begin_at_what_is_handed_on() -> None:
    """The last redistribution before a value that other chunks read has a gradient, though no loss
    is in sight.
    """
    staged = _staged("plain", (TWO, TWO), split=True)
    first = staged.chunks[0].whole
    assert first.trains and first.program.graph.loss not in first.program.assignment.outputs
    weights = [
        s
        for s in first.program.steps
        if isinstance(s, Redistribute) and s.tensor.endswith("weight")
    ]
    assert weights and all(step.gradient for step in weights)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_have_programs_of_their_own(count: int) -> None:
    for _, staged in _all(micro_batches=count):
        for chunk in staged.chunks:
            assert chunk.split is not None and chunk.whole is not chunk.micro
            kinds = [
                [type(step) for step in plan.program.steps] for plan in (chunk.whole, chunk.micro)
            ]
            assert kinds[0] == kinds[1] and chunk.whole.schedule.micro_batches == count
        for (_, target), values in staged.edges.items():
            micro = staged.chunks[target].micro.program
            whole = staged.chunks[target].whole.program
            for value in values:
                assert (
                    micro.graph.tensors[value.name].size * count
                    == whole.graph.tensors[value.name].size
                )


def test_tied_parameters_are_held_by_every_stage_that_reads_them() -> None:
    staged = _staged("tied", (TWO,) * 4)
    assert tied_parameters(staged) == {"embed.weight": (0, 3)}
    assert [
        "embed.weight" in chunk.whole.program.assignment.storage for chunk in staged.chunks
    ] == [True, False, False, True]
    assert not tied_parameters(_staged("plain", (TWO,) * 4))
    held = Counter(
        name for chunk in staged.chunks for name in chunk.whole.program.assignment.storage
    )
    assert (
        set(held) == {tensor.name for tensor in _model("tied").parameters}
        and sum(held.values()) == len(held) + 1
    )


def test_storage_that_is_of_another_mesh_gives_way_to_whole_copies() -> None:
    staged = _staged("plain", (SQUARE, TWO), split=True)
    for chunk in staged.chunks:
        for name, layout in chunk.whole.program.assignment.storage.items():
            assert len(layout) == len(chunk.mesh.axes) and is_valid(
                layout, _model("plain").tensors[name].shape, chunk.mesh.shape
            )
    assert set(staged.chunks[1].whole.program.assignment.storage.values()) == {(R,)}
    assert any(
        S(0) in layout for layout in staged.chunks[0].whole.program.assignment.storage.values()
    )


def test_chains_of_another_mesh_are_left_out() -> None:
    """Four heads are split over two devices, but not over eight: there no micro-batch lies so."""
    tensors = _model("plain").tensors
    eight = Mesh.of(data=8)
    name = next(
        n
        for n, t in tensors.items()
        if n.startswith("layers.3.attention") and len(t.shape) == 4 and SHAPE.heads in t.shape
    )
    chain = ((S(0),), (S(tensors[name].shape.index(SHAPE.heads)),))
    for mesh, kept in ((TWO, (chain,)), (eight, ())):
        staged = _staged(
            "plain", (TWO, mesh), schedule=Schedule(micro_batches=2), chains={name: (chain,)}
        )
        assert staged.chunks[1].whole.program.assignment.chains.get(name, ()) == kept


def test_every_output_leaves_one_chunk() -> None:
    for name, staged in _all():
        leaving = Counter(
            output for chunk in staged.chunks for output in chunk.whole.program.assignment.outputs
        )
        assert leaving == dict.fromkeys(_analysis(name).outputs, 1)


def test_stages_lie_one_behind_the_other() -> None:
    staged = _staged("plain", (TWO, FOUR, TWO, FOUR), interleave=2)
    assert (staged.stages, staged.devices) == (2, 6) and [
        chunk.first for chunk in staged.chunks
    ] == [0, 2, 0, 2]
    assert staged.edges.keys() == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gathered", ["per_step", "per_pass"])
def test_orders_of_all_stages_run_together(gathered: str, train: bool) -> None:
    """With units of parameters between the messages; ties are summed at the end."""
    for name, meshes in CASES.values():
        schedule = Schedule(micro_batches=4, gathered=gathered, unit_bytes=2**14)  # type: ignore[arg-type]
        staged = _staged(name, meshes, split=True, schedule=schedule)
        orders = [rank_order(staged, stage, train=train) for stage in range(staged.stages)]
        tied = [
            [action for action in order if action.word is not Word.SUM_TIED] for order in orders
        ]
        check_order(tied, tuple(staged.edges))
        ends = {order[-1].word is Word.SUM_TIED for order in orders}
        assert ends == {train and bool(tied_parameters(staged))}
        words = Counter(action.word for order in orders for action in order)
        assert words[Word.GATHER] == words[Word.RELEASE] > 0 and bool(words[Word.REDUCE]) is train


@pytest.mark.parametrize(
    ("firsts", "interleave", "said"),
    [
        (("a/linear", "nobody"), 1, "no operator of it"),
        (("a/linear", "c/linear", "b/linear"), 1, "do not follow one another"),
        (("a/linear", "b/linear", "b/linear"), 1, "do not follow one another"),
        (("a/linear", "b/linear", "c/linear"), 2, "do not make stages of 2"),
    ],
)
def test_cuts_that_cannot_be_are_refused(
    firsts: tuple[str, ...], interleave: int, said: str
) -> None:
    assignment = _assignment("skips", TWO, False)
    decided = Decided(
        decide=lambda operator, _: assignment.decisions[operator],
        storage=assignment.storage,
        outputs=assignment.outputs,
        chains=assignment.chains,
        host=frozenset(),
    )
    cut = Pipelined(
        firsts=firsts,
        meshes=(TWO,) * len(firsts),
        pipeline="1f1b",
        interleave=interleave,
        schedule=Schedule(),
    )
    with pytest.raises(PlanError, match=said):
        staged_execution(_analysis("skips"), decided, cut)
