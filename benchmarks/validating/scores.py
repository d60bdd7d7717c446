"""The agreement of predictions with measurements, compared with a model that knows only a rate.

For a group of rows with measured m_i, predicted p_i and work w_i (FLOPs a device):

    error_i    = p_i / m_i - 1;  mean error = mean |error_i|;  maximum = max |error_i|;  bias = mean
               error_i
    null model = w_i / r_-i, with r_-i the geometric mean of w_j / m_j over the other rows j (leave
    one out)
    Spearman   = Pearson's correlation of the ranks of p and m, equal values sharing their mean rank
    regret     = m of the row with the least p / min m - 1

Spearman and regret are those of one sweep (the same model, sequence length, devices and global
batch); a group has their mean. Source of the rank correlation: C. Spearman, "The proof and
measurement of association between two things" (1904).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costmodel.calibration.run_kinds import WIDE_TYPES

SWEEP = 3
"""Timed rows that a sweep needs for a rank correlation to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: seconds and bytes measured and predicted, and whether it ran out of memory.

    None if not known.

    `work`: the quantity to which the null model takes seconds to be proportional. `peer`: seconds
    that another model predicts. `open`: facts that the row does not state. `scale`: figures against
    which residuals are shown. `pair`: the common key of runs on different devices, with the
    `device` and the `tokens` of a step on each of them.
    """

    label: str
    sweep: Hashable = None
    measured: float | None = None
    predicted: float | None = None
    work: float | None = None
    was_oom: bool | None = None
    told_oom: bool | None = None
    memory: float | None = None
    told_memory: float | None = None
    peer: float | None = None
    open: tuple[str, ...] = ()
    scale: Mapping[str, float] = field(default_factory=dict)
    pair: tuple[str, str, str] | None = None
    kind: str = WIDE_TYPES
    device: str = ""
    tokens: float | None = None

    @property
    def timed(self) -> bool:
        """Whether there is a time to compare."""
        return self.measured is not None and self.predicted is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows that are scored together.

    `left_out`: numbers of other rows by reason; `unit`: for plots.
    """

    name: str
    samples: tuple[Sample, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    unit: str = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The figures of a group, as fractions; None if one does not apply.

    `oom`: the numbers of rows predicted out of memory that were, predicted that were not, not
    predicted that were, and neither. `stated_error`: of the `stated_n` rows that leave no fact
    open; `open_facts`: the number of rows that leave each open. `trends`: the slope of the
    residual for each doubling of a figure. `chosen_oom`: sweeps in which the best row predicted to
    fit ran out of memory.
    """

    n: int
    mean_error: float | None = None
    max_error: float | None = None
    bias: float | None = None
    null_error: float | None = None
    peer_error: float | None = None
    sweeps: int = 0
    spearman: float | None = None
    worst_spearman: float | None = None
    regret: float | None = None
    worst_regret: float | None = None
    chosen_oom: int | None = None
    oom_accuracy: float | None = None
    oom: tuple[int, int, int, int] | None = None
    memory_n: int = 0
    memory_error: float | None = None
    memory_bias: float | None = None
    stated_n: int = 0
    stated_error: float | None = None
    open_facts: Mapping[str, int] = field(default_factory=dict)
    trends: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON object."""
        return asdict(self) | {
            name: dict(getattr(self, name)) for name in ("left_out", "open_facts", "trends")
        }


def score(group: Group) -> Score:
    """All figures of a group."""
    timed = [s for s in group.samples if s.timed]
    errors = relative([s.predicted for s in timed], [s.measured for s in timed])
    known = [s for s in timed if s.peer is not None]
    sized = [s for s in group.samples if s.memory is not None and s.told_memory is not None]
    memory = relative([s.told_memory for s in sized], [s.memory for s in sized])
    sweeps = swept(group.samples)
    ranks = [
        value for members in sweeps if (value := spearman(*measured_pairs(members))) is not None
    ]
    regrets = [regret(*measured_pairs(members)) for members in sweeps]
    oom = confusion(group.samples)
    stated = [s for s in timed if not s.open]
    return Score(
        n=len(timed),
        mean_error=_mean(np.abs(errors)),
        max_error=float(np.abs(errors).max()) if timed else None,
        bias=_mean(errors),
        null_error=null_error(timed),
        peer_error=_mean(np.abs(relative([s.peer for s in known], [s.measured for s in known]))),
        sweeps=len(sweeps),
        spearman=_mean(ranks),
        worst_spearman=min(ranks, default=None),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        chosen_oom=chosen_oom(sweeps) if oom else None,
        oom_accuracy=(oom[0] + oom[3]) / sum(oom) if oom else None,
        oom=oom,
        memory_n=len(sized),
        memory_error=_mean(np.abs(memory)),
        memory_bias=_mean(memory),
        stated_n=len(stated),
        stated_error=_errors(stated),
        open_facts=dict(Counter(fact for s in timed for fact in s.open)),
        trends=trends(timed),
        left_out=dict(sorted(group.left_out.items())),
    )


def _errors(timed: Sequence[Sample]) -> float | None:
    predicted = [s.predicted for s in timed]
    return _mean(np.abs(relative(predicted, [s.measured for s in timed])))


ENOUGH_FOR_A_TREND = 8
"""Rows that a slope needs."""


def trends(timed: Sequence[Sample]) -> dict[str, float]:
    """The slope of log(predicted / measured) for each doubling of a figure, where it varies.

    Least squares over all figures together, so that one is not taken for another.
    """
    names = [
        name
        for name in (timed[0].scale if timed else ())
        if len({s.scale.get(name) for s in timed}) > 1
    ]
    if not names or len(timed) < ENOUGH_FOR_A_TREND:
        return {}
    columns = [[math.log2(s.scale.get(name, 1.0)) for name in names] for s in timed]
    design = np.column_stack([np.ones(len(timed)), np.asarray(columns)])
    residuals = np.log([(s.predicted or 1.0) / (s.measured or 1.0) for s in timed])
    slopes = np.linalg.lstsq(design, residuals, rcond=None)[0]
    return {name: float(slope) for name, slope in zip(names, slopes[1:], strict=True)}


def relative(
    predicted: Sequence[float | None], measured: Sequence[float | None]
) -> NDArray[np.float64]:
    """Signed errors as fractions of the measured values."""
    return np.asarray(np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1.0)


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _mean(values: ArrayLike) -> float | None:
    array = np.asarray(values, dtype=float)
    return float(array.mean()) if array.size else None


def null_predictions(work: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """The seconds of each row at the geometric mean rate of all the others."""
    work = np.asarray(work, dtype=float)
    measured = np.asarray(measured, dtype=float)
    rates = np.log(work / measured)
    others = (rates.sum() - rates) / (len(rates) - 1)
    return np.asarray(work / np.exp(others))


def null_error(timed: Sequence[Sample]) -> float | None:
    """The mean error of the null model on the scored rows.

    None if it has no other row to learn from.
    """
    if len(timed) < 2 or any(s.work is None for s in timed):
        return None
    measured = [s.measured for s in timed]
    return _mean(
        np.abs(relative(list(null_predictions([s.work for s in timed], measured)), measured))
    )  # type: ignore[arg-type]


def ranked(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 1, equal values sharing the mean of theirs.

    >>> ranked([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = np.unique(
        np.asarray(values, dtype=float), return_inverse=True, return_counts=True
    )
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[place], dtype=float)


def spearman(predicted: ArrayLike, measured: ArrayLike) -> float | None:
    """The rank correlation; None where all measured values are equal.

    Equal predictions order nothing: 0.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ours = ranked(predicted)
    theirs = ranked(measured)
    ours = ours - ours.mean()
    theirs = theirs - theirs.mean()
    if not theirs.any():
        return None
    if not ours.any():
        return 0.0
    return float(ours @ theirs / math.sqrt((ours @ ours) * (theirs @ theirs)))


def regret(predicted: ArrayLike, measured: ArrayLike) -> float:
    """The excess of the model's choice over the best; among equal predictions the mean counts.

    >>> regret([5.0, 4.0, 6.0], [2.0, 2.5, 9.0])
    0.25
    """
    predicted = np.asarray(predicted, dtype=float)
    measured = np.asarray(measured, dtype=float)
    return float(measured[predicted == predicted.min()].mean() / measured.min() - 1.0)


def swept(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The sweeps that hold enough timed rows, in the order in which they begin.

    Rows out of memory belong to theirs.
    """
    sweeps: dict[Hashable, list[Sample]] = {}
    for sample in samples:
        if sample.sweep is not None:
            sweeps.setdefault(sample.sweep, []).append(sample)
    return [members for members in sweeps.values() if sum(s.timed for s in members) >= SWEEP]


def measured_pairs(members: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Predicted and measured values of the timed rows."""
    pairs = [
        (s.predicted, s.measured)
        for s in members
        if s.predicted is not None and s.measured is not None
    ]
    return [p for p, _ in pairs], [m for _, m in pairs]


def chosen_oom(sweeps: Sequence[Sequence[Sample]]) -> int:
    """Sweeps in which the least predicted of the rows told to fit ran out of memory."""
    count = 0
    for members in sweeps:
        told = [s for s in members if s.predicted is not None and s.told_oom is False]
        best = min(told, key=lambda s: s.predicted or 0.0, default=None)
        count += best is not None and best.was_oom is True
    return count


def confusion(samples: Sequence[Sample]) -> tuple[int, int, int, int] | None:
    """Rows predicted and found out of memory, only predicted, only found, neither.

    None if there are none.
    """
    known = [
        (s.told_oom, s.was_oom) for s in samples if s.told_oom is not None and s.was_oom is not None
    ]
    if not any(was for _, was in known):
        return None
    return (
        known.count((True, True)),
        known.count((True, False)),
        known.count((False, True)),
        known.count((False, False)),
    )
