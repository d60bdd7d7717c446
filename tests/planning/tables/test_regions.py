"""Operators that are decided as one: nothing is lost by it, and nothing is left apart in vain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.space.candidates import name_axes
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.decoding import decode
from autopar.planning.tables.tables import Tables
from autopar.search import solve
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.candidates import strategies_of
from autopar.sharding.layout import P
from autopar.sharding.program_builder import build_program
from autopar.sharding.regions import Region, joint_strategies
from tests.planning.architectures import ARCHITECTURES
from tests.planning.tables.test_architectures import loaded

NAMES = ("gpt2", "llama", "mixtral", "vit", "t5")
MESHES = ((8,), (2, 4))


def analysed(name: str) -> Analysis:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return analyse(loaded(ARCHITECTURES[name]()).graph, train=True)


def apart(analysis: Analysis) -> Analysis:
    """The same operators, each decided by itself."""
    alone = (
        Region(name=name, lead=name, members=(name,))
        for region in analysis.regions
        for name in region.members
    )
    return replace(analysis, regions=tuple(alone))


def tables_on(analysis: Analysis, sizes: tuple[int, ...]) -> Tables:
    cluster = load_cluster("dgx-h100").sized(math.prod(sizes))
    levels = bind_axes(cluster, sizes)
    assert levels is not None
    prices = MeshPrices(cluster=cluster, mesh=name_axes(cluster, sizes, levels))
    return build_tables(analysis, prices, optimizer="adamw")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", MESHES)
def test_the_best_plan_is_as_good_as_with_every_operator_by_itself(
    name: str, sizes: tuple[int, ...]
) -> None:
    analysis = analysed(name)
    together, alone = (tables_on(of, sizes) for of in (analysis, apart(analysis)))
    cost, least = (solve(tables.graph).cost for tables in (together, alone))
    assert least * (1 - 1e-9) <= cost <= 1.005 * least
    decided, single = (sum(bool(v.members) for v in of.variables) for of in (together, alone))
    assert decided < 0.95 * single
    # What the tables add up is what the decisions of all members cost by themselves.
    solution = solve(together.graph)
    build_program(analysis.graph, decode(together, solution.choices))


def wanted(analysis: Analysis, name: str) -> Iterator[int]:
    """The options that split an operator, or compute it whole, without a partial sum."""
    for number, option in enumerate(analysis.offers[name].options):
        if P not in (*option.inputs, *option.outputs):
            yield number


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", MESHES)
def test_no_operator_lacks_a_strategy_that_splits_it(name: str, sizes: tuple[int, ...]) -> None:
    """Each strategy of an operator that is not a view is one of its region's, on every mesh."""
    analysis = analysed(name)
    own = {
        op.name: strategies_of(
            analysis.offers[op.name].rule, analysis.offers[op.name].options, sizes
        )
        for op in analysis.warm
    }
    tables = tables_on(analysis, sizes)
    leads = {region.lead for region in analysis.regions}
    for variable in tables.variables:
        for member in variable.members if variable.name in leads else ():
            options = set(wanted(analysis, member))
            rows = {tuple(row) for row in own[member].choices.tolist() if options.issuperset(row)}
            held = {tuple(row) for row in tables.strategies[member].choices.tolist()}
            if member == variable.name:
                assert rows <= held


@pytest.mark.parametrize("sizes", MESHES)
def test_a_value_inside_is_made_as_it_is_read(sizes: tuple[int, ...]) -> None:
    analysis = analysed("llama")
    checked = 0
    for region in analysis.regions:
        offers = [analysis.offers[name] for name in region.members]
        own = [strategies_of(offer.rule, offer.options, sizes) for offer in offers]
        joint = joint_strategies(region, own)
        for row in range(len(joint.digits)) if joint is not None else ():
            layouts = [mine.layouts(row) for mine in joint.strategies]
            for maker, out, reader, into in region.links:
                assert layouts[maker][1][out] == layouts[reader][0][into]
                checked += 1
    assert checked > 10


def test_a_region_falls_apart_where_a_member_would_lack_a_strategy() -> None:
    """Four heads of keys are not split over eight devices, but their product is."""
    analysis = analysed("llama")
    region = next(one for one in analysis.regions if one.name.endswith("k_proj"))
    assert len(region.members) > 1
    for sizes, together in (((4,), True), ((8,), False)):
        tables = tables_on(analysis, sizes)
        variable = next(v for v in tables.variables if v.name == region.lead)
        assert (variable.members == region.members) == together
        names = {option.name for option in tables.strategies[region.lead].options}
        assert {"n"} <= names


def test_names_are_the_words_of_the_field() -> None:
    names = [region.name for region in analysed("llama").regions if "layers.1" in region.name]
    words = [name.removeprefix("module.").removeprefix("model.layers.1") for name in names]
    assert len(names) <= 15 and len(set(names)) == len(names)
    for word in (
        ".input_layernorm",
        ".self_attn.q_proj",
        ".self_attn/rotation",
        ".self_attn/attention",
        ".mlp/gated_activation",
        ".mlp.down_proj",
    ):
        assert any(word in name for name in words), words
