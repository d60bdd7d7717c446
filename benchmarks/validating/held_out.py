"""The multiples of a prediction between which nine measured runs in ten lie, by kind of run.

For a kind of runs (`costmodel/calibration/run_kinds.py`), every source that has some has the same
weight; runs of other kinds whose kernels were measured count together as one source more:

    quantile p of log(measured / predicted), each row with the weight 1 / (rows of its source)

Nothing is fitted to a run. But quantiles of some sources need not hold in another one. So p is
chosen by leaving out whole sources (conformal prediction over groups, Vovk et al. 2005; Barber et
al. 2021, arXiv:1905.02928): it is the one nearest to 5 % and 95 % with which at least nine in ten
rows of a source that is left out are inside the interval of the others, in the mean over sources,
and nine in ten of all rows inside that of all sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.calibration.run_kinds import RUN_KINDS, UNMEASURED
from autopar.costmodel.cluster.residual import Residual

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
SOURCES = 3
"""Sources that an interval needs: the two that are left where one is left out must not be one."""
INSIDE = 0.9
TAILS = (0.05, 0.045, 0.04, 0.035, 0.03, 0.025, 0.02, 0.015, 0.01, 0.005, 0.0)
"""Shares of the rows that an interval may leave out on either side, the narrowest one first."""
ENDS = (*((tail, 0.0) for tail in TAILS), *((0.0, 0.02 * step) for step in range(1, 51)))
"""Those shares, and how far an interval of all rows goes beyond them, as logarithms: few sources do
not show how far off another one may be.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The interval of all sources, and each one's share inside the interval of the others.

    `others`: that interval for each source, as logarithms of measured over predicted.
    """

    residual: Residual
    inside: Mapping[str, float]
    others: Mapping[str, tuple[float, float]]

    @property
    def coverage(self) -> float:
        """The mean of the shares."""
        return float(np.mean(list(self.inside.values())))


def of_steps(groups: Sequence[Group]) -> dict[str, HeldOut]:
    """The intervals of predicted steps by kind of run, of kinds that enough sources have."""
    logs = {kind: _logs(groups, _seconds, kind) for kind in RUN_KINDS}
    held = {}
    measured = [kind for kind in RUN_KINDS if kind != UNMEASURED]
    for kind, own in logs.items():
        # What unmeasured kernels do says nothing about runs whose kernels were measured.
        beside = [other for other in measured if kind in measured and other != kind]
        if len(own) >= SOURCES:
            held[kind] = conformal(
                own, _pooled([log for other in beside for log in logs[other].values()])
            )
    return held


def of_memory(groups: Sequence[Group]) -> HeldOut | None:
    """The interval of predicted peaks of memory; None where fewer than two sources have rows."""
    own = _logs(groups, lambda s: (s.memory, s.told_memory))
    return conformal(own) if len(own) >= 2 else None


def conformal(own: Mapping[str, Floats], beside: Sequence[Floats] = ()) -> HeldOut:
    """The narrowest interval that holds in sources that are left out.

    `beside`: residuals of other kinds of runs, as one source.
    """
    every = np.concatenate(list(own.values()))
    for tail, beyond in ENDS:
        others = {}
        for name in own:
            rest = [values for other, values in own.items() if other != name]
            least, most = _quantiles([*rest, *beside], (tail, 1 - tail))
            others[name] = (least - beyond, most + beyond)
        inside = {name: _share(log, others[name]) for name, log in own.items()}
        low, middle, high = _quantiles([*own.values(), *beside], (tail, 0.5, 1 - tail))
        low = round(low - beyond, 4)
        high = round(high + beyond, 4)
        if min(np.mean(list(inside.values())), _share(every, (low, high))) >= INSIDE:
            break
    residual = Residual(low=low, middle=middle, high=high, rows=len(every))
    return HeldOut(residual=residual, inside=inside, others=others)


def _share(logs: Floats, ends: Sequence[float]) -> float:
    low, high = ends
    return float(np.mean((logs >= low) & (logs <= high)))


def _seconds(sample: Sample) -> tuple[float | None, float | None]:
    return sample.measured, sample.predicted


def _logs(groups: Sequence[Group], pair: _Pair, kind: str | None = None) -> dict[str, Floats]:
    """Logarithms of measured over predicted by source, of the runs of a kind (None: of all)."""
    logs = {}
    for group in groups:
        samples = [s for s in group.samples if kind is None or s.kind == kind]
        pairs = [(m, p) for m, p in map(pair, samples) if m and p]
        if whole(group) and len(pairs) >= FEW:
            measured, predicted = np.array(pairs).T
            logs[group.name] = np.log(measured / predicted)
    return logs


def whole(group: Group) -> bool:
    """Whether a group has whole runs, and is neither a part nor a second price of another one."""
    return not group.name.startswith(APART) and " without " not in group.name


def _pooled(logs: Sequence[Floats]) -> list[Floats]:
    """Sources as one: as many quantiles of each as the smallest has rows."""
    if not logs:
        return []
    places = (np.arange(FEW) + 0.5) / FEW
    return [np.concatenate([np.quantile(log, places) for log in logs])]


def _quantiles(groups: Sequence[Floats], shares: Sequence[float]) -> list[float]:
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    order = np.argsort(values)
    values = values[order]
    weights = weights[order]
    places = (np.cumsum(weights) - 0.5 * weights) / weights.sum()
    return [round(float(np.interp(p, places, values)), 4) for p in shares]
