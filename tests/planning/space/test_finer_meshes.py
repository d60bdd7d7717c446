"""A finer mesh contains the coarser one: its tables cost no more, plans that lie alike are told on
fewer axes, and ranks run them.
"""

from __future__ import annotations

import functools
import itertools
import math
from types import SimpleNamespace
from typing import cast

import pytest

from autopar.costmodel import Cluster, bind_axes, load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.programs.joined_axes import joined, joined_mesh
from autopar.planning.programs.priced_program import PricedProgram
from autopar.planning.space.candidates import name_axes, refines
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.search import solve
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, R, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment

SHAPES = {
    "gpt": Shape(
        layers=2,
        hidden=768,
        heads=16,
        kv_heads=16,
        ffn=3072,
        vocab=50304,
        sequence=1024,
        dropout=False,
    ),
    "llama": Shape(
        layers=2,
        hidden=4096,
        heads=32,
        kv_heads=16,
        ffn=14336,
        vocab=128256,
        sequence=4096,
        gated=True,
        tied=False,
        bias=False,
        dropout=False,
        norm="rms_norm",
        position="rotary",
    ),
}


@functools.cache
def model(name: str) -> Analysis:
    return analyse(transformer(SHAPES[name], batch=16).graph, train=True)


def mesh_on(cluster: Cluster, sizes: tuple[int, ...]) -> Mesh:
    bound = bind_axes(cluster, sizes)
    assert bound is not None
    return name_axes(cluster, sizes, bound)


@functools.cache
def cost(name: str, preset: str, sizes: tuple[int, ...], hidden: float) -> float:
    cluster = load_cluster(preset).sized(math.prod(sizes))
    prices = MeshPrices(cluster=cluster, mesh=mesh_on(cluster, sizes))
    return solve(
        build_tables(
            model(name), prices, optimizer="adamw", work=Multiplicities(hidden=hidden)
        ).graph
    ).cost


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("hidden", [0.0, 0.8])
@pytest.mark.parametrize(
    ("preset", "devices"), [("dgx-h100", 8), ("dgx-h100", 16), ("rtx4090", 8), ("local-cpu", 8)]
)
def test_a_finer_mesh_costs_no_more(name: str, hidden: float, preset: str, devices: int) -> None:
    whole = cost(name, preset, (devices,), hidden)
    for sizes in ((2, devices // 2), (devices // 2, 2)):
        assert cost(name, preset, sizes, hidden) <= whole * (1 + 1e-6), sizes


@pytest.mark.parametrize("name", SHAPES)
def test_three_axes_contain_two(name: str) -> None:
    for pair in ((2, 4), (4, 2)):
        assert cost(name, "dgx-h100", (2, 2, 2), 0.0) <= cost(name, "dgx-h100", pair, 0.0) * (
            1 + 1e-6
        ), pair


def test_a_mesh_refines_another_where_axes_are_split() -> None:
    def of(*sizes: int) -> Mesh:
        return Mesh.of(**{f"d{axis}": size for axis, size in enumerate(sizes)})

    yes = [
        ((2, 4), (8,)),
        ((2, 2, 2), (8,)),
        ((2, 2, 2), (4, 2)),
        ((2, 2, 2), (2, 4)),
        ((2, 8), (16,)),
    ]
    no = [
        ((8,), (8,)),
        ((8,), (2, 4)),
        ((4, 2), (2, 4)),
        ((2, 3, 2), (4, 3)),
        ((2, 4), (16,)),
        ((2, 2, 4), (2, 4)),
    ]
    assert all(refines(of(*fine), of(*coarse)) for fine, coarse in yes)
    assert not any(refines(of(*fine), of(*coarse)) for fine, coarse in no)


def test_axes_on_which_everything_lies_alike_are_one() -> None:
    def lying(*layouts: tuple[object, ...]) -> Assignment:
        storage = {str(number): layout for number, layout in enumerate(layouts)}
        return Assignment(
            mesh=Mesh.of(a=2, b=3, c=4), decisions={}, storage=storage, outputs={}, chains={}
        )  # type: ignore[arg-type]

    assert joined((2, 3, 4), lying((S(0), S(0), R), (B, B, S(1)))) == (6, 4)
    assert joined((2, 3, 4), lying((R, S(0), S(0)))) == (2, 12)
    assert joined((2, 3, 4), lying((R, R, R))) == (24,)
    assert joined((2, 3, 4), lying((S(0), R, S(0)), (R, S(0), R))) == (2, 3, 4)


def test_of_equal_plans_the_one_with_fewer_axes_is_told() -> None:
    graph = transformer(
        Shape(
            layers=2,
            hidden=128,
            heads=4,
            kv_heads=4,
            ffn=512,
            vocab=1024,
            sequence=128,
            dropout=False,
        ),
        batch=16,
    ).graph
    for zero in (0, 3):
        plan = search_plan(
            graph,
            Request(
                cluster=load_cluster("dgx-h100").sized(4),
                stages=1,
                micro_batches=1,
                zero=zero,
                memory=1e12,
            ),
        )
        layouts = [tuple(parameter.storage.split()) for parameter in plan.parameters.values()]
        alike = [
            all(layout[axis] == layout[axis + 1] for layout in layouts)
            for axis in range(len(plan.mesh) - 1)
        ]
        ways = [operator.strategy for operator in plan.operators.values()]
        same = [
            all(way[axis] == way[axis + 1] for way in ways) for axis in range(len(plan.mesh) - 1)
        ]
        assert not any(itertools.starmap(lambda a, b: a and b, zip(alike, same, strict=True)))


def test_the_joined_mesh_is_one_of_the_cluster_s() -> None:
    """On 2 x 4 what lies alike on both axes lies on 8; what lies apart stays where it is."""
    cluster = load_cluster("dgx-h100").sized(8)

    def lying(layout: tuple[object, ...]) -> PricedProgram:
        assignment = Assignment(
            mesh=mesh_on(cluster, (2, 4)),
            decisions={},
            storage={"w": layout},
            outputs={},
            chains={},
        )  # type: ignore[dict-item]
        tables = SimpleNamespace(prices=SimpleNamespace(cluster=cluster))
        return cast(PricedProgram, SimpleNamespace(assignment=assignment, tables=tables))

    whole = joined_mesh(lying((S(0), S(0))))
    assert whole is not None and whole.shape == (8,) and joined_mesh(lying((S(0), R))) is None
