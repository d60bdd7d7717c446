"""The program of a plan: one redistribution a layout, gradients only where the loss is, buckets,
and plans that are refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir import Role
from autopar.order.scheduled import scheduled
from autopar.sharding.layout import format_layout, parse_layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Compute, Program, Redistribute
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import UNIT_BYTES, Schedule
from tests.sharding.assigned import assign, graph_of, program

GPUS = Mesh.of(gpu=4)


def issued(built: Program) -> Counter[tuple[str, str, str]]:
    return Counter((c.phase, c.kind, c.tensor) for c in scheduled(built).collectives())


class Fan(nn.Module):
    """One value read by three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.a(y) + self.b(y) + self.c(y)


def test_a_value_is_redistributed_once_for_each_layout() -> None:
    """Two readers of B, one of S0: y is split by columns, so it is gathered once and dealt once."""
    graph = graph_of(Fan(), 8, 8)
    chosen = {"first/linear": "n", "a/linear": "n", "b/linear": "n", "c/linear": "d0"}
    built = program(graph, GPUS, chosen)
    moves = [
        step
        for step in built.steps
        if isinstance(step, Redistribute) and step.tensor == "first/linear:0"
    ]
    assert Counter(format_layout(step.chain[-1]) for step in moves) == {"B": 1, "S0": 1}
    seen = issued(built)
    assert (
        seen["forward", "all_gather", "first/linear:0"] == 1
        and seen["backward", "reduce_scatter", "first/linear:0"] == 1
    )
    assert (
        seen["forward", "all_to_all", "first/linear:0"]
        == seen["backward", "all_to_all", "first/linear:0"]
        == 1
    )


def test_redistributions_stand_before_their_first_reader() -> None:
    built = program(graph_of(Fan(), 8, 8), GPUS, {"first/linear": "n", "c/linear": "n"})
    given = [t.name for t in built.graph.tensors.values() if t.role is not Role.ACTIVATION]
    available = {(name, built.assignment.storage.get(name, parse_layout("R"))) for name in given}
    for step in built.steps:
        if isinstance(step, Redistribute):
            assert (step.tensor, step.chain[0]) in available
            available.add((step.tensor, step.chain[-1]))
        else:
            assert set(zip(step.operator.inputs, step.decision.inputs, strict=True)) <= available
            available.update(zip(step.operator.outputs, step.decision.outputs, strict=True))
    assert [s.operator.name for s in built.steps if isinstance(s, Compute)] == [
        op.name for op in built.graph.operators
    ]


class Dead(nn.Module):
    """A second output that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.main, self.side = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.main(y).sum(), self.side(y)


def test_a_branch_that_never_reaches_the_loss_issues_no_backward() -> None:
    """y goes whole to the side branch alone: the gather has no backward, and the side's weight no
    reduction.
    """
    graph = graph_of(Dead(), 8, 8)
    assert graph.loss == graph.outputs[0]
    built = program(
        graph, GPUS, {"first/linear": "d0", "main/linear": "d0", "sum": "d0", "side/linear": "n"}
    )
    seen = issued(built)
    assert seen["forward", "all_gather", "first/linear:0"] == 1
    assert not [
        key
        for key in seen
        if key[0] == "backward" and key[2] in ("first/linear:0", "side.weight", "side/linear:0")
    ]
    flags = {step.tensor: step.gradient for step in built.steps if isinstance(step, Redistribute)}
    assert (
        flags["first/linear:0"] is False
        and flags["first.weight"] is True
        and flags["main.weight"] is True
    )
    assert {name for bucket in scheduled(built).buckets for name in bucket.parameters} == {
        "first.weight",
        "main.weight",
    }


def test_inference_issues_no_backward() -> None:
    built = program(
        graph_of(Fan(), 8, 8), GPUS, {"first/linear": "n", "a/linear": "n"}, train=False
    )
    plan = scheduled(built)
    assert (
        plan.collectives()
        and {c.phase for c in plan.collectives()} == {"forward"}
        and not plan.buckets
    )


def mlp(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))


def test_gradients_of_data_parallel_weights_share_buckets_in_the_order_of_the_backward_pass() -> (
    None
):
    graph = graph_of(mlp(8, 8, 8, 8), 8, 8)
    chosen = {op.name: "d0" for op in graph.operators}
    built = program(graph, GPUS, chosen)
    (bucket,) = scheduled(built).buckets
    assert (
        bucket.parameters == ("2.weight", "1.weight", "0.weight")
        and bucket.sums == ((0,),)
        and bucket.nbytes == 3 * 8 * 8 * 4
    )
    assert issued(built)["backward", "all_reduce", "2.weight"] == 1
    assert all(
        step.bucketed == 1
        for step in built.steps
        if isinstance(step, Redistribute) and step.tensor.endswith(".weight")
    )


def test_a_bucket_holds_at_most_25_mib() -> None:
    width = 1024  # a weight of 4 MiB
    with torch.device("meta"):
        module = mlp(*[width] * 9)
    graph = graph_of(module, 4, width)
    built = scheduled(program(graph, GPUS, {op.name: "d0" for op in graph.operators}))
    assert UNIT_BYTES == 25 * 2**20
    assert [bucket.parameters for bucket in built.buckets] == [
        ("7.weight", "6.weight"),
        tuple(f"{n}.weight" for n in (5, 4, 3, 2, 1, 0)),
    ]
    assert all(bucket.nbytes <= UNIT_BYTES for bucket in built.buckets)
    assert [c.nbytes for c in built.collectives() if c.phase == "backward"] == [
        bucket.nbytes for bucket in built.buckets
    ]


def test_a_weight_larger_than_a_bucket_has_one_to_itself() -> None:
    with torch.device("meta"):
        module = mlp(64, 64, 131072, 64)
    graph = graph_of(module, 4, 64)
    built = program(graph, GPUS, {op.name: "d0" for op in graph.operators})
    assert {bucket.parameters for bucket in scheduled(built).buckets} >= {
        ("2.weight",),
        ("1.weight",),
    }


def test_axes_that_differ_are_reduced_apart() -> None:
    """Data parallel on one axis, columns on the other: the weight's gradient is reduced over the
    first axis only.
    """
    mesh = Mesh.of(node=2, gpu=2)
    graph = graph_of(mlp(8, 8, 8), 8, 8)
    chosen = {"0/linear": "d0 d0", "1/linear": "d0 n", "loss/mean_square.0": "d0 d1"}
    built = program(graph, mesh, chosen, storage={"1.weight": "R S0"})
    assert {bucket.parameters: bucket.sums for bucket in scheduled(built).buckets} == {
        ("1.weight",): ((0,),),
        ("0.weight",): ((0, 1),),
    }
    assert {bucket.parameters: bucket.nbytes for bucket in scheduled(built).buckets} == {
        ("1.weight",): 128,
        ("0.weight",): 256,
    }


class Twice(nn.Module):
    """One weight in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


@pytest.mark.parametrize(
    ("second", "bucketed"),
    [("d0", True), ("R", False), ("n", False)],
    ids=["equal uses", "used as stored", "used split"],
)
def test_uses_that_conflict_are_not_bucketed(second: str, bucketed: bool) -> None:
    graph = graph_of(Twice(), 8, 8)
    built = program(graph, GPUS, {"inner/linear": "d0", "inner/linear.1": second})
    assert bool(scheduled(built).buckets) is bucketed
    assert issued(built)["backward", "all_reduce", "inner.weight"] == 1


def test_only_leading_shares_are_bucketed() -> None:
    """Stored split, used whole (ZeRO-3): gathered and reduce-scattered, in no bucket."""
    graph = graph_of(mlp(8, 8), 8, 8)
    built = program(
        graph, GPUS, {op.name: "d0" for op in graph.operators}, storage={"0.weight": "S0"}
    )
    assert not scheduled(built).buckets
    seen = issued(built)
    assert (
        seen["forward", "all_gather", "0.weight"]
        == seen["backward", "reduce_scatter", "0.weight"]
        == 1
    )


def test_parameters_of_a_unit_are_gathered_and_scattered_in_one_message() -> None:
    """Three weights of 256 bytes: one message of 768 each way, or with units of 256 bytes three."""
    graph = graph_of(mlp(8, 8, 8, 8), 8, 8)
    built = program(
        graph,
        GPUS,
        {op.name: "d0" for op in graph.operators},
        storage={f"{n}.weight": "S0" for n in range(3)},
    )
    for unit_bytes, messages in ((768, [768]), (512, [512, 256]), (1, [256, 256, 256])):
        plan = scheduled(built, Schedule(unit_bytes=unit_bytes))
        mine = [c for c in plan.collectives() if c.tensor.endswith(".weight")]
        by_kind = {
            kind: [c.nbytes for c in mine if c.kind == kind]
            for kind in ("all_gather", "reduce_scatter")
        }
        assert by_kind == {"all_gather": messages, "reduce_scatter": messages[::-1]} and len(
            mine
        ) == 2 * len(messages)


def test_a_missing_chain_is_refused() -> None:
    graph = graph_of(Fan(), 8, 8)
    assignment = assign(graph, GPUS, {"first/linear": "n", "a/linear": "n"})
    chains = {name: chain for name, chain in assignment.chains.items() if name != "first/linear:0"}
    with pytest.raises(PlanError, match="no redistribution of 'first/linear:0' to"):
        build_program(graph, replace(assignment, chains=chains))


@pytest.mark.parametrize(
    "chain",
    [
        "S1, S1, B",
        "S1, P, S0 S0, B",
        "S1, S1/3, B",
        "S1, S9, B",
        "S1, S1/2, B",
        "S1, P(max), B",
        "B",
        "",
        "S0, B",
        "S1, B B",
    ],
)
def test_a_chain_that_is_no_chain_is_refused(chain: str) -> None:
    graph = graph_of(Fan(), 8, 8)
    assignment = assign(graph, GPUS, {"first/linear": "n", "a/linear": "n"})
    wrong = tuple(parse_layout(text) for text in chain.split(", ")) if chain else ()
    others = tuple(c for c in assignment.chains["first/linear:0"] if format_layout(c[-1]) != "B")
    assert len(others) < len(assignment.chains["first/linear:0"])
    with pytest.raises(PlanError, match=r"redistribution|no single step"):
        build_program(
            graph,
            replace(assignment, chains={**assignment.chains, "first/linear:0": (wrong, *others)}),
        )
