"""The bytes of modules recomputed by name, against torch's tracker."""

from __future__ import annotations

import pytest

from autopar.costmodel.memory.peak import predicted_memory
from autopar.order.execution import execution
from autopar.planning.model.folded_model import FoldedModel
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import PLAIN, Schedule
from benchmarks.memory import graph_of, llama, planned
from benchmarks.tracked_memory import fake_world, track_program

MODULES = ("core_attn", "layernorm", "mlp", "core_attn,layernorm,mlp", "selective", "full")


@pytest.mark.slow
@pytest.mark.ci
def test_modules_by_name_as_tracked() -> None:
    graph, _ = graph_of(llama(layers=3, batch=32, sequence=128, vocab=512))
    analysis = analyse(graph, train=True)
    program = planned(analysis, "megatron-sp", (2,))
    folded = FoldedModel(graph, train=True)

    def peaks(schedule: Schedule) -> tuple[float, float]:
        plan = execution(program.assignment, analysis, schedule)
        told = predicted_memory(plan.micro, analysis, optimizer="adamw", composite=True)
        with fake_world(2):
            tracked = track_program(plan)
        return told.total, tracked.peak

    plain = peaks(PLAIN)
    assert plain[0] == pytest.approx(plain[1], rel=0.05)
    for modules in MODULES:
        told, tracked = peaks(Schedule(recompute=folded.segments(modules, short=False)))
        assert told == pytest.approx(tracked, rel=0.05), modules
    assert tracked < 0.8 * plain[1], "whole layers save most"
