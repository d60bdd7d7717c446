"""A finer mesh contains the coarser one: its tables cost no more, and ranks run them."""

from __future__ import annotations

import functools
import math

import pytest

from autopar.costmodel import Cluster, bind_axes, load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.space.candidates import name_axes
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.search import solve
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Mesh
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

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
