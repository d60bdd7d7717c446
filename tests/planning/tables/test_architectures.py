"""Known architectures import and plan, on a mesh of one axis and on one of three; equal layers
count once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.api import plan_loaded
from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.planning.space.candidates import name_axes
from autopar.planning.tables.build import build_tables
from autopar.sharding.analysis import analyse
from tests.planning.architectures import ARCHITECTURES, TEXT, Built, language_model


def loaded(built: Built, *, train: bool = True) -> LoadedModel:
    """The model in the form in which it is evaluated, so that it holds no state."""
    module, inputs = built
    return load_model(module.eval(), ModelOptions(train=train), inputs)


def _marked(name: str) -> Any:
    marks = [pytest.mark.slow] + ([pytest.mark.ci] if name in ("llama", "mixtral", "unet") else [])
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [*map(_marked, ARCHITECTURES)])
def test_an_architecture_plans(name: str) -> None:
    """Training on one axis and on three, and inference on one; every plan fits the graph that it
    was made for.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = ARCHITECTURES[name]()
    for mode, mesh in (("train", (8,)), ("train", (2, 2, 2)), ("infer", (8,))):
        model = loaded(built, train=mode == "train")
        plan = plan_loaded(model, devices=8, cluster="dgx-h100", mode=mode, mesh=mesh).plan
        analysis = analyse(model.graph, train=mode == "train")
        assert set(plan.operators) == {op.name for op in analysis.warm}
        assert (
            plan.mesh_.shape == mesh and plan.predicted.step > 0.0 and plan.provenance.gap <= 0.01
        )
        plan.program(analysis)


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2)])
def test_equal_layers_are_recognised_once(sizes: tuple[int, ...]) -> None:
    """A deeper model has as many distinct offers, and as many distinct tables, as a shallow one."""
    counts = []
    for layers in (4, 9):
        with torch.device("meta"):
            built = language_model(
                "Llama", **TEXT | {"num_hidden_layers": layers}, num_key_value_heads=4
            )
        analysis = analyse(loaded(built).graph, train=True)
        cluster = load_cluster("dgx-h100").sized(8)
        levels = bind_axes(cluster, sizes)
        assert levels is not None
        graph = build_tables(
            analysis,
            MeshPrices(cluster=cluster, mesh=name_axes(cluster, sizes, levels)),
            optimizer="adamw",
        ).graph
        distinct = [
            len({id(value) for value in values})
            for values in (analysis.offers.values(), graph.unary, graph.edges.values())
        ]
        counts.append((len(graph.sizes), *distinct))
    assert counts[1][0] > 2 * counts[0][0]
    assert counts[0][1:] == counts[1][1:]
