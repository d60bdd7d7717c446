"""The timeline of a step against hand-made sums, its bounds for every option, and the trace that is
written of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel import Cluster, bind_axes, load_cluster
from autopar.costmodel.step.covered import SLOWDOWN
from autopar.costmodel.step.estimate import estimate, timeline
from autopar.costmodel.step.issuer import PARAMETERS
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.pipeline_simulation import simulate
from autopar.costmodel.step.reasons import Reason
from autopar.costmodel.step.streams import COMPUTE, Event, Streams
from autopar.costmodel.step.timeline import Overlap, Timeline
from autopar.costmodel.step.trace import chrome_trace, pipeline_events
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.scheduled import Scheduled, scheduled
from autopar.order.times import Times
from autopar.planning.model.pins import Pins, parse_pin
from autopar.planning.model.request import Request
from autopar.schemes import scheme_named
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Axis, Mesh, degree_of
from autopar.sharding.program import Compute, Program, Redistribute
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import PLAIN, Schedule
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh
from tests.sharding.direct_assignment import pinned_assignment

SHAPE = Shape(
    layers=3, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=4096, sequence=512, dropout=False
)
KINDS = {
    "data": ("data",),
    "tensor": ("tensor",),
    "sequence": ("sequence",),
    "ring": ("ring",),
    "both": ("data", "tensor"),
}
BY_KIND = {"data": "data", "tensor": "megatron", "sequence": "megatron-sp"}
NAMES = [*KINDS, "zero3"]
MIB = 2**20
COPIES = ("flatten", "unflatten")

Case = tuple[Program, Analysis, MeshPrices]


def case(name: str) -> Case:
    """A small transformer under a known scheme on 4 devices a mesh axis, with slow links so that
    communication matters.
    """
    kinds = KINDS.get(name, ("data",))
    model = transformer(SHAPE, batch=8)
    analysis = analyse(model.graph, train=True)
    sizes = (4,) * len(kinds)
    cluster = slow(load_cluster("dgx-a100").sized(math.prod(sizes)))
    levels = bind_axes(cluster, sizes)
    assert levels is not None
    mesh = Mesh(
        axes=tuple(
            Axis(name=kind, size=size, level=level)
            for kind, size, level in zip(kinds, sizes, levels, strict=True)
        )
    )
    if name == "ring":
        pins = Pins(operators=dict([parse_pin("*.core=ring:k")]))
        actual = best_on_mesh(analysis, mesh, Request(cluster=cluster, mesh=mesh, limits=pins))
        return actual.program, analysis, actual.tables.prices
    scheme = scheme_named(",".join(f"{kind}:{BY_KIND[kind]}" for kind in kinds))
    best = best_on_mesh(analysis, mesh, Request(cluster=cluster, mesh=mesh, limits=scheme, zero=0))
    decisions = best.program.assignment.decisions
    # A scalar is pinned by its first input.
    shapes = {op.name: model.graph.tensors[op.outputs[0]].shape for op in model.graph.operators}
    wanted = {
        op: list(decided.outputs[0] if shapes[op] else decided.inputs[0])
        for op, decided in decisions.items()
    }
    assignment = pinned_assignment(
        analysis, mesh, wanted, split_storage=[0] if name == "zero3" else []
    )
    return build_program(model.graph, assignment), analysis, MeshPrices(cluster=cluster, mesh=mesh)


def slow(cluster: Cluster) -> Cluster:
    return replace(
        cluster,
        levels=tuple(replace(level, bandwidth=level.bandwidth / 8) for level in cluster.levels),
    )


def played(played_case: Case, schedule: Schedule = PLAIN, **options: bool | float) -> Timeline:
    return timeline(*played_case, optimizer="adamw", overlap=Overlap(**options), schedule=schedule)  # type: ignore[arg-type]


def sent(of_step: Timeline) -> list[Event]:
    return [event for event in of_step.events if event.stream != COMPUTE]


def total(of_step: Timeline) -> float:
    return of_step.forward + of_step.backward + of_step.update + of_step.communication


def on(events: Sequence[Event], stream: str) -> list[Event]:
    return [event for event in events if event.stream == stream]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_played_is_what_the_program_issues(name: str) -> None:
    result = case(name)
    program, _, prices = result
    for schedule in (
        Schedule(),
        Schedule(unit_bytes=4 * MIB),
        Schedule(unit_bytes=4 * MIB, gathered="per_pass"),
    ):
        plan = scheduled(program, schedule)
        moved = [c for c in plan.collectives() if degree_of(c.axes, prices.mesh.shape) > 1]
        issued = Counter((c.phase, c.kind, c.tensor, c.nbytes) for c in moved)
        timed = played(result, schedule)
        assert Counter(e[:3] for e in issued.elements()) == Counter(
            (e.phase, e.kind, e.name) for e in sent(timed)
        )
        assert timed.communication == pytest.approx(
            math.fsum(prices.seconds(c.kind, c.axes, c.nbytes) for c in plan.collectives())
        )


@pytest.mark.parametrize("name", NAMES)
def test_without_overlap_a_step_is_the_sum_of_its_parts(name: str) -> None:
    timed = played(case(name), gradients=False, prefetch=False)
    if name == "ring":
        assert timed.hidden > 0.0, "a ring computes while it sends, whatever else is hidden"
    else:
        assert timed.step == pytest.approx(total(timed), rel=1e-12)
        assert timed.hidden == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slowdown", [1.0, 1.1256])
def test_streams_work_one_task_at_a_time_and_bound_the_step(name: str, slowdown: float) -> None:
    result = case(name)
    for schedule in (
        Schedule(unit_bytes=4 * MIB),
        Schedule(unit_bytes=4 * MIB, gathered="per_pass", micro_batches=3),
    ):
        bound = played(result, schedule, slowdown=slowdown, gradients=False, prefetch=False).step
        for prefetch in (False, True):
            timed = played(result, schedule, slowdown=slowdown, prefetch=prefetch)
            for stream in {event.stream for event in timed.events}:
                for before, after in pairwise(on(timed.events, stream)):
                    assert before.end <= after.start
            assert max(event.end for event in timed.events) == timed.step
            busy = timed.forward + timed.backward + timed.update
            assert busy <= timed.step <= total(timed) * (1 + 1e-12)
            assert timed.step <= bound * (1 + 1e-12)


def test_a_bucket_of_gradients_is_summed_when_its_last_gradient_is_there() -> None:
    """Flattened behind the backward pass of the first operator that reads any of it, and waited for
    at the end of the step alone.
    """
    program, analysis, _ = actual = case("data")
    plan = scheduled(program, Schedule(unit_bytes=8 * MIB))
    timed = played(actual, plan.schedule)
    assert len(plan.buckets) > 2
    sums = [event for event in on(timed.events, "data" + PARAMETERS) if event.phase == "backward"]
    assert [event.name for event in sums] == [bucket.parameters[0] for bucket in plan.buckets]
    backward = {
        e.name: e
        for e in timed.events
        if e.stream == COMPUTE and e.phase == "backward" and e.kind != "flatten"
    }
    filled = {e.name: e for e in timed.events if e.kind == "flatten"}
    free = 0.0
    for bucket, event in zip(plan.buckets, sums, strict=True):
        users = [
            op.name
            for op in analysis.graph.operators
            if not set(op.inputs).isdisjoint(bucket.parameters)
        ]
        fill = filled[bucket.parameters[0]]
        assert fill.start >= max(backward[name].end for name in users if name in backward) * (
            1 - 1e-12
        )
        assert event.start == pytest.approx(max(fill.end, free), rel=1e-12)
        free = event.end
    computed = [e for e in on(timed.events, COMPUTE) if e.phase != "update"]
    other = {event.end for event in sent(timed) if event not in sums}
    assert all(
        after.start == before.end or after.start in other for before, after in pairwise(computed)
    ), "nothing waits for a sum"
    assert timed.step == pytest.approx(
        max(computed[-1].end, sums[-1].end) + timed.update, rel=1e-12
    )
    alone = played(actual, plan.schedule, gradients=False)
    assert alone.hidden == 0.0 < timed.hidden and timed.step < alone.step
    assert timed.hidden == pytest.approx(alone.step - timed.step, rel=1e-9), (
        "what is hidden is what the step is shorter by"
    )


@pytest.mark.parametrize("gathered", ["per_step", "per_pass"])
def test_a_prefetched_unit_comes_under_the_segment_before_the_one_that_reads_it(
    gathered: str,
) -> None:
    result = case("zero3")
    schedule = Schedule(unit_bytes=16 * MIB, gathered=gathered)  # type: ignore[arg-type]
    plan = scheduled(result[0], schedule)
    assert len(plan.units) > 3
    ahead = played(result, schedule)
    blocking = played(result, schedule, prefetch=False)
    assert (
        ahead.communication == pytest.approx(blocking.communication) and ahead.step < blocking.step
    )
    first = _first_readers(plan)
    for timed, prefetch in ((ahead, 1), (blocking, 0)):
        started = {
            e.name: e
            for e in timed.events
            if e.stream == COMPUTE and e.phase == "forward" and e.kind not in COPIES
        }
        filled = {
            e.name: e
            for e in reversed(timed.events)
            if e.kind == "flatten" and e.phase == "forward"
        }
        gathers = {
            e.name: e
            for e in reversed(timed.events)
            if e.kind == "all_gather" and e.phase == "forward"
        }
        assert set(first) <= set(gathers)
        for name, (segment, reader) in first.items():
            assert started[reader].start >= gathers[name].end
            if segment > prefetch and (before := _last(plan, segment - prefetch - 1, started)):
                assert gathers[name].start >= started[before].end, "not issued earlier"
            if (later := _last(plan, max(segment - prefetch, 0), started)) and prefetch:
                assert filled[name].end <= started[later].end, "but before that segment computes"


def test_a_prefetch_leaves_the_longer_of_compute_and_communication() -> None:
    """With links so slow that gathers take longer than the segments above them, the forward pass is
    one gather after another.
    """
    program, analysis, prices = case("zero3")
    links = replace(prices, cluster=slow(slow(prices.cluster)))
    schedule = Schedule(unit_bytes=16 * MIB)
    timed = played((program, analysis, links), schedule)
    gathers = [e for e in sent(timed) if e.kind == "all_gather" and e.phase == "forward"]
    idle = [after.start - before.end for before, after in pairwise(gathers)]
    longest = max(e.end - e.start for e in gathers)
    assert sum(idle) < 0.1 * sum(e.end - e.start for e in gathers) and max(idle) < longest


def test_a_reduce_scatter_is_waited_for_when_the_next_one_begins() -> None:
    """At most one message of a unit's gradients is under way; the next is flattened after it."""
    actual = case("zero3")
    timed = played(actual, Schedule(unit_bytes=16 * MIB, gathered="per_pass"))
    scatters = [e for e in sent(timed) if e.kind == "reduce_scatter"]
    filled = {
        e.name: e
        for e in timed.events
        if e.kind == "flatten" and e.phase == "backward" and e.name in {s.name for s in scatters}
    }
    assert len(scatters) > 3
    for before, after in pairwise(scatters):
        assert before.end <= after.start
    assert (
        timed.step
        < played(actual, Schedule(unit_bytes=16 * MIB, gathered="per_pass"), gradients=False).step
    )
    assert set(filled) == {s.name for s in scatters}


def _first_readers(plan: Scheduled) -> dict[str, tuple[int, str]]:
    """By the first tensor of every unit that is gathered: the first segment that reads it, and its
    first operator that does.
    """
    results = {}
    steps = plan.program.steps
    for number, segment in enumerate(plan.segments):
        for unit in segment.units:
            members = [
                step
                for index in plan.units[unit].members
                if isinstance(step := steps[index], Redistribute)
            ]
            if plan.gather_rounds(unit) and members[0].tensor not in results:
                names = {member.tensor for member in members}
                readers = (
                    step.operator for i in segment.steps if isinstance(step := steps[i], Compute)
                )
                results[members[0].tensor] = (
                    number,
                    next(op.name for op in readers if not names.isdisjoint(op.inputs)),
                )
    return results


def _last(plan: Scheduled, number: int, started: Mapping[str, Event]) -> str:
    """The last operator of a segment that takes any time."""
    steps = (plan.program.steps[index] for index in plan.segments[number].steps)
    return next(
        reversed(
            [
                s.operator.name
                for s in steps
                if isinstance(s, Compute) and s.operator.name in started
            ]
        ),
        "",
    )


def test_a_ring_computes_a_block_while_the_next_is_under_way() -> None:
    """Forward p - 1 rounds of max(block, send) and one of the block; backward the gradients follow
    and the last one is waited for.
    """
    timed = played(case("ring"), gradients=False, prefetch=False)
    attention = next(e.name for e in timed.events if e.stream == COMPUTE and ".core" in e.name)
    blocks = [
        e
        for e in timed.events
        if e.name == attention and e.stream == COMPUTE and e.phase == "forward"
    ]
    sends = [e for e in timed.events if e.kind == "send" and e.phase == "forward"][:3]
    assert len(blocks) == 4
    block = blocks[0].end - blocks[0].start
    send = sends[0].end - sends[0].start
    assert blocks[-1].end - blocks[0].start == pytest.approx(3 * max(block, send) + block, rel=1e-9)
    back = [
        e
        for e in timed.events
        if e.name == attention and e.stream == COMPUTE and e.phase == "backward"
    ]
    sent = [
        e
        for e in timed.events
        if e.kind == "send" and e.phase == "backward" and e.end >= back[0].start
    ][:7]
    assert [e.start for e in back] == sorted(e.start for e in back) and len(back) == 4
    assert all(after.start >= before.end for before, after in pairwise(sent))
    assert all(
        block.start >= values.end - 1e-15
        for block, values in zip(back[1:], sent[0:6:2], strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(
    sends=st.lists(st.tuples(st.floats(0.1, 3.0), st.sampled_from("ab")), max_size=6),
    works=st.lists(st.floats(0.05, 4.0), min_size=1, max_size=5),
    slowdown=st.floats(1.0, 2.0),
)
def test_computation_is_slowed_just_while_something_is_sent(
    sends: list[tuple[float, str]], works: list[float], slowdown: float
) -> None:
    streams = Streams(slowdown)
    for seconds, stream in sends:
        streams.send("x", "send", stream, seconds, Reason.VALUES)
    for work in works:
        streams.compute("y", "mm", work)
    events = streams.play().events
    for work, (*_, start, end) in zip(works, on(events, COMPUTE), strict=True):
        busy = [(max(e.start, start), min(e.end, end)) for e in events if e.stream != COMPUTE]
        marks = sorted({start, end, *(mark for pair in busy for mark in pair if pair[0] < pair[1])})
        done = sum(
            (b - a)
            / (slowdown if any(low <= a and b <= high for low, high in busy if low < high) else 1.0)
            for a, b in pairwise(marks)
        )
        assert done == pytest.approx(work, rel=1e-9)


@pytest.mark.parametrize(
    ("issued", "expected"),
    [
        ([(0.0, 4.0, "a"), (0.0, 4.0, "c")], [(0.0, 4.0), (0.0, 4.0)]),  # over other links: alone
        ([(0.0, 4.0, "a"), (0.0, 4.0, "b")], [(0.0, 8.0), (0.0, 8.0)]),
        ([(0.0, 10.0, "a"), (2.0, 1.0, "b")], [(0.0, 11.0), (2.0, 4.0)]),
        ([(0.0, 2.0, "a"), (0.0, 2.0, "a"), (1.0, 2.0, "b")], [(0.0, 3.0), (3.0, 6.0), (1.0, 5.0)]),
        ([(0.0, 3.0, "a"), (0.0, 3.0, "b"), (0.0, 3.0, "d")], [(0.0, 9.0), (0.0, 9.0), (0.0, 9.0)]),
    ],
)
def test_streams_on_one_link_divide_it(
    issued: list[tuple[float, float, str]], expected: list[tuple[float, float]]
) -> None:
    uses = {"a": {"l": 1.0}, "b": {"l": 1.0}, "c": {"nic": 1.0}, "d": {"l": 1.0}}
    sent = _sent(uses, issued)
    assert [(one.start, one.end) for one in sent] == [pytest.approx(pair) for pair in expected]


def test_a_group_over_two_levels_keeps_both_busy() -> None:
    """Beside it, what is sent inside a node is slowed by the share of the inner link it takes."""
    both = {"nic": 1.0, "nvlink": 0.5}
    uses = {"joint": both, "inner": {"nvlink": 1.0}, "outer": {"nic": 1.0}}
    issued = [(0.0, 3.0, "joint"), (0.0, 2.0, "inner"), (4.0, 1.0, "outer")]
    joint, inner, outer = _sent(uses, issued)
    assert (joint.end, inner.end) == (pytest.approx(4.0), pytest.approx(3.0))
    assert outer.end == pytest.approx(5.0)


@settings(max_examples=60, deadline=None)
@given(
    sends=st.lists(
        st.tuples(st.floats(0.0, 2.0), st.floats(0.1, 3.0), st.sampled_from("ab")),
        min_size=1,
        max_size=8,
    )
)
def test_a_shared_link_rests_only_when_nobody_sends(sends: list[tuple[float, float, str]]) -> None:
    """It sends as much as streams that take turns would, and ends when they would; each stream
    keeps its order.
    """
    starts = list(accumulate(pause for pause, _, _ in sends))
    issued = [(at, *rest) for at, (_, *rest) in zip(starts, sends, strict=True)]
    results = _sent({"a": {"l": 1.0}, "b": {"l": 1.0}}, issued)
    turns = _sent({}, [(at, seconds, "one") for at, seconds, _ in issued])
    assert max(one.end for one in results) == pytest.approx(turns[-1].end)
    works = [seconds for _, seconds, _ in sends]
    for stream in "ab":
        own = on(results, stream)
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(own))
    assert all(one.end - one.start >= w - 1e-9 for one, w in zip(results, works, strict=True))


def _sent(
    uses: Mapping[str, Mapping[str, float]], issued: Sequence[tuple[float, float, str]]
) -> list[Event]:
    """Transfers that are issued at these times, for so many seconds, on these streams."""
    streams = Streams(1.0, uses)
    now = 0.0
    for at, seconds, stream in issued:
        streams.compute("y", "mm", at - now)
        now = at
        streams.send("x", "send", stream, seconds, Reason.VALUES)
    return [event for event in streams.play().events if event.stream != COMPUTE]


def test_time_that_is_not_played_moves_what_is_under_way() -> None:
    """A second micro-batch is played once, and counts five times more."""
    streams = Streams(1.0, {"a": {"l": 1.0}, "b": {"l": 1.0}})
    streams.mark()
    streams.compute("y", "mm", 2.0)
    streams.send("x", "send", "a", 4.0, Reason.VALUES)
    alone = streams.send("x", "send", "c", 1.0, Reason.VALUES)
    streams.repeat(5)
    streams.send("x", "send", "b", 4.0, Reason.VALUES)
    streams.wait(alone)
    streams.finish()
    played = streams.play()
    assert (played.now, played.spent["forward"]) == (20.0, 12.0)
    # 2 + 4 + 1 in the first, which counts six times, and 4 behind it.
    assert played.communication == 34.0
    assert [(wait.sent.stream, wait.seconds) for wait in played.waits] == [("c", 1.0), ("a", 7.0)]


def test_an_estimate_takes_its_step_from_the_timeline() -> None:
    result = case("data")
    figures = estimate(*result, optimizer="adamw")
    timed = played(result, slowdown=SLOWDOWN["nccl"])
    assert figures.overlapped == timed.hidden > 0.0
    assert figures.step == pytest.approx(timed.step, rel=1e-12)


def _threads(trace: dict[str, object]) -> dict[tuple[int, int], list[dict[str, float]]]:
    events = trace["traceEvents"]
    assert isinstance(events, list)
    results: dict[tuple[int, int], list[dict[str, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            results.setdefault((event["pid"], event["tid"]), []).append(event)
    return results


def test_a_trace_holds_every_event_on_its_thread_in_microseconds() -> None:
    timed = played(case("both"))
    trace = json.loads(json.dumps(chrome_trace({"each of 16 ranks": timed.events})))
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    threads = _threads(trace)
    assert {names[key] for key in threads} == {COMPUTE, "data", "data" + PARAMETERS, "tensor"}
    assert sum(map(len, threads.values())) == len(timed.events)
    for events in threads.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-12)
    last = max(e["ts"] + e["dur"] for events in threads.values() for e in events)
    assert last == pytest.approx(timed.step * 1e6, rel=1e-12)


def test_a_pipeline_is_traced_with_a_process_for_each_stage() -> None:
    run = simulate(
        pipeline_order("interleaved", 3, 6, 2, edges=neighbours(6)),
        Times.of([1.0] * 3, [2.0] * 3, 0.0, 0.25),
        2,
    )
    trace = json.loads(json.dumps(chrome_trace(pipeline_events(run))))
    stages = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert stages == ["stage 0", "stage 1", "stage 2"]
    threads = _threads(trace)
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    actual = {(pid, names[pid, tid]): len(events) for (pid, tid), events in threads.items()}
    passes = {(stage, COMPUTE): 24 for stage in range(3)}
    onwards = {(0, "to stage 1"): 12, (1, "to stage 2"): 12, (2, "to stage 0"): 6}
    back = {(2, "to stage 1"): 12, (1, "to stage 0"): 12, (0, "to stage 2"): 6}
    assert actual == passes | onwards | back
    assert max(e["ts"] + e["dur"] for events in threads.values() for e in events) == pytest.approx(
        run.seconds * 1e6
    )
    assert threads[0, 0][0]["name"] == "forward 0 chunk 0"
