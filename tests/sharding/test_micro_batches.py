"""One of m micro-batches offers what the same model with a batch of 1/m offers, and decisions for
it are decisions for the whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Graph, Role
from autopar.order.execution import execution
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.decoding import decode
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import S, is_valid
from autopar.sharding.micro_batches import (
    inner,
    micro_batch_options,
    of_micro_batch,
    of_whole_batch,
    outer,
    split_batch,
)
from autopar.sharding.program_builder import build_program
from autopar.sharding.rules import registry
from autopar.sharding.schedule import Schedule
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.end_to_end.models import MODELS, TORCH_MODELS, load
from tests.end_to_end.plans import random_choices, request

SHAPE = Shape(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=96,
    sequence=16,
    gated=True,
    norm="rms_norm",
    position="rotary",
)


def _transformer(batch: int, experts: int = 0) -> Graph:
    shape = Shape(
        **{name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__} | {"experts": experts}
    )
    return transformer(shape, batch=batch).graph


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("m", [2, 4, 8])
def test_a_micro_batch_offers_what_a_smaller_batch_offers(m: int, experts: int) -> None:
    analysis = analyse(_transformer(16, experts), train=True)
    small = analyse(_transformer(16 // m, experts), train=True)
    micro = split_batch(analysis, m)
    for name, offer in small.offers.items():
        mine = micro.offers[name]
        assert [f.size for f in mine.rule.factors] == [f.size for f in offer.rule.factors], name
        assert {(o.inputs, o.outputs) for o in mine.options} == {
            (o.inputs, o.outputs) for o in offer.options
        }, name
    made = [t for t in small.graph.tensors.values() if t.role in (Role.ACTIVATION, Role.PARAMETER)]
    assert all(micro.graph.tensors[t.name] == t for t in made)
    assert {name: set(kinds) for name, kinds in micro.kinds.items()} == {
        name: set(kinds) for name, kinds in small.kinds.items()
    }


def test_equal_operators_go_on_sharing_an_offer() -> None:
    analysis = analyse(_transformer(16), train=True)
    micro = split_batch(analysis, 4)
    pairs = {(id(analysis.offers[name]), id(offer)) for name, offer in micro.offers.items()}
    assert (
        len(pairs)
        == len({id(offer) for offer in micro.offers.values()})
        == len({id(offer) for offer in analysis.offers.values()})
    )
    assert micro_batch_options(analysis) is micro_batch_options(analysis)
    assert split_batch(analysis, 1) is analysis


@pytest.mark.parametrize("name", MODELS)
def test_decisions_for_a_micro_batch_are_decisions_for_the_whole_batch(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Plans by chance: told for the whole batch and back they are the same, and both make programs
    with the same steps.
    """
    analysis = analyse(load(name, tmp_path_factory.mktemp("models")).graph, train=True)
    wanted = request((2, 2), train=True)
    assert wanted.mesh is not None
    for m in (2, 8):
        micro = split_batch(analysis, m)
        tables = build_tables(
            micro, MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh), optimizer="adamw"
        )
        for seed in range(3):
            assignment = decode(tables, random_choices(tables.graph, random.Random(seed)))
            whole = of_whole_batch(assignment, analysis, micro, m)
            assert of_micro_batch(whole, analysis, micro, m) == assignment
            actual = execution(whole, analysis, Schedule(micro_batches=m))
            assert [type(step) for step in actual.whole.program.steps] == [
                type(step) for step in actual.micro.program.steps
            ]
            assert actual.micro.program == build_program(micro.graph, assignment)


@given(data=st.data())
def test_a_shard_of_a_micro_batch_is_that_part_of_the_shard(data: st.DataObject) -> None:
    """`inner` names the same elements: cut by time and then by the rank, a dim holds what the
    layout of both axes says.
    """
    m, degree, outside, parts = (
        data.draw(st.sampled_from(sizes)) for sizes in ((2, 4), (2, 3), (1, 2), (1, 2, 4, 8, 16))
    )
    size = data.draw(st.sampled_from([96, 192]))
    time = S(0, outside)
    placement = S(0, parts)
    single = data.draw(st.booleans())
    local = inner(placement, time, m, single=single)
    mesh = (m, degree)
    if local is None or not is_valid((time, placement), (size,), mesh):
        return
    assert outer(local, time, m, single=single) == placement
    whole = torch.arange(size)
    for index in range(m):
        for rank in range(degree):
            both = shard_of(whole, cuts_of((time, placement), mesh, (index, rank)))
            part = shard_of(whole, cuts_of((time,), (m,), (index,)))
            if placement.parts >= time.parts:
                assert torch.equal(shard_of(part, cuts_of((local,), (degree,), (rank,))), both)
            else:
                assert set(shard_of(part, cuts_of((local,), (degree,), (rank,))).tolist()) == set(
                    both.tolist()
                )


def _analysis(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Analysis:
    return analyse(load_model(module, ModelOptions(train=True), tuple(inputs)).graph, train=True)


def test_refusals_name_the_operator() -> None:
    norm = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    )
    with pytest.raises(UsageError, match=r"'1/batch_norm' .* depends on the whole batch"):
        split_batch(_analysis(norm, [torch.zeros(4, 8)]), 2)
    linear = torch.nn.Linear(8, 8)
    with pytest.raises(UsageError, match="one sample"):
        split_batch(_analysis(linear, [torch.zeros(1, 8)]), 2)
    analysis = _analysis(linear, [torch.zeros(6, 8)])
    with pytest.raises(UsageError, match="a batch of 6 cannot be cut into 4 equal"):
        split_batch(analysis, 4)
    with pytest.raises(UsageError, match="at least one"):
        split_batch(analysis, 0)


class _Token(torch.nn.Module):
    """A parameter repeated for every sample, positions that no input leads to, and a mask made of
    the inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = torch.nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them together."""
        whole = torch.cat([self.token.expand(x.shape[0], 1, 8), x], dim=1)
        places = torch.arange(5).expand(x.shape[0], 5)
        return (whole + self.positions(places)) * (whole.detach().sum(-1, keepdim=True) > 0)


def test_what_no_input_leads_to_is_split_where_it_meets_samples() -> None:
    split = micro_batch_options(_analysis(_Token(), [torch.zeros(4, 4, 8)]))
    assert split.size == 4
    outputs = {
        name: str(placement) for name, placement in split.placements.items() if placement.dim == 0
    }
    assert {"expand:0", "cat:0"} <= set(outputs) and set(outputs.values()) == {"S0"}


@pytest.mark.parametrize("large", [registry.LARGE, 0])
def test_every_torch_model_of_the_parity_tests_is_split_or_refused(
    large: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where masks and positions are operators of the search."""
    monkeypatch.setattr(registry, "LARGE", large)
    folder = tmp_path_factory.mktemp("models")
    refused = set()
    for name in TORCH_MODELS:
        analysis = analyse(load(name, folder).graph, train=True)
        try:
            split_batch(analysis, 2)
        except UsageError:
            refused.add(name)
    assert refused == {"resnet", "net"}, (
        "batch norms take the statistics of the whole batch; one picture is one sample"
    )
