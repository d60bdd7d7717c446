"""Timelines in the Trace Event Format (chrome://tracing, Perfetto).

A rank or stage is a process, a stream is a thread. Complete events ("ph": "X") carry their start
and duration in microseconds; metadata events ("ph": "M") name processes and threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.order.actions import Word
from autopar.order.playing import RECEIVES, SENDS, stage_of_peer, stages_of_chunks

from .pipeline_simulation import PipelineRun, Timed
from .streams import COMPUTE, Event

MICROSECONDS = 1e6
NAMES = {
    Word.FORWARD: "forward",
    Word.BACKWARD: "backward",
    Word.BACKWARD_INPUT: "backward of inputs",
    Word.BACKWARD_WEIGHT: "backward of weights",
    Word.SEND_FORWARD: "values",
    Word.SEND_BACKWARD: "gradients",
}
"""Names of passes and messages."""


def chrome_trace(processes: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Return the trace of several timelines, by name of rank or stage, to be written as JSON."""
    records: list[dict[str, Any]] = []
    for process, (name, events) in enumerate(processes.items()):
        streams = {COMPUTE: 0}
        for event in events:
            streams.setdefault(event.stream, len(streams))
        records.append(_named("process_name", name, process, 0))
        records += [
            _named("thread_name", stream, process, thread) for stream, thread in streams.items()
        ]
        records += [_complete(event, process, streams[event.stream]) for event in events]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


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
    """Return the events of every stage of a simulated pipeline.

    They are passes, and messages to other stages while under way.
    """
    stages = stages_of_chunks([[timed.action for timed in done] for done in run.stages])
    several = len(stages) > len(run.stages)
    return {
        f"stage {number}": list(_stage_events(done, stages, several))
        for number, done in enumerate(run.stages)
    }


def _stage_events(
    done: Sequence[Timed], stages: Mapping[int, int], several: bool
) -> Iterator[Event]:
    for timed in done:
        action = timed.action
        if action.word in RECEIVES:
            continue  # the stage waits
        said = NAMES[action.word]
        name = f"{said} {action.micro_batch}" + (f" chunk {action.chunk}" if several else "")
        phase = "forward" if action.word in (Word.FORWARD, Word.SEND_FORWARD) else "backward"
        if action.word not in SENDS:
            yield Event(name, said, COMPUTE, phase, timed.start, timed.end)
        elif timed.end > timed.start:
            yield Event(
                name,
                said,
                f"to stage {stage_of_peer(action, stages)}",
                phase,
                timed.start,
                timed.end,
            )
