"""`profile`: seconds of a step by action, kind of operator and collective, compared with the plan's
predictions.

torch's profiler measures. The runner names each action of the order for it (`record_function`), so
other profilers show them too. Time between the actions of a step is the update, or time in which
this rank computes nothing of the model: data, Python, waiting. A rank of a stage is compared with
the predictions for that stage.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from torch._C._autograd import DeviceType
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from autopar.errors import RunError
from autopar.order.actions import Word
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.ranks.current_action import NAMED

from .predictions import foretold
from .rows import Row, largest

PARTS: Mapping[str, tuple[Word, ...]] = {
    "forward": (Word.FORWARD,),
    "backward": (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT),
    "parameters": (Word.GATHER, Word.RELEASE, Word.REDUCE, Word.SUM_TIED),
    "stages": (Word.SEND_FORWARD, Word.RECEIVE_FORWARD, Word.SEND_BACKWARD, Word.RECEIVE_BACKWARD),
}
MESSAGES = "messages between stages"
KINDS: Mapping[str, tuple[str, ...]] = {
    MESSAGES: (
        "c10d::send",
        "c10d::recv",
        "gloo:send",
        "gloo:recv",
        "nccl:send",
        "nccl:recv",
        "SendRecv",
    ),
    "collectives": ("c10d", "gloo", "nccl", "wait_tensor", "record_param_comms"),
    "attention": ("scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "products": ("::mm", "::bmm", "::addmm", "::linear", "::matmul", "::baddbmm", "::einsum"),
    "convolutions": ("convolution",),
    "update": ("Optimizer.", "_foreach_", "_fused_adam"),
}
"""Kinds of operators by parts of their names; the first match counts, other operators are
"elementwise and others".

Without stages, messages count as collectives: NCCL's all-to-alls have kernels of that name.
"""
REST = "elementwise and others"
BETWEEN = "between stages, waiting included"
MEMORY = "memory beside parameters and optimizer"


class Profile:
    """The measurements of whole steps inside `with autopar.profile(module) as measured:`.

    There are none on an idle rank.
    """

    def __init__(self, module: ParallelModule) -> None:
        if module.engine.plan is None:
            raise RunError(
                "only a module of parallelize, which knows its plan, can be profiled beside it"
            )
        self.plan = module.engine.plan
        self.graph = module.engine.execution.graph
        self._module = module
        self.stage = module.engine.world.stage if self.plan.stages else None
        self.rank = module.engine.world.rank
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if module.engine.device.type == "cuda" else []),
        ]
        self._cuda = module.engine.device.type == "cuda"
        self._profiler: Any = torch_profile(activities=activities, profile_memory=True)
        self.steps: tuple[float, ...] = ()
        self.rows: tuple[Row, ...] = ()
        self.kinds: dict[str, float] = {}
        self.actions: dict[str, float] = {}
        self.collectives: dict[str, float] = {}
        self._state: dict[int, int] = {}
        self._stepped: Any = None

    def __enter__(self) -> Profile:
        self._stepped = register_optimizer_step_post_hook(self._note_state)
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        self._stepped.remove()
        if error is None:
            self._read()

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace, for chrome://tracing and Perfetto."""
        self._profiler.export_chrome_trace(str(path))

    def json(self) -> dict[str, Any]:
        """Everything as plain data, in seconds and bytes of a step."""
        rows = [
            {
                "part": row.part,
                "measured": row.measured,
                "predicted": row.predicted,
                "unit": row.unit,
            }
            for row in self.rows
        ]
        return {
            "rank": self.rank,
            "stage": self.stage,
            "steps": list(self.steps),
            "parts": rows,
            "kinds": self.kinds,
            "actions": self.actions,
            "collectives": self.collectives,
            "deviations": self.deviations(),
        }

    def deviations(self) -> list[str]:
        """The largest differences from the predictions, in words."""
        return largest({"": self.rows})

    def _read(self) -> None:
        events: Sequence[Any] = self._profiler.events() or ()
        named = sorted(
            (e for e in events if e.name.startswith(NAMED)), key=lambda e: e.time_range.start
        )
        if not named and self._module.engine.world.groups is None:
            return  # the plan leaves this rank idle
        if not named:
            raise RunError("no step of the module ran while it was profiled")
        # Every step begins with the same action of this rank's order.
        first = named[0].name
        starts = [e.time_range.start for e in named if e.name == first]
        ends = [*starts[1:], max(e.time_range.end for e in events)]
        # The end of the last step is not known where the caller did more after it: the others tell.
        self.steps = tuple((end - start) / 1e6 for start, end in zip(starts, ends, strict=True))
        count = len(starts)
        spent: Counter[str] = Counter()
        for event in named:
            spent[event.name.removeprefix(NAMED)] += (
                (event.time_range.end - event.time_range.start) / 1e6 / count
            )
        self.actions = dict(spent)
        self.collectives = dict(_collectives(events, count, cuda=self._cuda))
        kinds: Counter[str] = Counter()
        for average in self._profiler.key_averages():
            if not average.key.startswith((NAMED, "[memory]", "ProfilerStep")):
                # Without the time of called operators, so that none counts twice.
                own = average.self_device_time_total if self._cuda else average.self_cpu_time_total
                kinds[kind_of_event(average.key, staged=self.stage is not None)] += (
                    own / 1e6 / count
                )
        self.kinds = dict(kinds.most_common())
        self.rows = tuple(self._rows(events, count))

    def _rows(self, events: Sequence[Any], count: int) -> list[Row]:
        wanted = foretold(self.plan, self.stage)
        words = {
            text: next(part for part, held in PARTS.items() if word_of(text) in held)
            for text in self.actions
        }
        parts = {
            part: math.fsum(
                seconds for text, seconds in self.actions.items() if words[text] == part
            )
            for part in PARTS
        }
        update = (
            math.fsum(
                e.time_range.end - e.time_range.start
                for e in events
                if e.name.startswith("Optimizer.step")
            )
            / 1e6
            / count
        )
        step = statistics.median(self.steps)
        rows = [Row(part="step", measured=step, predicted=wanted.step)]
        rows.append(Row(part="forward", measured=parts["forward"], predicted=wanted.forward))
        rows.append(Row(part="backward", measured=parts["backward"], predicted=wanted.backward))
        rows.append(
            Row(
                part="gathers and reductions of parameters",
                measured=parts["parameters"],
                predicted=None,
            )
        )
        if self.stage is not None:
            rows.append(Row(part=BETWEEN, measured=parts["stages"], predicted=wanted.waiting))
        rows.append(Row(part="update", measured=update, predicted=wanted.update))
        rows.append(
            Row(
                part="collectives",
                measured=self.kinds.get("collectives", 0.0),
                predicted=wanted.collectives,
            )
        )
        rows.append(
            Row(
                part="idle and others",
                measured=max(0.0, step - sum(parts.values()) - update),
                predicted=None,
            )
        )
        beside = max(0.0, wanted.memory - self._held()) if wanted.beside is None else wanted.beside
        return [*rows, Row(part=MEMORY, measured=self._grown(), predicted=beside, unit="B")]

    def _note_state(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Add the bytes of an optimizer's state for this rank's parameters.

        Tensors that optimizers share count once.
        """
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    local = local_of(value)
                    self._state[local.data_ptr()] = local.nbytes

    def _held(self) -> float:
        """Bytes of this rank's parameters and of the state of the optimizers that made a step."""
        own = {
            local.data_ptr(): local.nbytes
            for local in map(local_of, self._module.graph_parameters().values())
        }
        return float(sum((own | self._state).values()))

    def _grown(self) -> float:
        """The largest growth of the device's memory from its size at the start, in bytes."""
        now = 0
        most = 0
        results = (
            self._profiler.profiler.kineto_results if self._profiler.profiler is not None else None
        )
        memory = (
            [e for e in results.events() if e.name() == "[memory]"] if results is not None else []
        )
        for event in sorted(memory, key=lambda e: e.start_ns()):
            if (event.device_type() != DeviceType.CPU) == self._cuda:
                # The profiler keeps no peak of its own; frees are negative.
                now += event.nbytes()
                most = max(most, now)
        return float(most)


def word_of(action: str) -> Word:
    """The word of an action's text: `0F1.2` is a forward pass."""
    rest = action.lstrip("0123456789")
    return max(
        (word for word in Word if rest.startswith(word.value)), key=lambda word: len(word.value)
    )


def _collectives(events: Sequence[Any], count: int, *, cuda: bool) -> Counter[str]:
    """Seconds of a step's collectives by name: kernels of NCCL, or tasks of Gloo's threads.

    A collective that waits for others under way counts from their end on, so the sum is the time in
    which any is under way.
    """
    seconds: Counter[str] = Counter()
    until = -math.inf
    for event in sorted(events, key=lambda e: e.time_range.start):
        if (
            (event.device_type == DeviceType.CUDA and event.name.startswith("ncclDev"))
            if cuda
            else event.name.startswith("gloo:")
        ):
            seconds[event.name] += (
                max(0.0, event.time_range.end - max(event.time_range.start, until)) / 1e6 / count
            )
            until = max(until, event.time_range.end)
    return seconds


def kind_of_event(name: str, *, staged: bool = False) -> str:
    kind = next(
        (kind for kind, words in KINDS.items() if any(word in name for word in words)), REST
    )
    return "collectives" if kind == MESSAGES and not staged else kind


def profile(module: ParallelModule) -> Profile:
    """Measure the steps in `with autopar.profile(module) as measured: ...` on this rank.

    The results are `measured.rows`.
    """
    return Profile(module)
