"""Known configurations whose experts share ranks with tensor, context and data parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.integrations.importing.pipeline_layout import chunks_of
from benchmarks.validating.summed import Configuration, price
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.stage_memory import working
from benchmarks.validating.summed.stage_passes import Passes, Site
from tests.benchmarks.known.mixture import MIXTURE

CLUSTER = load_cluster("dgx-h100")
RUN = Configuration(
    global_batch=64,
    tensor=2,
    data=4,
    expert=8,
    expert_tensor=1,
    pipeline=2,
    sequence_parallel=True,
    zero=1,
)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ["expert", "tensor_expert"]),
        ({"expert": 4}, ["data", "expert", "tensor_expert"]),
        ({"expert": 2}, ["data", "tensor_expert"]),
        ({"expert": 4, "expert_tensor": 0}, ["expert", "tensor"]),
        ({"context": 2, "data": 2}, ["expert", "context_expert", "tensor_expert"]),
        ({"expert": 2, "tensor": 4, "data": 2}, ["data", "tensor_replica", "tensor_expert"]),
        ({"tensor": 4, "data": 2, "expert": 4, "expert_tensor": 2}, None),
    ],
)
def test_ranks_are_numbered_twice(change: dict[str, int], names: list[str] | None) -> None:
    c = replace(RUN, **change)  # type: ignore[arg-type]
    if names is not None:
        assert [axis.name for axis in c.axes] == names
    sizes = [axis.size for axis in c.axes]
    assert c.expert * c.inner * c.expert_replicas == c.stage_devices
    for use, size in (("expert", c.expert), ("inner", c.inner)):
        product = 1
        for axis, own in zip(c.axes, sizes, strict=True):
            product *= own if axis.inside == use else 1
        assert product == size


def test_experts_take_the_nearest_ranks() -> None:
    """TP 2 x EP 8 lies in a node where experts may be split over tensor-parallel ranks."""
    c = replace(RUN, data=16, global_batch=64)
    folded, apart = (
        places_of(one, CLUSTER.sized(c.devices)).experts for one in (c, replace(c, expert_tensor=2))
    )
    assert (folded, apart) == ("nvlink", "nvlink:4+nic:2")
    assert (
        price(MIXTURE, c, CLUSTER).step < price(MIXTURE, replace(c, expert_tensor=2), CLUSTER).step
    )


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_sequences_and_experts_are_split_at_once(context: int, micro_batch: int) -> None:
    c = replace(
        RUN, tensor=1, context=context, data=8 // context, micro_batch=micro_batch, recompute="full"
    )
    assert price(MIXTURE, c, CLUSTER).step > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert": 3}, "do not make groups of 3"),
        ({"tensor": 3, "data": 4, "expert": 2}, "do not fold"),
        ({"dispatcher": "mail"}, "unknown dispatcher 'mail'"),
        ({"recompute_modules": ("act",)}, "unknown recompute module 'act'"),
        ({"layout": ("E", "L")}, None),
        ({"layout": ("EtttttL",)}, "1 chunks is none of 2 stages"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, object], message: str | None) -> None:
    if message is None:
        with pytest.raises(UsageError, match="0 layers, the model 6"):
            price(MIXTURE, replace(RUN, **change), CLUSTER)  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=message):
        replace(RUN, **change)  # type: ignore[arg-type]


def test_chunks_may_hold_an_end_alone() -> None:
    c = replace(RUN, pipeline=4, interleave=2, schedule="interleaved")
    layout = chunks_of("E|t*6,|L".replace("t*6,", "t|t|t|t|t|t"))
    assert price(MIXTURE, replace(c, layout=layout), CLUSTER).fits
    with pytest.raises(UsageError, match="8 pipeline stages"):
        price(MIXTURE, c, CLUSTER)
    # The head lies on the stage that the layout gives it, with one layer less.
    plain = replace(RUN, layout=("Ett", "ttttL"))
    first, last = price(MIXTURE, plain, CLUSTER).forward
    assert last > 2 * first


def test_another_micro_batch_covers_what_travels_but_not_in_warm_up() -> None:
    c = replace(RUN, data=16, expert=32, global_batch=1024, dispatcher="node")
    alone = price(MIXTURE, c, CLUSTER)
    long = replace(MIXTURE, sequence=8192)
    c = replace(c, habits=replace(c.habits, compiled=True))
    passes = Passes(long, replace(c, overlap_experts=True), Site.of(c, CLUSTER.sized(c.devices)))
    part = passes.parts["experts"]
    hidden, exposed = (sum(passes.travel(part, hidden=flag)) for flag in (True, False))
    assert 0 < hidden < 0.7 * exposed
    assert passes.uncovered({"experts": 3}) == pytest.approx(3 * (exposed - hidden))
    assert (
        price(long, replace(c, overlap_experts=True), CLUSTER).step < price(long, c, CLUSTER).step
    )
    assert alone.fits


def test_recorded_graphs_leave_the_experts_to_the_host() -> None:
    def issued(c: Configuration, kind: str) -> float:
        site = Site.of(c, CLUSTER.sized(c.devices))
        return Passes(replace(MIXTURE, dense_layers=1), c, site).parts[kind].issued_forward

    graphed = replace(RUN, habits=replace(RUN.habits, graphed=True))
    assert 20 < issued(graphed, "experts") < issued(RUN, "experts")
    assert 0 < issued(graphed, "dense") < issued(RUN, "dense")


MODULES = [
    ("core_attn",),
    ("layernorm",),
    ("moe_act",),
    ("moe",),
    ("mlp",),
    ("layernorm", "moe_act"),
    ("mlp", "moe", "layernorm"),
]


@pytest.mark.parametrize("modules", MODULES)
def test_selective_recompute_never_raises_a_peak(modules: tuple[str, ...]) -> None:
    shape = replace(MIXTURE, dense_layers=2, layers=8)
    c = replace(RUN, micro_batch=4, interleave=2, schedule="interleaved")
    again = replace(c, recompute="selective", recompute_modules=modules)
    kept, less = (price(shape, one, CLUSTER) for one in (c, again))
    assert all(b <= a for a, b in zip(kept.allocated, less.allocated, strict=True))
    assert less.step >= kept.step


def test_discarded_results_are_made_again_from_what_went_in() -> None:
    """A norm's result is as large as its input, which the residual keeps anyway."""
    shape = replace(MIXTURE, experts=0, layers=2)
    c = Configuration(global_batch=4, micro_batch=4)
    again = replace(c, recompute="selective", recompute_modules=("layernorm",))
    kept, less = (working(shape, one, CLUSTER.sized(1))["dense"].saved for one in (c, again))
    rows = 4 * 2048 * 1024 * 2
    assert kept - less == pytest.approx(2 * rows, rel=0.05)


def test_the_expert_of_every_token_covers_what_travels() -> None:
    shape = replace(MIXTURE, shared_ffn=8192, sequence=8192)
    c = replace(RUN, dispatcher="node")
    covered = replace(c, overlap_shared=True)
    site = Site.of(c, CLUSTER.sized(c.devices))
    alone, under = (Passes(shape, one, site) for one in (c, covered))
    part = alone.parts["experts"]
    assert part.shared_forward > part.travel_forward > 0
    assert sum(under.travel(part)) < 0.3 * sum(alone.travel(part))
    # Without such an expert nothing is covered.
    bare = Passes(MIXTURE, covered, site)
    assert sum(bare.travel(bare.parts["experts"])) == pytest.approx(
        sum(bare.travel(bare.parts["experts"], hidden=False))
    )


def test_a_capacity_pads_rows_that_travel_and_are_computed() -> None:
    long = replace(MIXTURE, sequence=8192)
    c = replace(RUN, dispatcher="rank")
    site = Site.of(c, CLUSTER.sized(c.devices))
    usual, padded = (
        Passes(long, one, site).parts["experts"] for one in (c, replace(c, capacity=2.0))
    )
    assert padded.travel_backward > 1.5 * usual.travel_backward
    assert padded.arithmetic > 1.2 * usual.arithmetic, "attention is the same"
