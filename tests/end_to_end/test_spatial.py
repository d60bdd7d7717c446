"""Convolution nets in training on real ranks: batch norms over all of the batch, and pictures whose
rows are split.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from autopar.frontends.torch import import_torch
from autopar.ir import with_loss
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.pins import Restriction
from autopar.planning.model.restrictions import Limits
from autopar.planning.planner import search_plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.parallelize import parallelize
from autopar.sharding.analysis import Analysis, Offer, analyse
from autopar.sharding.layout import Kind, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.strategies import Strategies
from tests.end_to_end.models import net
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import NamedPlans, random_plans, request


@functools.cache
def _subject(name: str, train: bool = True) -> Subject:
    return subject(name, Path(), train=train, dtype="float64")


def rows_split(dims: tuple[int, ...]) -> Restriction:
    """Every operator that can splits dim `dims[a]` of its output on axis a."""

    def limits(analysis: Analysis, mesh: Mesh) -> Limits:
        def strategies(name: str, offer: Offer, actual: Strategies) -> NDArray[np.bool_]:
            wanted = np.array(
                [[option.outputs[0] == S(dim) for option in offer.options] for dim in dims]
            )
            allowed = np.all(
                [wanted[axis][actual.choices[:, axis]] for axis in range(len(dims))], axis=0
            )
            return allowed if allowed.any() else np.ones(len(actual.choices), dtype=bool)

        return Limits(strategies=strategies)

    return limits


def space_whole(analysis: Analysis, mesh: Mesh) -> Limits:
    """No operator splits rows or columns."""

    def strategies(name: str, offer: Offer, listed: Strategies) -> NDArray[np.bool_]:
        places = [(*option.inputs, *option.outputs) for option in offer.options]
        free = np.array(
            [all(p.kind is not Kind.SPLIT or p.dim < 2 for p in tensors) for tensors in places]
        )
        return np.asarray(free[listed.choices].all(axis=1))

    return Limits(strategies=strategies)


def nothing_split(analysis: Analysis, mesh: Mesh) -> Limits:
    """Every device does everything."""

    def strategies(name: str, offer: Offer, listed: Strategies) -> NDArray[np.bool_]:
        return np.asarray((listed.choices == 0).all(axis=1))

    return Limits(strategies=strategies)


def _spatial(
    model: LoadedModel, sizes: tuple[int, ...], dims: tuple[int, ...], *, train: bool
) -> Plan:
    return search_plan(model.graph, replace(request(sizes, train=train), limits=rows_split(dims)))


@pytest.mark.parametrize(
    "sizes",
    [
        (2,),
        pytest.param((4,), marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param((2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resnet_in_training(sizes: tuple[int, ...]) -> None:
    """The plan found, data parallel, and plans by chance."""
    model = _subject("resnet")
    wanted = request(sizes, train=True)
    named = NamedPlans(model.model, wanted)
    assert not failures(
        model, wanted, [(name, named[name]) for name in ("found", "data", "random0", "random1")]
    )


@pytest.mark.parametrize(
    ("sizes", "dims", "train"),
    [
        ((4,), (2,), True),
        ((2, 2), (3, 2), True),
        ((2, 2), (2, 3), False),
        pytest.param((2,), (3,), True, marks=pytest.mark.slow),
        pytest.param((2, 2), (2, 3), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_split_space(sizes: tuple[int, ...], dims: tuple[int, ...], train: bool) -> None:
    """Rows, columns, and both at once, everywhere."""
    model = _subject("net", train)
    plan = _spatial(model.model, sizes, dims, train=train)
    names = {option for operator in plan.operators.values() for option in operator.strategy}
    assert {f"y{dim - 2}" for dim in dims} <= names
    kinds = [
        c.kind for c in plan.execution(analyse(model.model.graph, train=train)).micro.collectives()
    ]
    assert kinds.count("send") > 10 and ("all_gather" in kinds)
    assert not failures(model, request(sizes, train=train), [("spatial", plan)])


@pytest.mark.slow
@pytest.mark.ci
def test_plans_by_chance() -> None:
    model = _subject("net")
    wanted = request((2, 2), train=True)
    assert not failures(model, wanted, list(random_plans(model.model, wanted, count=3)))


def _steps(module: torch.nn.Module, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(2):
        module(pixels).square().mean().backward()
    return {name: value.clone() for name, value in module.named_buffers()}


def _on_rank(model: LoadedModel, plan: Plan, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    return _steps(parallelize(lambda: (model, plan), outputs="whole"), pixels)


def test_running_statistics() -> None:
    """They and the counters of batches become those of one device, on every rank."""
    model = _subject("net").model
    pixels = _subject("net").inputs[0]
    plan = _spatial(model, (4,), (2,), train=True)
    wanted = _steps(copy.deepcopy(model.module), pixels)
    results = run_ranks(_on_rank, 4, model, plan, pixels, timeout=300.0)
    moved = [
        name
        for name, value in wanted.items()
        if not torch.equal(value, dict(model.module.named_buffers())[name])
    ]
    assert len(moved) == len(wanted) == 6
    for held in results:
        assert held.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(held[name], value, rtol=1e-9, atol=1e-12)


def test_large_pictures_are_split_in_space() -> None:
    """One picture on four devices: its rows are split, which beats split channels (tiles stay
    empty) by half, and these repeated work.
    """
    module, inputs = net(size=4096)
    graph = with_loss(import_torch(module.train(), inputs).graph)
    wanted = request((4,), train=True)
    actual = search_plan(graph, wanted)
    heavy = [operator.strategy for name, operator in actual.operators.items() if "conv2d" in name]
    assert heavy.count(("y0",)) >= 3
    channels, repeated = (
        search_plan(graph, replace(wanted, limits=limits))
        for limits in (space_whole, nothing_split)
    )
    assert actual.predicted.step < channels.predicted.step / 1.5
    assert channels.predicted.step < repeated.predicted.step
    everywhere = search_plan(graph, replace(wanted, limits=rows_split((2,))))
    assert actual.predicted.step <= everywhere.predicted.step < 1.05 * actual.predicted.step
