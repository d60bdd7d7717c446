"""The timeline of a step, from the figures of the plan file or played with the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.program.timelines import timelines
from autopar.costmodel import Cluster
from autopar.costmodel.step.pipeline_simulation import simulate
from autopar.costmodel.step.streams import COMPUTE, Event
from autopar.costmodel.step.trace import pipeline_events
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.times import Times
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis

MOST_PASSES = 4000
"""The most passes to draw; a longer step is drawn with fewer micro-batches, which look alike."""
RESOLUTION = 1500
"""The number of distinguishable parts of a step in the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work from `start` to `end`.

    `kind`: forward, backward, update, collective or waiting.
    """

    kind: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One stream of one stage, in the order of time."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Lanes over `seconds`, with a sentence about their source.

    `slowed`: seconds by which transfers make a device's computation longer, where they are known.
    `drawn`: the share of the micro-batches that the lanes have.
    """

    lanes: tuple[Lane, ...]
    seconds: float
    told: str
    slowed: float = 0.0
    drawn: float = 1.0

    def computing(self) -> Timeline:
        """The timeline with only the lanes of computation."""
        shown = tuple(
            lane for lane in self.lanes if any(span.kind == "forward" for span in lane.spans)
        )
        return replace(self, lanes=shown or self.lanes)


def timeline_of(plan: Plan, analysis: Analysis | None, cluster: Cluster | None) -> Timeline:
    """The timeline of a step."""
    if (
        analysis is not None
        and cluster is not None
        and all(stage.mesh == plan.mesh for stage in plan.stages)
    ):
        events = timelines(plan, analysis, cluster)
        drawn = _played(events, "Played action by action on the streams of a device.")
        return drawn if plan.stages else replace(drawn, slowed=_slowed(plan, events))
    return _of_stages(plan) if plan.stages else _of_figures(plan)


def _played(events: Mapping[str, Sequence[Event]], told: str) -> Timeline:
    """Lanes of events: the streams of each stage; a stage waits while it does not compute."""
    end = max((event.end for done in events.values() for event in done), default=0.0)
    lanes = []
    for role, done in events.items():
        streams: dict[str, list[Span]] = {COMPUTE: []}
        for event in sorted(done, key=lambda event: event.start):
            kind = event.phase if event.stream == COMPUTE else "collective"
            streams.setdefault(event.stream, []).append(
                Span(kind=kind, name=event.name, start=event.start, end=event.end)
            )
        for stream, spans in sorted(
            streams.items(), key=lambda done: (done[0] != COMPUTE, done[0])
        ):
            whole = list(_with_waits(spans, end)) if stream == COMPUTE else spans
            lanes.append(Lane(name=f"{role}: {stream}", spans=tuple(whole)))
    return Timeline(lanes=tuple(lanes), seconds=end, told=told)


def _slowed(plan: Plan, events: Mapping[str, Sequence[Event]]) -> float:
    """Seconds by which the computation of a step is longer than it would be without transfers."""
    computing = sum(
        event.end - event.start
        for done in events.values()
        for event in done
        if event.stream == COMPUTE and event.phase in ("forward", "backward")
    )
    exposed = max(plan.predicted.communication - plan.predicted.overlapped, 0.0)
    alone = plan.predicted.forward + plan.predicted.backward
    return min(max(computing - alone, 0.0), exposed)


def _with_waits(spans: Iterable[Span], end: float) -> Iterable[Span]:
    at = 0.0
    for span in spans:
        if span.start > at:
            yield Span(kind="waiting", name="waiting", start=at, end=span.start)
        yield span
        at = max(at, span.end)
    if end > at:
        yield Span(kind="waiting", name="waiting", start=at, end=end)


def joined(spans: Iterable[Span], end: float) -> Iterable[Span]:
    """The spans, with neighbours of one kind joined if they are too short to see."""
    last: Span | None = None
    for span in spans:
        if last is not None and last.kind == span.kind and span.end - last.start < end / RESOLUTION:
            last = Span(
                kind=last.kind, name=last.name, start=last.start, end=max(last.end, span.end)
            )
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _of_figures(plan: Plan) -> Timeline:
    """One stage from its sums alone.

    Exposed communication is drawn between the passes and the update.
    """
    p = plan.predicted
    exposed = max(p.communication - p.overlapped, 0.0)
    parts = (
        ("forward", p.forward),
        ("backward", p.backward),
        ("collective", exposed),
        ("update", p.update),
    )
    spans = []
    at = 0.0
    for kind, seconds in parts:
        if seconds > 0:
            name = "communication that nothing hides" if kind == "collective" else kind
            spans.append(Span(kind=kind, name=name, start=at, end=at + seconds))
            at += seconds
    done = p.forward + p.backward
    lanes = [Lane(name="each device", spans=tuple(spans))]
    if p.overlapped:
        # The file has only the sum; most of it are gradients, at the end of the backward pass.
        hidden = Span(
            kind="collective",
            name="hidden communication",
            start=max(done - p.overlapped, 0.0),
            end=done,
        )
        lanes.append(Lane(name="under it", spans=(hidden,)))
    told = (
        "Sums of the plan file, one after the other; --model draws every operator and collective "
        "in its place."
    )
    return Timeline(lanes=tuple(lanes), seconds=at, told=told)


def _of_stages(plan: Plan) -> Timeline:
    """The order of the pipeline, with each stage's seconds from the plan file."""
    schedule = plan.schedule
    chunks = len(plan.stages)
    stages = chunks // schedule.interleave
    count = schedule.micro_batches
    if chunks * count > MOST_PASSES:
        # A multiple of the stages, which the interleaved order needs.
        count = min(count, max(stages, MOST_PASSES // chunks // stages * stages))
    parts = [plan.stages[number::stages] for number in range(stages)]
    forward, backward, hidden = (
        [sum(getattr(s, name) for s in held) for held in parts]
        for name in ("forward", "backward", "hidden")
    )
    sends = [held[0].send for held in parts]
    train = plan.model.mode == "train"
    edges = neighbours(chunks)
    orders = pipeline_order(
        schedule.pipeline, stages, count, schedule.interleave, edges=edges, train=train
    )
    # The file does not say how much of a backward pass is for the weights. It is half for a matrix
    # product, which has one product for each of its two gradients.
    run = simulate(
        orders,
        Times.of(forward, backward, [seconds / 2 for seconds in backward], sends, hidden=hidden),
        schedule.interleave,
    )
    events = pipeline_events(run)
    events_of = {}
    for (name, done), held in zip(events.items(), parts, strict=True):
        once = sum(s.once for s in held)
        last = [
            ("parameters' collectives", "collective", once),
            ("update", "update", plan.predicted.update),
        ]
        events_of[name] = [event for event in done if event.stream == COMPUTE]
        at = run.seconds
        for said, kind, seconds in last:
            if seconds:
                events_of[name].append(Event(said, kind, COMPUTE, kind, at, at + seconds))
            at += seconds
    fewer = (
        f" {count} of {schedule.micro_batches} micro-batches are drawn."
        if count < schedule.micro_batches
        else ""
    )
    told = (
        "The order of the schedule with the seconds of the plan file; what hides once-a-step "
        "communication is left out." + fewer
    )
    return replace(_played(events_of, told), drawn=count / schedule.micro_batches)
