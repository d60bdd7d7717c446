"""A step under a schedule: its memory as torch's tracker sees it, and its time as the sum of what
it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.memory.peak import predicted_memory
from autopar.costmodel.step import timeline as timelines
from autopar.costmodel.step.estimate import estimate, timeline
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.streams import COMPUTE
from autopar.costmodel.step.timeline import Overlap, Timeline
from autopar.order.execution import Execution, execution
from autopar.planning.space.candidates import name_axes
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.program import Program
from autopar.sharding.schedule import Schedule
from benchmarks.tracked_memory import Tracked, fake_world, track_program
from tests.costmodel.memory.test_memory import gpt2, graph_of, planned

RANKS = 4


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """A GPT-2 whose activations and weights both count."""
    return analyse(graph_of(gpt2(layers=2, batch=32, sequence=16, vocab=256))[0], train=True)


@pytest.fixture(scope="module")
def programs(analysis: Analysis) -> dict[str, Program]:
    """Plans for four ranks."""
    return {scheme: planned(analysis, scheme, (RANKS,)) for scheme in ("data", "zero3", "megatron")}


def _layers(analysis: Analysis) -> tuple[tuple[str, ...], ...]:
    names = [op.name for op in analysis.warm]
    return tuple(
        tuple(name for name in names if f".h.{layer}." in name or f".h.{layer}/" in name)
        for layer in range(2)
    )


def _schedules(analysis: Analysis, scheme: str) -> Iterator[Schedule]:
    modes = (
        (("per_step", "whole"), ("per_step", "shards"), ("per_pass", "shards"))
        if scheme == "zero3"
        else (("per_step", "whole"),)
    )
    for count, unit, (gathered, accumulated), recompute in itertools.product(
        (1, 4), (2, 25), modes, ((), _layers(analysis))
    ):
        yield Schedule(
            micro_batches=count,
            gathered=gathered,
            accumulated=accumulated,
            recompute=recompute,
            unit_bytes=unit * 2**20,  # type: ignore[arg-type]
        )


def _case(program: Program, analysis: Analysis, schedule: Schedule) -> tuple[Execution, Analysis]:
    return execution(program.assignment, analysis, schedule), split_batch(
        analysis, schedule.micro_batches
    )


@pytest.mark.parametrize("scheme", ["data", "zero3", "megatron"])
def test_memory_as_tracked(scheme: str, analysis: Analysis, programs: dict[str, Program]) -> None:
    for schedule in list(_schedules(analysis, scheme))[:: 7 if scheme == "zero3" else 4]:
        _as_tracked(programs[scheme], analysis, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["data", "zero3", "megatron"])
def test_memory_as_tracked_under_every_schedule(
    scheme: str, analysis: Analysis, programs: dict[str, Program]
) -> None:
    for schedule in _schedules(analysis, scheme):
        _as_tracked(programs[scheme], analysis, schedule)


def _as_tracked(program: Program, analysis: Analysis, schedule: Schedule) -> None:
    result, micro = _case(program, analysis, schedule)
    told = predicted_memory(result.micro, micro, optimizer="adamw", composite=True)
    with fake_world(RANKS):
        seen = track_program(result)
    assert told.total == pytest.approx(seen.peak, rel=0.03), schedule


@pytest.mark.slow
@pytest.mark.ci
def test_memory_drops(analysis: Analysis, programs: dict[str, Program]) -> None:
    """By torch's tracker: with recompute, with micro-batches, with gathering again, and with
    gradients that are added up as shards.
    """

    def peak(scheme: str, **schedule: object) -> int:
        result, _ = _case(programs[scheme], analysis, Schedule(**schedule))  # type: ignore[arg-type]
        with fake_world(RANKS):
            seen: Tracked = track_program(result)
        return seen.peak

    layers = _layers(analysis)
    plain = peak("megatron")
    # Most of these peaks is parameters and their state, as activations keep little.
    assert peak("megatron", recompute=layers) < 0.99 * plain
    assert peak("megatron", micro_batches=4) < plain
    kept, shards, again = (
        peak(
            "zero3",
            micro_batches=4,
            gathered=gathered,
            accumulated=accumulated,
            unit_bytes=2 * 2**20,
        )
        for gathered, accumulated in (
            ("per_step", "whole"),
            ("per_step", "shards"),
            ("per_pass", "shards"),
        )
    )
    assert again < 0.8 * shards < 0.8 * kept
    large = peak("zero3", micro_batches=4, gathered="per_pass", accumulated="shards")
    assert again < 0.8 * large, "small units hold less at once"


# --- time ---


def _prices() -> MeshPrices:
    cluster = load_cluster("dgx-a100").sized(RANKS)
    levels = bind_axes(cluster, (RANKS,))
    assert levels is not None
    return MeshPrices(cluster=cluster, mesh=name_axes(cluster, (RANKS,), levels))


def _computed(of_step: Timeline, phase: str) -> float:
    """Seconds of operators, without copies of parameters and gradients."""
    copies = ("flatten", "unflatten", "accumulation")
    return math.fsum(
        e.end - e.start
        for e in of_step.events
        if e.stream == COMPUTE and e.phase == phase and e.kind not in copies
    )


@pytest.mark.parametrize("scheme", ["data", "zero3", "megatron"])
def test_time_is_the_sum_of_what_runs(
    scheme: str, analysis: Analysis, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All collectives of the step; the passes of every micro-batch, and the forward pass of what is
    recomputed once more.
    """
    monkeypatch.setattr(timelines, "PLAYED", 100)
    prices = _prices()
    still = Overlap()
    for schedule in _schedules(analysis, scheme):
        actual, micro = _case(programs[scheme], analysis, schedule)
        one = replace(schedule, micro_batches=1, recompute=())
        seen = timeline(actual.micro, micro, prices, optimizer="adamw", overlap=still)
        alone = timeline(
            actual.micro.program, micro, prices, optimizer="adamw", schedule=one, overlap=still
        )
        count = schedule.micro_batches
        forward = _computed(alone, "forward")
        assert seen.communication == pytest.approx(
            math.fsum(prices.seconds(c.kind, c.axes, c.nbytes) for c in actual.micro.collectives())
        )
        assert _computed(seen, "forward") == pytest.approx(count * forward)
        repeated = _computed(seen, "backward") - count * _computed(alone, "backward")
        assert (
            0.5 * count * forward < repeated < count * forward
            if schedule.recompute
            else repeated == pytest.approx(0.0, abs=1e-9)
        )
        assert seen.update == alone.update
        copies = (
            seen.forward + seen.backward - _computed(seen, "forward") - _computed(seen, "backward")
        )
        assert copies < 0.6 * (seen.forward + seen.backward) and (
            copies > 0.0 or scheme == "megatron"
        )
        figures = estimate(actual.micro, micro, prices, optimizer="adamw")
        assert figures.step == pytest.approx(
            timeline(actual.micro, micro, prices, optimizer="adamw").step
        )


def test_plain_is_as_before(analysis: Analysis, programs: dict[str, Program]) -> None:
    prices = _prices()
    for program in programs.values():
        plain = timeline(program, analysis, prices, optimizer="adamw")
        assert (
            plain.events
            == timeline(program, analysis, prices, optimizer="adamw", schedule=Schedule()).events
        )
        memory = predicted_memory(program, analysis, optimizer="adamw")
        assert memory == predicted_memory(program, analysis, optimizer="adamw", schedule=Schedule())


@pytest.mark.parametrize("scheme", ["data", "zero3", "megatron"])
def test_what_is_not_played_takes_as_long(
    scheme: str, analysis: Analysis, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = _prices()
    schedule = Schedule(
        micro_batches=8, gathered="per_pass", accumulated="shards", recompute=_layers(analysis)
    )
    result, micro = _case(programs[scheme], analysis, schedule)
    short = timeline(result.micro.program, micro, prices, optimizer="adamw", schedule=schedule)
    monkeypatch.setattr(timelines, "PLAYED", 100)
    long = timeline(result.micro.program, micro, prices, optimizer="adamw", schedule=schedule)
    assert len(long.events) > 1.8 * len(short.events)
    for what in ("forward", "backward", "update", "communication", "step"):
        assert getattr(short, what) == pytest.approx(getattr(long, what), rel=1e-9), what


def test_buckets_are_hidden_under_the_last_micro_batch_only(
    analysis: Analysis, programs: dict[str, Program]
) -> None:
    prices = _prices()
    for count in (1, 4):
        schedule = Schedule(micro_batches=count, unit_bytes=4 * 2**20)
        result, micro = _case(programs["data"], analysis, schedule)
        seen = timeline(result.micro.program, micro, prices, optimizer="adamw", schedule=schedule)
        last = max(event.start for event in seen.events if event.phase == "forward")
        named = {bucket.parameters[0] for bucket in result.micro.buckets}
        sums = [
            event
            for event in seen.events
            if event.kind == "all_reduce" and event.phase == "backward" and event.name in named
        ]
        assert sums and all(event.start > last for event in sums)
        busy = [
            event
            for event in seen.events
            if event.phase == "backward" and event.stream == "compute" and event.start > last
        ]
        assert 0 < seen.hidden <= sum(event.end - event.start for event in busy)
