"""Pipelines whose stages differ: equal ones are the ordinary pipeline, and each stage has its own
devices, mesh and recompute.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.cluster.cluster import join
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.frameworks import Habits
from autopar.errors import ClusterError, UsageError
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration, Priced, price
from benchmarks.validating.uneven_pipelines import Stage, price_stages

CLUSTER = load_cluster("dgx-a100-80g").sized(8)
BETWEEN = Level(name="between", size=1, latency=1e-5, bandwidth=1e9)
SHAPE = Shape(layers=8, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=4096, sequence=512)
C = Configuration(
    global_batch=32,
    micro_batch=2,
    tensor=2,
    pipeline=2,
    data=2,
    zero=1,
    habits=Habits(state_bytes=12),
)


def stages(*counts: float, c: Configuration = C, start: int = 0) -> list[Stage]:
    results = []
    for count in counts:
        results.append(Stage(layers=((count, c),), start=start))
        start += c.tensor * c.data
    return results


def priced(*chains: list[Stage], cluster: Cluster = CLUSTER) -> Priced:
    return price_stages(SHAPE, chains, cluster)


@pytest.mark.parametrize(
    "c", [C, replace(C, recompute="full"), replace(C, tensor=1, zero=0), replace(C, tensor=8)]
)
def test_equal_stages_are_the_ordinary_pipeline(c: Configuration) -> None:
    whole = price(SHAPE, c, CLUSTER)
    parts = priced(stages(4, 4, c=c), cluster=CLUSTER.sized(c.devices))
    for name in (
        "step",
        "forward",
        "backward",
        "pipeline",
        "reduction",
        "update",
        "allocated",
        "memory",
        "arithmetic",
    ):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name)), name
    assert parts.fits is whole.fits


def test_a_stage_of_more_layers_takes_and_holds_more() -> None:
    even = priced(stages(4, 4))
    uneven = priced(stages(6, 2))
    layer = priced(stages(5, 3)).forward[0] - even.forward[0]
    assert uneven.forward[0] - even.forward[0] == pytest.approx(2 * layer)
    assert uneven.forward[1] < even.forward[1]
    assert uneven.allocated[0] > even.allocated[0] and uneven.allocated[1] < even.allocated[1]
    assert uneven.step > even.step


def test_shares_of_a_layer_count_as_such() -> None:
    some = [priced(stages(n, 8 - n)).forward[0] for n in (4, 4.5, 5)]
    assert some[1] == pytest.approx((some[0] + some[2]) / 2)


def test_layers_of_a_stage_may_recompute_apart() -> None:
    full = replace(C, recompute="full")
    last = stages(4, start=4)
    mixed = Stage(layers=((1, full), (3, C)), start=0)
    none, some, every = (
        priced([first, *last]) for first in (stages(4)[0], mixed, stages(4, c=full)[0])
    )
    assert some.backward[0] - none.backward[0] == pytest.approx(
        (every.backward[0] - none.backward[0]) / 4, rel=0.05
    )
    assert none.allocated[0] > some.allocated[0] > every.allocated[0]
    assert none.backward[1] == some.backward[1] == every.backward[1]


def test_every_stage_has_a_mesh_and_devices_of_its_own() -> None:
    wide = replace(C, tensor=1, data=4, micro_batch=1)
    mixed = join(
        "mixed", [load_cluster("dgx-a100").sized(4), load_cluster("l4").sized(4)], between=BETWEEN
    )
    actual = priced([*stages(4), *stages(4, c=wide, start=4)], cluster=mixed)
    a100, l4 = (load_cluster(name) for name in ("dgx-a100", "l4"))
    here = priced(stages(4, 4), cluster=a100)
    there = priced(stages(4, 4, c=wide), cluster=l4)
    assert (actual.forward[0], actual.allocated[0]) == (here.forward[0], here.allocated[0])
    assert (actual.forward[1], actual.allocated[1]) == (there.forward[1], there.allocated[1])
    slower = priced(
        [*stages(4), *stages(4, c=wide, start=4)],
        cluster=join("far", mixed.pools, between=replace(BETWEEN, bandwidth=1e7)),
    )
    assert slower.forward == actual.forward and slower.pipeline > 2 * actual.pipeline, (
        "messages cross from pool to pool"
    )


def test_replicas_that_differ_wait_for_the_slowest() -> None:
    one = replace(C, dtype="float16")
    mixed = join(
        "mixed",
        [load_cluster("dgx-a100").sized(4), load_cluster("p3.16xlarge").sized(4)],
        between=BETWEEN,
    )

    def chain(start: int) -> list[Stage]:
        return [Stage(layers=((4, one),), start=start), Stage(layers=((4, one),), start=start + 2)]

    both = priced(chain(0), chain(4), cluster=mixed)
    apart = [
        priced(chain(first), chain(first + 4), cluster=load_cluster(name))
        for first, name in ((0, "dgx-a100"), (0, "p3.16xlarge"))
    ]
    assert both.pipeline == max(actual.pipeline for actual in apart)
    assert both.forward == apart[1].forward
    assert both.reduction > 2 * apart[0].reduction, "over the network between the pools"
    assert both.memory == max(actual.memory for actual in apart)


@pytest.mark.parametrize(
    ("chains", "text"),
    [
        ([stages(4, 3)], "7 layers"),
        (
            [[*stages(4), *stages(4, c=replace(C, global_batch=64), start=4)]],
            "as many micro-batches",
        ),
        ([stages(4, 2, 2)], "pipeline of 3 stages"),
        ([stages(4, 4)] * 3, "3 pipelines"),
    ],
)
def test_what_is_no_pipeline_is_refused(chains: list[list[Stage]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        priced(*chains, cluster=CLUSTER.sized(16))


def test_stages_beyond_the_cluster_are_refused() -> None:
    with pytest.raises(ClusterError, match="of 8 devices there are no"):
        priced(stages(4, 4, start=4))
