"""The multiples of a prediction between which nine measured runs in ten lie.

Every group has the same weight.

    quantile p of log(measured / predicted) over all rows, each with the weight 1 / (rows of its
    group)

Nothing is fitted to a run, so every row is held out. The share of a group's rows inside the
interval of all others shows whether the interval holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.residual import INTERVAL, Residual

from .scores import Group, Sample

Floats = NDArray[np.float64]
APART = (
    "collectives",
    "memory",
    "layer_times",
    "alephalpha 13B",
    "korth_t5 dp",
    "megatron_moe_layer",
    "mbridge ",
    "alpa_ws ",
    "mist_aceso stages",
    "sailor_layers",
)
"""Prefixes of the names of groups that are no whole runs, or parts of another group."""
_Pair = Callable[[Sample], tuple[float | None, float | None]]
FEW = 3
"""Rows that a group needs to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The interval of all groups, and each group's share inside the interval of the others."""

    residual: Residual
    inside: Mapping[str, float]

    @property
    def coverage(self) -> float:
        """The mean of the shares."""
        return float(np.mean(list(self.inside.values())))


def of_steps(groups: Sequence[Group]) -> HeldOut | None:
    """The interval of predicted steps; None where fewer than two groups have rows enough."""
    return _held_out(groups, lambda s: (s.measured, s.predicted))


def of_memory(groups: Sequence[Group]) -> HeldOut | None:
    """The interval of predicted peaks of memory.

    None where fewer than two groups have rows enough.
    """
    return _held_out(groups, lambda s: (s.memory, s.told_memory))


def _held_out(groups: Sequence[Group], pair: _Pair) -> HeldOut | None:
    logs: dict[str, Floats] = {}
    for group in groups:
        pairs = [(m, p) for m, p in map(pair, group.samples) if m and p]
        apart = group.name.startswith(APART) or " without " in group.name
        if not apart and len(pairs) >= FEW:
            logs[group.name] = np.log(
                np.array([m for m, _ in pairs]) / np.array([p for _, p in pairs])
            )
    if len(logs) < 2:
        return None
    low, middle, high = _quantiles(list(logs.values()))
    inside = {}
    for name, own in logs.items():
        least, _, most = _quantiles([values for other, values in logs.items() if other != name])
        inside[name] = float(np.mean((own >= least) & (own <= most)))
    return HeldOut(
        residual=Residual(low=low, middle=middle, high=high, rows=sum(map(len, logs.values()))),
        inside=inside,
    )


def _quantiles(groups: Sequence[Floats]) -> tuple[float, float, float]:
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    order = np.argsort(values)
    values = values[order]
    weights = weights[order]
    places = (np.cumsum(weights) - 0.5 * weights) / weights.sum()
    low, middle, high = (round(float(np.interp(p, places, values)), 4) for p in INTERVAL)
    return low, middle, high
