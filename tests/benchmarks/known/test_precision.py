"""The price of types beside that of the computation: bytes of a parameter, of its collectives, of
the update, and of casts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.memory.peak import predicted_memory
from autopar.costmodel.step.casts import cast_seconds, gradient_seconds, unit_seconds
from autopar.costmodel.step.estimate import estimate, timeline
from autopar.costmodel.step.host_offload import state_bytes
from autopar.costmodel.step.mesh_prices import MeshPrices, storage_bytes, update_seconds
from autopar.ir import Role, Tensor
from autopar.order.scheduled import scheduled
from autopar.planning.model.request import Request
from autopar.planning.programs.priced_program import PricedProgram
from autopar.planning.space.candidates import name_axes
from autopar.schemes import AXIS_SCHEMES
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import PLAIN, Schedule, Types
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh

SHAPE = Shape(
    layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, sequence=16, dropout=False
)
CLUSTER = load_cluster("dgx-h100").sized(2)
WIDE = Types(master="float32", reduce="float32")
NARROW = Types(master="float32")
WEIGHT = Tensor(name="w", shape=(4096, 4096), dtype="bfloat16", role=Role.PARAMETER, trainable=True)


def found_of(scheme: str, types: Types, zero: int = 1) -> PricedProgram:
    """A scheme's program for a 16-bit transformer on two devices."""
    levels = bind_axes(CLUSTER, (2,))
    assert levels is not None
    analysis = analyse(transformer(SHAPE, batch=8, dtype="bfloat16").graph, train=True)
    mesh = name_axes(CLUSTER, (2,), levels)
    return best_on_mesh(
        analysis,
        mesh,
        Request(
            cluster=CLUSTER,
            mesh=mesh,
            limits=AXIS_SCHEMES[scheme],
            zero=zero,
            types=types,
            memory=math.inf,
        ),
    )


@pytest.mark.parametrize(
    ("types", "stored", "moments"),
    [(PLAIN.types, 8, 4), (NARROW, 16, 8), (WIDE, 16, 8), (Types(reduce="float32"), 10, 4)],
)
def test_bytes_of_a_stored_parameter(types: Types, stored: int, moments: int) -> None:
    """Master, gradient at the update and two moments; the copy that is computed with comes on top
    where it is kept: 18 of 16 bits.
    """
    shards = np.array([1, 4])
    assert storage_bytes(WEIGHT, shards, "adamw", train=True, types=types).tolist() == [
        stored * WEIGHT.size,
        stored * WEIGHT.size / 4,
    ]
    assert storage_bytes(WEIGHT, shards, "adamw", train=False).tolist() == [
        2 * WEIGHT.size,
        WEIGHT.size / 2,
    ]
    frozen = replace(WEIGHT, trainable=False)
    assert storage_bytes(frozen, shards, "adamw", train=True, types=types)[0] == 2 * WEIGHT.size, (
        "stored as it is used"
    )
    assert state_bytes(WEIGHT, shards, "adamw", types)[0] == moments * WEIGHT.size


def test_an_update_moves_the_master() -> None:
    low, high = (
        update_seconds(WEIGHT, np.array([1]), "adamw", CLUSTER, types)[0]
        for types in (PLAIN.types, WIDE)
    )
    assert high / low == pytest.approx(2.0, rel=0.01)
    cast = cast_seconds(WEIGHT, np.array([1]), CLUSTER, WIDE)[0]
    assert cast / high == pytest.approx(6 / (21 * 4), rel=0.1), "a cast reads 4 bytes and writes 2"
    assert cast_seconds(WEIGHT, np.array([1]), CLUSTER, PLAIN.types)[0] == 0.0


def _elements(priced: PricedProgram, *, split: bool) -> float:
    total = sum(t.size for t in priced.program.graph.parameters if t.trainable)
    return total / 2 if split else total


@pytest.mark.parametrize(("scheme", "zero", "split"), [("data", 1, False), ("zero3", 3, True)])
@pytest.mark.parametrize("types", [NARROW, WIDE])
def test_bytes_of_a_plan(scheme: str, zero: int, split: bool, types: Types) -> None:
    priced = found_of(scheme, types, zero)
    schedule = replace(priced.schedule, types=types)
    memory = predicted_memory(
        priced.program, priced.tables.analysis, optimizer="adamw", schedule=schedule
    )
    own = _elements(priced, split=split)
    assert memory.master == pytest.approx(4 * own, rel=0.01) and memory.optimizer == pytest.approx(
        8 * own, rel=0.01
    )
    low = predicted_memory(
        priced.program,
        priced.tables.analysis,
        optimizer="adamw",
        schedule=replace(schedule, types=PLAIN.types),
    )
    assert low.optimizer == pytest.approx(4 * own, rel=0.01) and low.master == 0.0
    small, large = (
        predicted_memory(
            priced.program,
            priced.tables.analysis,
            optimizer="adamw",
            schedule=replace(schedule, micro_batches=8, unit_bytes=unit),
        )
        for unit in (2**18, 2**30)
    )
    if scheme == "zero3":
        # A gathered copy is in a message first, whose shards are cast before it.
        gathered = (small.parameters + small.buffers, large.parameters + large.buffers)
        assert gathered[0] < 4 * own < gathered[1], "of small units a part is gathered at once"
        assert small.total < 0.9 * large.total
    elif types == WIDE:
        assert large.parameters == pytest.approx(2 * own, rel=0.01), (
            "the copies that are computed with stay"
        )
        assert large.gradients == pytest.approx(4 * own, rel=0.01)
        assert (
            large.master + large.optimizer + large.parameters + large.gradients
        ) / own == pytest.approx(18, rel=0.01)
    else:
        assert (large.gradients, large.transient) == (
            pytest.approx(4 * own),
            pytest.approx(4 * own),
        ), "the update of all at once"


@pytest.mark.parametrize(("scheme", "zero"), [("data", 1), ("zero3", 1), ("zero3", 3)])
def test_collectives_carry_the_types(scheme: str, zero: int) -> None:
    priced = found_of(scheme, WIDE, zero)
    parameters = {t.name for t in priced.program.graph.parameters}

    def moved(types: Types, phase: str) -> int:
        plan = scheduled(priced.program, replace(priced.schedule, types=types))
        kinds = ("all_gather",) if phase == "gather" else ("all_reduce", "reduce_scatter")
        return sum(
            c.nbytes for c in plan.collectives() if c.tensor in parameters and c.kind in kinds
        )

    assert moved(WIDE, "reduce") == 2 * moved(PLAIN.types, "reduce") > 0
    assert moved(NARROW, "reduce") == moved(PLAIN.types, "reduce")
    assert moved(WIDE, "gather") == moved(PLAIN.types, "gather"), "what is gathered is cast first"
    assert (moved(WIDE, "gather") > 0) is (scheme == "zero3")


def test_casts_are_played() -> None:
    actual = found_of("data", WIDE)
    analysis = actual.tables.analysis
    prices = MeshPrices(cluster=CLUSTER, mesh=actual.assignment.mesh)

    def played(types: Types, count: int = 1) -> tuple[float, float]:
        schedule = Schedule(types=types, micro_batches=count)
        figures = estimate(actual.program, analysis, prices, optimizer="adamw", schedule=schedule)
        events = timeline(
            actual.program, analysis, prices, optimizer="adamw", schedule=schedule
        ).events
        return figures.update, math.fsum(e.end - e.start for e in events if "cast" in e.kind)

    low, none = played(PLAIN.types)
    high, cast = played(WIDE)
    assert none == 0.0 and cast > 0.0 and high > low
    plan = scheduled(actual.program, Schedule(types=WIDE))
    each, home = gradient_seconds(plan, actual.program.assignment.gradients, CLUSTER)
    assert (
        cast == pytest.approx(math.fsum(unit_seconds(plan, CLUSTER).values()) + each, rel=0.1)
        and home == 0.0
    )
    assert played(WIDE, 2)[1] == pytest.approx(cast + each, rel=0.1), (
        "parameters once a step, gradients with each micro-batch"
    )
    assert (
        gradient_seconds(
            scheduled(actual.program, Schedule(types=NARROW)),
            actual.program.assignment.gradients,
            CLUSTER,
        )[1]
        > 0.0
    )


@pytest.mark.parametrize("scheme", ["data", "zero3", "tensor"])
def test_tables_add_up_to_the_program(scheme: str) -> None:
    """The memory that a solution promises is near that of its program, as it is without casts."""
    shares = []
    for types in (PLAIN.types, WIDE):
        priced = found_of(scheme, types)
        shares.append(priced.tables.graph.memory_of(priced.solution.choices) / priced.memory)
    assert shares[1] == pytest.approx(shares[0], rel=0.25)
