"""Reports of a running training.

They are a line every few steps, JSON lines, and TensorBoard's files if it is installed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.outputs import write_whole
from autopar.units import bytes_text, seconds_text

METRICS = "metrics.jsonl"
MEMORY_SHARE = 0.1
"""Excess over the predicted memory, as a share of it, that is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The plan's predictions: seconds of a step, bytes of a device, and these bytes by part."""

    seconds: float
    memory: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The steps of a training that are reported, and where to.

    `done`: steps before this life. `count`: the number of the last step. `every`: steps between two
    reports. `tokens`: of a step.
    """

    folder: Path
    done: int
    count: int
    every: int
    tokens: int | None


class Metrics:
    """The figures of one process; only one that `speaks` writes."""

    def __init__(self, reported: Reported, predicted: Predicted, *, speaks: bool) -> None:
        self.folder = reported.folder
        self.first = reported.done + 1
        self.count = reported.count
        self.every = reported.every
        self.tokens = reported.tokens
        self.predicted = predicted
        self.speaks = speaks
        self._began = time.perf_counter()
        self._seconds: list[float] = []
        self._board: Any = None
        if speaks:
            self.folder.mkdir(parents=True, exist_ok=True)
            forget_from(self.folder / METRICS, reported.done)
            self._board = _tensorboard(self.folder, reported.done)

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def wanted(self, step: int) -> bool:
        """Whether this step is reported: the first, the last, and every few."""
        return step % self.every == 0 or step in (self.first, self.count)

    def end(self, step: int, figures: Mapping[str, float], memory: float | None) -> None:
        """Step number `step`, counted from 1, is through, and its figures are told."""
        told = self._told(figures, memory)
        self._seconds.clear()
        if not self.speaks:
            return
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **told, "time": time.time()}) + "\n")
        if self._board is not None:
            for name, value in told.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        print(self.line(step, told), file=sys.stderr, flush=True)

    def took(self) -> None:
        """Note how long the step was."""
        self._seconds.append(time.perf_counter() - self._began)

    def _told(self, figures: Mapping[str, float], memory: float | None) -> dict[str, float]:
        seconds = statistics.median(self._seconds)
        told = {**figures, "seconds": seconds, "predicted_seconds": self.predicted.seconds}
        if self.tokens is not None:
            told["tokens_per_second"] = self.tokens / seconds
        if memory is not None:
            told |= {"memory": memory, "predicted_memory": self.predicted.memory}
        return told

    def line(self, step: int, told: Mapping[str, float]) -> str:
        """The progress in a line."""
        parts = [f"step {step}/{self.count}", f"loss {told['loss']:.4f}", f"lr {told['lr']:.3g}"]
        if "tokens_per_second" in told:
            parts.append(f"{told['tokens_per_second']:,.0f} tokens/s")
        parts.append(
            f"{seconds_text(told['seconds'])} a step (predicted "
            f"{seconds_text(told['predicted_seconds'])})"
        )
        if "memory" in told:
            parts.append(
                f"memory {bytes_text(told['memory'])} (predicted "
                f"{bytes_text(told['predicted_memory'])})"
            )
        return "  ".join(parts)


def forget_from(path: Path, step: int) -> None:
    """Keep only the lines of steps up to `step`.

    A step that is made again is then told once.
    """
    if not path.exists():
        return
    remaining = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                remaining.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            continue  # half a line, of a process that was killed
    write_whole(path, "".join(remaining))


def _tensorboard(folder: Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)


def memory_warning(memory: float, predicted: Predicted, where: str) -> str | None:
    """The warning about a peak far above the predicted one; None if it is not.

    >>> parts = {"activations": 8e8, "parameters": 2e8}
    >>> predicted = Predicted(seconds=1.0, memory=1e9, parts=parts)
    >>> print(memory_warning(1.2e9, predicted, "rank 0"))  # doctest: +NORMALIZE_WHITESPACE
    rank 0 fills 1.12 GiB, 20% more than the predicted 954 MiB; the largest part of these are
    activations (763 MiB)
    """
    if memory <= (1 + MEMORY_SHARE) * predicted.memory:
        return None
    name, largest = max(predicted.parts.items(), key=lambda part: part[1])
    more = (
        f"{memory / predicted.memory - 1:.0%} more than the predicted "
        f"{bytes_text(predicted.memory)}"
    )
    return (
        f"{where} fills {bytes_text(memory)}, {more}; the largest part of these are {name} "
        f"({bytes_text(largest)})"
    )
