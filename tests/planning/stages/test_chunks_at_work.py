"""Chunks of one device, of which one is at work at a time, and what a pass needs besides."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.planning.stages.cutter import Cutter
from autopar.planning.stages.operator_costs import NUMBERS, OperatorCosts
from autopar.planning.stages.piece_costs import PieceCosts
from autopar.planning.stages.stage import Place, Stage, on_one_device
from autopar.planning.stages.stage_memory import StageMemory

ZEROS = dict.fromkeys((field.name for field in fields(Stage)), 0)
EIGHT = np.zeros(8)


def chunk(memory: float, working: float) -> Stage:
    return replace(Stage(**ZEROS), memory=memory, working=working)  # type: ignore[arg-type]


def test_only_the_chunk_that_needs_most_has_room_for_its_work() -> None:
    chunks = [chunk(10.0, 2.0), chunk(20.0, 5.0), chunk(30.0, 5.0), chunk(7.0, 0.0)]
    assert [one.memory for one in on_one_device(chunks)] == [8.0, 20.0, 25.0, 7.0]
    (alone,) = on_one_device(chunks[:1])
    assert alone == chunks[0]
    assert sum(one.memory for one in on_one_device(chunks)) == 60.0 == 67.0 - 2.0 - 5.0


@pytest.mark.parametrize(("flying", "last"), [(1, 0.0), (3, 0.0), (1, 40.0)])
def test_a_stage_tells_its_work_from_what_it_holds(flying: int, last: float) -> None:
    """At rest it has what is stored, and what the micro-batches in flight have saved."""
    costs = costs_of(saved=4.0, excess=3.0, stored=5.0, flat=last)
    memory, working = StageMemory(costs, np.arange(9)).of(flying, 2, 6)
    at_rest = 4 * 5.0 + flying * 4 * 4.0
    assert memory - working == at_rest
    # The first operator's excess has the flat copies of all behind it.
    assert working == max(3.0, 4.0 + 3.0 + 3 * last - 4 * 4.0)


def costs_of(**given: float) -> OperatorCosts:
    """Eight operators that take a second and have these bytes each."""
    drawn = {
        field.name: EIGHT + given.get(field.name, float(field.name in ("forward", "backward")))
        for field in fields(OperatorCosts)
        if field.name not in ("handed", *NUMBERS)
    }
    return OperatorCosts(**drawn, handed=np.zeros(9))


def test_an_interleaved_pipeline_needs_room_for_one_chunk_at_work() -> None:
    cluster = load_cluster("dgx-h100").sized(2)
    places = [Place(cluster=cluster, start=s, count=1) for s in range(2)]

    def memory(excess: float) -> float:
        costs = PieceCosts([costs_of(saved=1.0, excess=excess)] * 2, 8)
        cut = Cutter(costs, places, [math.inf] * 2, [math.inf] * 2)
        pipeline = cut.cut("interleaved", 2)
        assert len(pipeline.stages) == 4
        own = [sum(one.memory for one in pipeline.stages[s::2]) for s in range(2)]
        assert pipeline.memory == max(own)
        return pipeline.memory

    assert memory(100.0) - memory(0.0) == 100.0
