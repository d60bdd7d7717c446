"""`profile`: where the seconds of a step go, by action of the order, kind of operator and collective, beside what the plan predicts.

torch's profiler measures; the runner names each action of the order for it (`record_function`), so that other profilers show them too. What
is between the actions of a step is the update, or else time in which this rank computes nothing of the model: data, Python, waiting.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from autopar.errors import RunError
from autopar.order.actions import Word

from .module import ParallelModule
from .present import NAMED

PARTS: Mapping[str, tuple[Word, ...]] = {
    "forward": (Word.FORWARD,),
    "backward": (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT),
    "parameters": (Word.GATHER, Word.RELEASE, Word.REDUCE, Word.SUM_TIED),
    "stages": (Word.SEND_FORWARD, Word.RECEIVE_FORWARD, Word.SEND_BACKWARD, Word.RECEIVE_BACKWARD),
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "collectives": ("c10d", "gloo", "nccl", "wait_tensor", "record_param_comms"),
    "attention": ("scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "products": ("::mm", "::bmm", "::addmm", "::linear", "::matmul", "::baddbmm", "::einsum"),
    "convolutions": ("convolution",),
    "update": ("Optimizer.", "_foreach_", "_fused_adam"),
}
"""Kinds of operators by what their names hold, the first that fits counting; others are "elementwise and others"."""
REST = "elementwise and others"
LARGEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds (or bytes) of a step, measured and predicted; None where the plan says nothing of it."""

    part: str
    measured: float
    predicted: float | None
    unit: str = "s"


class Profile:
    """What was measured inside `with autopar.profile(module) as found:`; whole steps are to run in there."""

    def __init__(self, module: ParallelModule) -> None:
        if module.engine.plan is None:
            raise RunError("only a module of parallelize, which knows its plan, can be profiled beside it")
        self.plan = module.engine.plan
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if module.engine.device.type == "cuda" else [])]
        self._cuda = module.engine.device.type == "cuda"
        self._profiler: Any = torch_profile(activities=activities, profile_memory=True)
        self.steps: tuple[float, ...] = ()
        self.rows: tuple[Row, ...] = ()
        self.kinds: dict[str, float] = {}
        self.actions: dict[str, float] = {}

    def __enter__(self) -> Profile:
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profiler.__exit__(kind, error, trace)
        if error is None:
            self._read()

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace, for chrome://tracing and Perfetto."""
        self._profiler.export_chrome_trace(str(path))

    def json(self) -> dict[str, Any]:
        """Everything as plain data, in seconds and bytes of a step."""
        rows = [{"part": row.part, "measured": row.measured, "predicted": row.predicted, "unit": row.unit} for row in self.rows]
        return {"steps": list(self.steps), "parts": rows, "kinds": self.kinds, "actions": self.actions, "deviations": self.deviations()}

    def deviations(self) -> list[str]:
        """The largest differences from what was predicted, in words."""
        compared = [row for row in self.rows if row.predicted is not None and row.unit == "s" and row.part != "step"]
        found = sorted(compared, key=lambda row: -abs(row.measured - (row.predicted or 0.0)))[:LARGEST]
        return [_words(row) for row in found if row.measured != row.predicted]

    def _read(self) -> None:
        events: Sequence[Any] = self._profiler.events() or ()
        named = sorted((e for e in events if e.name.startswith(NAMED)), key=lambda e: e.time_range.start)
        if not named:
            raise RunError("no step of the module ran while it was profiled")
        first = named[0].name
        starts = [e.time_range.start for e in named if e.name == first]
        ends = [*starts[1:], max(e.time_range.end for e in events)]
        # The end of the last step is not known where the caller did more after it: the others tell.
        self.steps = tuple((end - start) / 1e6 for start, end in zip(starts, ends, strict=True))
        count = len(starts)
        spent: Counter[str] = Counter()
        for event in named:
            spent[event.name.removeprefix(NAMED)] += (event.time_range.end - event.time_range.start) / 1e6 / count
        self.actions = dict(spent)
        kinds: Counter[str] = Counter()
        for average in self._profiler.key_averages():
            if not average.key.startswith((NAMED, "[memory]", "ProfilerStep")):
                own = average.self_device_time_total if self._cuda else average.self_cpu_time_total
                kinds[_kind(average.key)] += own / 1e6 / count
        self.kinds = dict(kinds.most_common())
        self.rows = tuple(self._rows(events, count))

    def _rows(self, events: Sequence[Any], count: int) -> list[Row]:
        figures = self.plan.predicted
        words = {text: next(part for part, held in PARTS.items() if _word(text) in held) for text in self.actions}
        parts = {part: math.fsum(seconds for text, seconds in self.actions.items() if words[text] == part) for part in PARTS}
        update = math.fsum(e.time_range.end - e.time_range.start for e in events if e.name.startswith("Optimizer.step")) / 1e6 / count
        step = statistics.median(self.steps)
        rows = [Row(part="step", measured=step, predicted=figures.step)]
        rows.append(Row(part="forward", measured=parts["forward"], predicted=figures.forward))
        rows.append(Row(part="backward", measured=parts["backward"], predicted=figures.backward))
        rows.append(Row(part="gathers and reductions of parameters", measured=parts["parameters"], predicted=None))
        if self.plan.stages:
            rows.append(Row(part="between stages, waiting included", measured=parts["stages"], predicted=figures.bubble))
        rows.append(Row(part="update", measured=update, predicted=figures.update))
        rows.append(
            Row(part="collectives", measured=self.kinds.get("collectives", 0.0), predicted=figures.communication - figures.overlapped)
        )
        rows.append(Row(part="idle and others", measured=max(0.0, step - sum(parts.values()) - update), predicted=None))
        held = sum(size for name, size in figures.memory_parts.items() if name not in ("parameters", "optimizer"))
        return [*rows, Row(part="memory beside parameters and optimizer", measured=self._grown(), predicted=held, unit="B")]

    def _grown(self) -> float:
        """By how many bytes the memory of the device grew at most, from where it was at first."""
        now, most = 0, 0
        results = self._profiler.profiler.kineto_results if self._profiler.profiler is not None else None
        memory = [e for e in results.events() if e.name() == "[memory]"] if results is not None else []
        for event in sorted(memory, key=lambda e: e.start_ns()):
            if (event.device_type() != DeviceType.CPU) == self._cuda:
                now += event.nbytes()
                most = max(most, now)
        return float(most)


def _word(action: str) -> Word:
    """The word of an action's text: `0F1.2` is a forward pass."""
    rest = action.lstrip("0123456789")
    return max((word for word in Word if rest.startswith(word.value)), key=lambda word: len(word.value))


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), REST)


def _words(row: Row) -> str:
    assert row.predicted is not None
    difference = row.measured - row.predicted
    share = f", {row.measured / row.predicted:.2g} times the predicted" if row.predicted > 0 else ""
    more = "more" if difference > 0 else "less"
    return f"{row.part} takes {abs(difference) * 1e3:.3g} ms {more} than predicted: {row.measured * 1e3:.3g} ms{share}"


def profile(module: ParallelModule) -> Profile:
    """Measure the steps inside the `with`, on this rank: `with autopar.profile(module) as found: ...`, and then `found.rows`."""
    return Profile(module)
