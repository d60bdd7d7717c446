"""The timeline of a step against hand-made sums, its bounds for every option, and the trace that is written of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel import Cluster, bind_axes, load_cluster
from autopar.costmodel.estimate import estimate, timeline
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.costmodel.pipeline_simulation import simulate
from autopar.costmodel.pricing import MeshPrices
from autopar.costmodel.streams import COMPUTE, Clock, Event
from autopar.costmodel.timeline import SLOWDOWN, Overlap, Timeline
from autopar.costmodel.trace import chrome_trace, pipeline_events
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.times import Times
from autopar.pins import Pins, parse_pin
from autopar.planner import Request, best_on_mesh
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.pinned import pinned_assignment
from autopar.sharding.program import Program, build_program

SHAPE = Shape(layers=3, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=4096, sequence=512, dropout=False)
KINDS = {"data": ("data",), "tensor": ("tensor",), "sequence": ("sequence",), "ring": ("ring",), "both": ("data", "tensor")}
NAMES = [*KINDS, "zero3"]

Case = tuple[Program, Analysis, MeshPrices]


def case(name: str) -> Case:
    """A small transformer under a known scheme on 4 devices a mesh axis, with slow links so that communication matters."""
    kinds = KINDS.get(name, ("data",))
    model = transformer(SHAPE, batch=8, dtype="bfloat16", attention="flash2", norm="fused", layers=SHAPE.layers)
    analysis = analyse(model.graph, train=True)
    sizes = (4,) * len(kinds)
    cluster = slow(load_cluster("dgx-a100").sized(math.prod(sizes)))
    levels = bind_axes(cluster, sizes)
    assert levels is not None
    mesh = Mesh(axes=tuple(Axis(name=kind, size=size, level=level) for kind, size, level in zip(kinds, sizes, levels, strict=True)))
    if name == "ring":
        pins = Pins(operators=dict([parse_pin("*.core=ring:k")]))
        found = best_on_mesh(analysis, mesh, Request(cluster=cluster, mesh=mesh, limits=pins))
        return found.program, analysis, found.tables.prices
    wanted = {op: [getattr(placements, kind) for kind in kinds] for op, placements in model.wanted.items()}
    assignment = pinned_assignment(analysis, mesh, wanted, split_storage=[0] if name == "zero3" else [])
    return build_program(model.graph, assignment), analysis, MeshPrices(cluster=cluster, mesh=mesh)


def slow(cluster: Cluster) -> Cluster:
    return replace(cluster, levels=tuple(replace(level, bandwidth=level.bandwidth / 8) for level in cluster.levels))


def played(found: Case, **options: bool | float) -> Timeline:
    return timeline(*found, optimizer="adamw", overlap=Overlap(**options))  # type: ignore[arg-type]


def total(found: Timeline) -> float:
    return found.forward + found.backward + found.update + found.communication


def on(events: Sequence[Event], stream: str) -> list[Event]:
    return [event for event in events if event.stream == stream]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_played_is_what_the_program_issues(name: str) -> None:
    found = case(name)
    program, _, prices = found
    every = played(found, gradients=True, weight_gradients=True, prefetch=True)
    issued = Counter((c.phase, c.kind, c.tensor) for c in program.collectives() if prices.mesh.shape[c.axis] > 1)
    for timed in (played(found), every):
        assert Counter((e.phase, e.kind, e.name) for e in timed.events if e.stream != COMPUTE) == issued
        assert timed.communication == math.fsum(prices.seconds(c.kind, c.axis, c.nbytes) for c in program.collectives())
    assert every.backward == pytest.approx(played(found).backward, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_without_overlap_a_step_is_the_sum_of_its_parts(name: str) -> None:
    timed = played(case(name), gradients=False)
    if name == "ring":
        assert timed.hidden > 0.0, "a ring computes while it sends, whatever else is hidden"
    elif name == "data":
        copied = sum(e.end - e.start for e in timed.events if e.kind in ("flatten gradients", "write gradients back"))
        assert 0.0 < timed.hidden <= copied, "a bucket is filled, and another emptied, while one is summed"
    else:
        assert timed.step == pytest.approx(total(timed), rel=1e-12)
        assert timed.hidden == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slowdown", [1.0, 1.1256])
def test_streams_work_one_task_at_a_time_and_bound_the_step(name: str, slowdown: float) -> None:
    found = case(name)
    for options in ({}, {"weight_gradients": True}, {"prefetch": True}, {"weight_gradients": True, "prefetch": True}):
        timed = played(found, slowdown=slowdown, **options)
        for stream in {event.stream for event in timed.events}:
            for before, after in pairwise(on(timed.events, stream)):
                assert before.end <= after.start
        assert max(event.end for event in timed.events) == timed.step
        busy = timed.forward + timed.backward + timed.update
        assert busy <= timed.step <= total(timed) * (1 + 1e-12)
        assert timed.step <= played(found, slowdown=slowdown, gradients=False).step * (1 + 1e-12)


def test_a_gradient_bucket_starts_when_its_last_gradient_is_there() -> None:
    program, analysis, _ = found = case("data")
    timed = played(found)
    assert len(program.buckets) > 2
    sums = [event for event in on(timed.events, "data") if event.phase == "backward"]
    assert [event.name for event in sums] == [bucket.parameters[0] for bucket in program.buckets]
    backward = {e.name: e.end for e in timed.events if e.stream == COMPUTE and e.phase == "backward"}
    filled = {e.name: e for e in timed.events if e.kind == "flatten gradients"}
    free = 0.0
    ready = 0.0
    for bucket, event in zip(program.buckets, sums, strict=True):
        users = [op.name for op in analysis.graph.operators if not set(op.inputs).isdisjoint(bucket.parameters)]
        ready = max(ready, *(backward[name] for name in users if name in backward))
        fill = filled[bucket.parameters[0]]
        assert fill.start >= ready * (1 - 1e-12)
        assert event.start == pytest.approx(max(fill.end, free), rel=1e-12)
        free = event.end
    emptied = [e for e in timed.events if e.kind == "write gradients back"]
    assert [e.name for e in emptied] == [bucket.parameters[0] for bucket in program.buckets]
    assert all(e.start >= s.end * (1 - 1e-12) for e, s in zip(emptied, sums, strict=True))
    assert timed.step == pytest.approx(emptied[-1].end + timed.update, rel=1e-12)
    assert timed.hidden > played(found, gradients=False).hidden


def test_weight_gradients_hide_the_sums_of_input_gradients() -> None:
    """Each such sum is hidden for as long as the weight gradient of its readers takes."""
    timed = played(case("tensor"), gradients=False, weight_gradients=True)
    expected = 0.0
    computed = on(timed.events, COMPUTE)
    for event in on(timed.events, "tensor"):
        meanwhile = [c.end - c.start for c in computed if c.start >= event.start and "weight gradient" in c.kind and c.start < event.end]
        expected += min(event.end - event.start, sum(meanwhile))
    assert timed.hidden == pytest.approx(expected, rel=1e-9)
    assert expected > 0.0


def test_prefetched_gathers_leave_the_longer_of_compute_and_communication() -> None:
    found = case("zero3")
    free = played(found, prefetch=True)
    assert free.step < played(found).step
    gathers = on(free.events, "data prefetch")
    assert [g.start for g in gathers] == pytest.approx([0.0, *(g.end for g in gathers[:-1])])
    used = {e.name: e.start for e in free.events if e.stream == COMPUTE and e.phase == "forward"}
    for gather in gathers:
        readers = [op.name for op in found[0].graph.operators if gather.name in op.inputs]
        assert all(used[name] >= gather.end for name in readers if name in used)


def test_a_ring_computes_a_block_while_the_next_is_under_way() -> None:
    """Forward p - 1 rounds of max(block, send) and one of the block; backward the gradients follow and the last one is waited for."""
    timed = played(case("ring"), gradients=False)
    attention = next(e.name for e in timed.events if e.stream == COMPUTE and ".core" in e.name)
    blocks = [e for e in timed.events if e.name == attention and e.stream == COMPUTE and e.phase == "forward"]
    sends = [e for e in timed.events if e.kind == "send" and e.phase == "forward"][:3]
    assert len(blocks) == 4
    block, send = blocks[0].end - blocks[0].start, sends[0].end - sends[0].start
    assert blocks[-1].end - blocks[0].start == pytest.approx(3 * max(block, send) + block, rel=1e-9)
    back = [e for e in timed.events if e.name == attention and e.stream == COMPUTE and e.phase == "backward"]
    sent = [e for e in timed.events if e.kind == "send" and e.phase == "backward" and e.end >= back[0].start][:7]
    assert [e.start for e in back] == sorted(e.start for e in back) and len(back) == 4
    assert all(after.start >= before.end for before, after in pairwise(sent))
    assert all(block.start >= values.end - 1e-15 for block, values in zip(back[1:], sent[0:6:2], strict=True))


@settings(max_examples=80, deadline=None)
@given(
    sends=st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 3.0), st.sampled_from("ab")), max_size=6),
    works=st.lists(st.floats(0.05, 4.0), min_size=1, max_size=5),
    slowdown=st.floats(1.0, 2.0),
)
def test_computation_is_slowed_just_while_something_is_sent(
    sends: list[tuple[float, float, str]], works: list[float], slowdown: float
) -> None:
    clock = Clock(slowdown)
    for after, seconds, stream in sends:
        clock.send("x", "send", stream, seconds, after)
    for work in works:
        start = clock.now
        end = clock.compute("y", "mm", work)
        busy = [(max(e.start, start), min(e.end, end)) for e in clock.events if e.stream != COMPUTE]
        marks = sorted({start, end, *(mark for pair in busy for mark in pair if pair[0] < pair[1])})
        done = sum(
            (b - a) / (slowdown if any(low <= a and b <= high for low, high in busy if low < high) else 1.0) for a, b in pairwise(marks)
        )
        assert done == pytest.approx(work, rel=1e-9)


def test_an_estimate_takes_its_step_from_the_timeline() -> None:
    found = case("data")
    figures = estimate(*found, optimizer="adamw")
    timed = played(found, slowdown=SLOWDOWN["nccl"])
    assert figures.overlapped == timed.hidden > 0.0
    assert figures.step == pytest.approx(timed.step, rel=1e-12)


def _threads(trace: dict[str, object]) -> dict[tuple[int, int], list[dict[str, float]]]:
    events = trace["traceEvents"]
    assert isinstance(events, list)
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def test_a_trace_holds_every_event_on_its_thread_in_microseconds() -> None:
    timed = played(case("both"))
    trace = json.loads(json.dumps(chrome_trace({"each of 16 ranks": timed.events})))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    threads = _threads(trace)
    assert {names[key] for key in threads} == {COMPUTE, "data", "tensor"}
    assert sum(map(len, threads.values())) == len(timed.events)
    for events in threads.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-12)
    last = max(e["ts"] + e["dur"] for events in threads.values() for e in events)
    assert last == pytest.approx(timed.step * 1e6, rel=1e-12)


def test_a_pipeline_is_traced_with_a_process_for_each_stage() -> None:
    run = simulate(pipeline_order("interleaved", 3, 6, 2, edges=neighbours(6)), Times.of([1.0] * 3, [2.0] * 3, 0.0, 0.25), 2)
    trace = json.loads(json.dumps(chrome_trace(pipeline_events(run))))
    stages = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert stages == ["stage 0", "stage 1", "stage 2"]
    threads = _threads(trace)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found = {(pid, names[pid, tid]): len(events) for (pid, tid), events in threads.items()}
    passes = {(stage, COMPUTE): 24 for stage in range(3)}
    onwards = {(0, "to stage 1"): 12, (1, "to stage 2"): 12, (2, "to stage 0"): 6}
    back = {(2, "to stage 1"): 12, (1, "to stage 0"): 12, (0, "to stage 2"): 6}
    assert found == passes | onwards | back
    assert max(e["ts"] + e["dur"] for events in threads.values() for e in events) == pytest.approx(run.seconds * 1e6)
    assert threads[0, 0][0]["name"] == "forward 0 chunk 0"
