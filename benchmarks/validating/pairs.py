"""Pairs of devices with public runs of the same model, framework, precision and length.

    ratio = tokens a second and device on one over those on the other (geometric means over a
    device's runs)

Framework and model are the same on both sides, so a ratio shows the devices alone: measured and
predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .scores import Group, Sample

Key = tuple[str, str, str]
LARGE = "70B"
"""In the names of the models that are shown one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two devices on one model's runs.

    The second's speed over the first's, measured and predicted.
    """

    what: str
    model: str
    devices: tuple[str, str]
    measured: float
    predicted: float
    runs: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Every pair of devices that some public model ran on."""
    samples: dict[Key, dict[str, list[Sample]]] = {}
    for group in groups:
        for sample in group.samples:
            if sample.timed and sample.tokens and sample.device and sample.pair is not None:
                runs = samples.setdefault(sample.pair, {}).setdefault(sample.device, [])
                if sample not in runs:
                    runs.append(sample)
    return [pair for key, by_device in samples.items() for pair in _of_one(key, by_device)]


def _of_one(key: Key, by_device: dict[str, list[Sample]]) -> Iterator[Pair]:
    framework, model, rest = key
    for one, other in itertools.combinations(sorted(by_device), 2):
        first = by_device[one]
        second = by_device[other]
        measured, predicted = (
            _rate(second, name) / _rate(first, name) for name in ("measured", "predicted")
        )
        yield Pair(
            what=f"{framework} {model}, {rest}",
            model=model,
            devices=(one, other),
            measured=measured,
            predicted=predicted,
            runs=len(first) + len(second),
        )


def _rate(runs: Sequence[Sample], name: str) -> float:
    """Tokens a second and device."""
    logs = [math.log((run.tokens or 1.0) / getattr(run, name)) for run in runs]
    return math.exp(sum(logs) / len(logs))


def within(pairs: Sequence[Pair], share: float = 0.15) -> float:
    """The fraction of ratios predicted within `share`."""
    return sum(abs(pair.error) <= share for pair in pairs) / max(len(pairs), 1)
