"""ZeRO-3 with stages as FSDP2 runs it, and hybrid sharding: bytes, messages, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.collectives import collective_time
from autopar.costmodel.device.elementwise import memory_seconds
from autopar.costmodel.frameworks import Framework, Habits
from autopar.errors import UsageError
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration, Priced, price

SHAPE = Shape(
    layers=8,
    hidden=2048,
    heads=16,
    kv_heads=16,
    ffn=8192,
    vocab=32000,
    sequence=1024,
    tied=False,
    dropout=False,
)
CLUSTER = load_cluster("dgx-h100")
WHOLE = Habits(state_bytes=10, whole_stages=True)
APART = replace(WHOLE, whole_stages=False)


def priced(habits: Habits, **given: int) -> Priced:
    """A run of 16 devices."""
    sizes = {"global_batch": 64, "pipeline": 2, "data": 8, "zero": 3}
    c = Configuration(**(sizes | given))  # type: ignore[arg-type]
    return price(SHAPE, c.run_by(Framework(habits=habits)), CLUSTER)


def test_whole_stages_hold_what_they_gather_and_what_they_sum() -> None:
    """Two bytes of parameters and four of gradients, for each element, beside the shards."""
    layer = 12 * SHAPE.hidden**2 + 13 * SHAPE.hidden
    ends = SHAPE.vocab * SHAPE.hidden
    whole, apart = (priced(habits).allocated[0] for habits in (WHOLE, APART))
    held = (4 * layer + ends + SHAPE.sequence * SHAPE.hidden) * (2 + 4)
    assert whole - apart == pytest.approx(held - 2 * 2 * layer, rel=0.01)


def test_whole_stages_send_parameters_once_a_step() -> None:
    """Passes have no messages; what is reduced behind them does not grow with the micro-batches."""
    few, many = (priced(WHOLE, global_batch=size) for size in (64, 256))
    none = priced(WHOLE, zero=0)
    assert few.reduction == many.reduction > 0
    assert few.forward == none.forward and few.backward == none.backward
    assert priced(APART).backward > few.backward and priced(APART).reduction == 0


def test_one_stage_is_gathered_in_every_pass() -> None:
    assert priced(WHOLE, pipeline=1) == priced(APART, pipeline=1)


def test_the_ends_are_gathered_once_and_stay() -> None:
    root = replace(APART, whole_ends=True)
    more = priced(root, pipeline=1).allocated[0] - priced(APART, pipeline=1).allocated[0]
    ends = 2 * SHAPE.vocab * SHAPE.hidden + SHAPE.sequence * SHAPE.hidden
    assert more == pytest.approx(2 * ends, rel=0.01)
    assert priced(root, pipeline=1).backward < priced(APART, pipeline=1).backward


def test_groups_of_all_replicas_are_plain_sharding() -> None:
    assert priced(APART, pipeline=1, data=16, shards=16) == priced(APART, pipeline=1, data=16)


@pytest.mark.parametrize("zero", [1, 2])
def test_hybrid_sharding_reduces_in_a_node_and_sums_shares_between_nodes(zero: int) -> None:
    hybrid = priced(APART, pipeline=1, data=16, zero=zero, shards=8)
    elements = (
        hybrid.allocated[0] - priced(APART, pipeline=1, data=16, zero=zero).allocated[0]
    ) / ((10 + (4 if zero == 2 else 0)) * (1 / 8 - 1 / 16))
    cluster = CLUSTER.sized(16)
    inner, outer = (level.name for level in cluster.levels)
    messages = (
        collective_time("reduce_scatter", 4 * elements, 8, level=inner, cluster=cluster)
        + collective_time("all_reduce", 4 * elements / 8, 2, level=outer, cluster=cluster)
        + collective_time("all_gather", 2 * elements, 8, level=inner, cluster=cluster)
    )
    assert hybrid.reduction == pytest.approx(float(messages), rel=0.01)


def test_hybrid_sharding_keeps_gathers_inside_a_node() -> None:
    """Between nodes only shares of gradients travel, so passes are faster on a slow network."""
    port = replace(CLUSTER.levels[-1], bandwidth=1e9)
    slow = replace(CLUSTER, levels=(*CLUSTER.levels[:-1], port))
    c = Configuration(global_batch=64, data=16, zero=3).run_by(Framework(habits=APART))
    hybrid, plain = (price(SHAPE, replace(c, shards=shards), slow) for shards in (8, 0))
    assert hybrid.forward < plain.forward and hybrid.backward < plain.backward


@pytest.mark.parametrize("shards", [3, -1])
def test_groups_that_replicas_do_not_make_are_refused(shards: int) -> None:
    with pytest.raises(UsageError, match="do not make groups"):
        Configuration(global_batch=16, data=16, zero=3, shards=shards)


def test_deferred_gradients_are_whole_and_reduced_once() -> None:
    later = replace(APART, defers=True)
    one, many = (priced(later, pipeline=1, global_batch=size) for size in (8, 64))
    assert one == priced(APART, pipeline=1, global_batch=8)
    layer = 12 * SHAPE.hidden**2 + 13 * SHAPE.hidden
    elements = 8 * layer + 2 * SHAPE.vocab * SHAPE.hidden + SHAPE.sequence * SHAPE.hidden
    more = many.allocated[0] - priced(APART, pipeline=1).allocated[0]
    assert more == pytest.approx(4 * elements, rel=0.01)


def test_what_is_gathered_and_reduced_is_copied_too() -> None:
    """Out of the gathered message in both passes, 2 + 2 bytes, and into the reduced one, 6."""
    layer = 12 * SHAPE.hidden**2 + 13 * SHAPE.hidden
    elements = 8 * layer + 2 * SHAPE.vocab * SHAPE.hidden + SHAPE.sequence * SHAPE.hidden
    # Messages are waited for, and the host is ahead of nearly all of a large micro-batch.
    waiting = replace(APART, prefetch=False)
    plain, copied = (
        priced(habits, pipeline=1, micro_batch=8)
        for habits in (waiting, replace(waiting, unpacks=True, packed_bytes=6.0))
    )
    device = CLUSTER.device
    ahead, back = (float(memory_seconds(elements * n, device)) for n in (4, 10))
    assert copied.forward[0] - plain.forward[0] == pytest.approx(ahead, rel=0.06)
    assert copied.backward[0] - plain.backward[0] == pytest.approx(back, rel=0.06)
    reduced_last = replace(APART, defers=True, packed_bytes=6.0)
    once = priced(reduced_last, pipeline=1).backward[0]
    assert once < priced(replace(reduced_last, packed_bytes=60.0), pipeline=1).backward[0]
