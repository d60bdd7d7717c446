"""Fits the protocols of a collective.

Lines over bytes for every size of group, of which the least counts.

    seconds(n, x) = min over m of  o_m + steps(n) s_m + x (traffic(n) / r_m + own(n) / c)

with steps, traffic and own of the algorithm (`autopar.costmodel.collectives.backends`) and o, s, r
of a protocol, c of the collective. The sum of soft absolute logarithms of seconds over measured is
least (scipy's `least_squares`, soft_l1), from several seeded starts. A weak prior holds c near 2.5
times r: where no group of two was measured in large messages it is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.costmodel import Algorithm

from .collective_rows import Points

Floats = NDArray[np.float64]
STARTS = 10
SEED = 20261122
ROUGH = 0.3
FINE = 0.08
"""Relative errors from which on a row counts by its size and no longer by its square.

First, and in the end (1).
"""
PRIOR = 0.1
COPY = 2.5
LEAST = 1e-9
MOST = 1e-2
"""Bounds of overheads and steps (s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Seconds of a start, of a step and per byte of each protocol.

    Seconds per byte of a device's own part.
    """

    algorithms: tuple[Algorithm, ...]
    overhead: Floats
    latency: Floats
    per_byte: Floats
    own_per_byte: float

    def seconds(self, points: Points) -> Floats:
        """The form's seconds of the points."""
        return np.asarray(np.min(self._lines(points), axis=0))

    def fastest(self, points: Points) -> NDArray[np.int64]:
        """The number of the protocol that the points run in."""
        return np.asarray(np.argmin(self._lines(points), axis=0))

    def ordered(self) -> Fitted:
        """The fit with its protocols ordered from most seconds per byte to least.

        All have one algorithm.
        """
        order = np.argsort(-self.per_byte, kind="stable")
        return replace(
            self,
            overhead=self.overhead[order],
            latency=self.latency[order],
            per_byte=self.per_byte[order],
        )

    def _lines(self, points: Points) -> Floats:
        return _lines(_packed(self), _coefficients(self.algorithms, points.group), points.nbytes)


def _coefficients(algorithms: Sequence[Algorithm], groups: NDArray[np.int64]) -> Floats:
    """Steps, traffic and own part of each algorithm in each group.

    Array [algorithms, 3, points].
    """
    return np.array(
        [
            [[form(int(n)) for n in groups] for form in (a.steps, a.traffic, a.own)]
            for a in algorithms
        ],
        dtype=np.float64,
    )


def _packed(fitted: Fitted) -> Floats:
    columns = np.stack([fitted.overhead, fitted.latency, fitted.per_byte], axis=1).ravel()
    return np.log(np.append(columns, fitted.own_per_byte))


def _lines(packed: Floats, coefficients: Floats, nbytes: Floats) -> Floats:
    """Seconds by each protocol: array [protocols, points]."""
    figures = np.exp(packed[:-1]).reshape(-1, 3)
    own = np.exp(packed[-1])
    return np.array(
        [
            overhead + latency * steps + nbytes * (per_byte * traffic + own * kept)
            for (overhead, latency, per_byte), (steps, traffic, kept) in zip(
                figures, coefficients, strict=True
            )
        ]
    )


def _start(
    rng: np.random.Generator, points: Points, algorithms: Sequence[Algorithm], coefficients: Floats
) -> Floats:
    """A guess: from the quick protocol to the one for bytes, each algorithm's own."""
    large = points.nbytes >= points.nbytes.max() / 8
    small = points.nbytes <= 2**16
    rate = float(
        np.median(points.seconds[large] / points.nbytes[large] / coefficients[0, 1, large])
    )
    step = float(np.median(points.seconds[small] / points.group[small]))
    quickest = float(points.seconds[small].min())
    guess: list[float] = []
    for number, algorithm in enumerate(algorithms):
        alike = [other.name for other in algorithms]
        before = alike[:number].count(algorithm.name)
        count = alike.count(algorithm.name)
        along = before / max(count - 1, 1)
        slower = 0.85 if along == 1 else np.exp((1 - along) * rng.uniform(1.0, 4.5))
        far = 1.0 if algorithm.feature is None else 3.0
        guess += [
            far * 0.8 * quickest * np.exp(along * rng.uniform(1.0, 2.6)),
            step * np.exp(rng.normal(-0.7, 0.6) + along),
            rate * slower,
        ]
    return np.log([*guess, rate / COPY])


def fit(
    points: Points,
    algorithms: Sequence[Algorithm],
    *,
    bandwidth: float,
    least: Sequence[float] = (),
) -> Fitted:
    """One protocol for each of `algorithms` on links of `bandwidth`.

    `least`: lower bounds of their start-up times.
    """
    coefficients = _coefficients(algorithms, points.group)
    last = (
        3 * max(number for number, algorithm in enumerate(algorithms) if algorithm.feature is None)
        + 2
    )
    measured = np.log(points.seconds)

    def residuals(packed: Floats) -> Floats:
        prior = PRIOR * (packed[-1] - packed[last] + np.log(COPY))
        return np.append(
            np.log(np.min(_lines(packed, coefficients, points.nbytes), axis=0)) - measured, prior
        )

    count = len(algorithms)
    starts = [max(LEAST, start) for start in least] or [LEAST] * count
    low = np.log([*(bound for start in starts for bound in (start, LEAST, 1 / bandwidth)), 1e-14])
    high = np.log([*[MOST, MOST, 1e-6] * count, 1e-6])
    rng = np.random.default_rng(SEED)
    best = None
    for _ in range(STARTS):
        start = np.clip(_start(rng, points, algorithms, coefficients), low + 1e-3, high - 1e-3)
        for scale in (ROUGH, FINE):
            solution = least_squares(
                residuals, start, loss="soft_l1", f_scale=scale, bounds=(low, high), max_nfev=150
            )
            start = solution.x
        best = solution if best is None or solution.cost < best.cost else best
    assert best is not None
    figures = np.exp(best.x[:-1]).reshape(-1, 3)
    return Fitted(
        algorithms=tuple(algorithms),
        overhead=figures[:, 0],
        latency=figures[:, 1],
        per_byte=figures[:, 2],
        own_per_byte=float(np.exp(best.x[-1])),
    )
