"""Timelines in the Trace Event Format, which chrome://tracing and Perfetto show: a process for a rank or stage, a thread for a stream.

Complete events ("ph": "X") carry their start and duration in microseconds; metadata events ("ph": "M") name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .pipeline_simulation import PipelineRun
from .streams import COMPUTE, Event

MICROSECONDS = 1e6


def chrome_trace(processes: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """The trace of several timelines by name of rank or stage, as an object to be written as JSON."""
    found: list[dict[str, Any]] = []
    for process, (name, events) in enumerate(processes.items()):
        streams = {COMPUTE: 0}
        for event in events:
            streams.setdefault(event.stream, len(streams))
        found.append(_named("process_name", name, process, 0))
        found += [_named("thread_name", stream, process, thread) for stream, thread in streams.items()]
        found += [_complete(event, process, streams[event.stream]) for event in events]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(event: Event, process: int, thread: int) -> dict[str, Any]:
    start = event.start * MICROSECONDS
    return {
        "name": event.name,
        "cat": event.phase,
        "ph": "X",
        "ts": start,
        "dur": event.end * MICROSECONDS - start,
        "pid": process,
        "tid": thread,
        "args": {"kind": event.kind},
    }


def pipeline_events(run: PipelineRun) -> dict[str, list[Event]]:
    """The events of every stage of a simulated pipeline."""
    return {f"stage {number}": list(_stage_events(run, number)) for number in range(len(run.stages))}


def _stage_events(run: PipelineRun, stage: int) -> Iterable[Event]:
    for timed in run.stages[stage]:
        action = timed.action
        name = f"{action.kind} {action.micro_batch}" + (f" chunk {action.chunk}" if len(run.in_flight_by_chunk[stage]) > 1 else "")
        yield Event(name, action.kind, COMPUTE, action.kind, timed.start, timed.end)
