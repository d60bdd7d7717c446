r"""The measured step of a plan, from `autopar run --json` or a trace of torch.profiler.

    computing = |I|      communicating = |C|      exposed = |C \ I|      each divided by the number
                         of steps

I: the union of the intervals in which kernels of a trace compute. C: the union of those in which
kernels communicate. The profiler's marks (`ProfilerStep#7`) separate the steps; without marks the
whole trace is one step.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.file_limits import TRACE_BYTES
from autopar.reading import read_text

_STEP = re.compile(r"ProfilerStep#\d+")
# Words in the names of NCCL's kernels and of torch's events; the first that a name holds counts.
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send",
    "send": "send",
    "recv": "send",
    "broadcast": "broadcast",
}
_COMMUNICATION = re.compile(r"nccl|^gloo:", re.IGNORECASE)
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured seconds of a step, and of its parts if known.

    `kinds`: seconds of collectives by kind, hidden or not. `source`: a sentence.
    """

    source: str
    step: float
    steps: int
    computing: float | None = None
    exposed: float | None = None
    kinds: Mapping[str, float]


def read_measured(path: str | Path) -> Measured:
    """The measurement in a file; `UsageError` with the reason if it is none."""
    path = Path(path)
    text = read_text(path, TRACE_BYTES, what="measurement (profile fewer steps)", error=UsageError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if (
        isinstance(data, dict)
        and isinstance(data.get("seconds"), int | float)
        and _positive(data["seconds"])
    ):
        steps = data.get("steps")
        count = steps if isinstance(steps, int) else 1
        return Measured(
            source=f"{path.name}: the median of {count} steps of autopar run",
            step=data["seconds"],
            steps=count,
            kinds={},
        )
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise UsageError(
            f"{path}: holds neither 'seconds' (autopar run --json) nor 'traceEvents' "
            "(torch.profiler's export_chrome_trace)"
        )
    return _of_trace(path.name, [event for event in events if _is_span(event)])


def _is_span(event: Any) -> bool:
    """Whether an entry of a trace has a start and a duration."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and all(
            isinstance(event.get(key), int | float) and math.isfinite(event[key])
            for key in ("ts", "dur")
        )
        and event["dur"] >= 0
    )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _of_trace(name: str, events: list[dict[str, Any]]) -> Measured:
    # The profiler repeats every mark among the events of the GPU, as `gpu_user_annotation`.
    marks = {
        event["name"]: event
        for event in events
        if _STEP.fullmatch(event["name"]) and event.get("cat") != "gpu_user_annotation"
    }
    spans = [_interval(mark) for mark in marks.values()]
    whole = spans or (
        [(min(a for a, _ in map(_interval, events)), max(b for _, b in map(_interval, events)))]
        if events
        else []
    )
    step = statistics.median(b - a for a, b in whole) if whole else 0.0
    if not _positive(step):
        raise UsageError(f"{name}: its trace spans no time")
    inside = [event for event in events if any(a <= event["ts"] * 1e-6 < b for a, b in whole)]
    count = len(whole)
    kernels = [event for event in inside if event.get("cat") == "kernel"]
    # A trace of CPUs has no kernels. Gloo's own events tell its collectives; what computes is not
    # told, because events of operators lie within one another.
    talking = [
        event
        for event in (kernels or inside)
        if _COMMUNICATION.search(event["name"]) and kind_of(event["name"])
    ]
    busy = _union(_interval(event) for event in kernels if not _COMMUNICATION.search(event["name"]))
    sent = _union(map(_interval, talking))
    kinds: dict[str, float] = {}
    for event in talking:
        kind = kind_of(event["name"])
        kinds[kind] = kinds.get(kind, 0.0) + event["dur"] * 1e-6 / count
    said = (
        f"{count} marked steps"
        if marks
        else "no marked steps (profiler.step() was not called), taken as one"
    )
    return Measured(
        source=f"{name}: a trace of {said}",
        step=step,
        steps=count,
        kinds=kinds,
        computing=_length(busy) / count if kernels else None,
        exposed=(_length(_union([*busy, *sent])) - _length(busy)) / count if kernels else None,
    )


def kind_of(name: str) -> str:
    """The kind of the collective in the name of a kernel or an event; "" for none.

    >>> kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), kind_of("gloo:all_gather")
    ('all_reduce', 'all_gather')
    >>> kind_of("gemm")
    ''
    """
    low = name.lower()
    return next((kind for word, kind in _KINDS.items() if word in low), "")


def _interval(event: Mapping[str, Any]) -> Interval:
    # A trace has microseconds.
    return event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in intervals)
