"""Calibration: repeated measurements on ranks become the figures of a cluster, or an error if the repeats disagree.

The device is fitted in `device_calibration`.

collectives   alpha + beta * min(x, limit) + beta_above * max(x - limit, 0): the break with the least squared relative
              error, figures not negative (least squares by active sets: Lawson and Hanson 1974)
noise         the fastest three repeats must agree, since a disturbance only adds time; their median counts
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import NoisyMeasurement

from .cluster.level import Level
from .cluster.measured import Curve, Measured
from .cluster.model import Cluster
from .cluster.source import Source
from .device import Device

Floats = NDArray[np.float64]
Key = tuple[str, str, int, int]
"""Collective, level, group size, bytes."""

AGREE = 3
"""The number of repeats that must agree."""
TOLERANCE = 0.10
"""The largest difference of agreeing repeats, as a fraction of the fastest."""
WORTH, EXACT = 0.9, 1e-10
"""A second segment is kept if the squared error falls below `WORTH` times one line's, unless one line is exact."""


def spread(repeats: Sequence[float]) -> float:
    """The difference of the fastest `AGREE` repeats, as a fraction; infinite if there are fewer repeats.

    >>> round(spread([1.0, 2.0, 1.05, 1.02]), 3), spread([1.0, 1.0])
    (0.05, inf)
    """
    fastest = sorted(repeats)[:AGREE]
    return fastest[-1] / fastest[0] - 1 if len(fastest) == AGREE else math.inf


def settled(repeats: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Whether the repeats agree."""
    return spread(repeats) <= tolerance


def agreed(repeats: Sequence[float]) -> float:
    """The median of the fastest repeats."""
    return statistics.median(sorted(repeats)[:AGREE])


def refuse_noise(repeats: Mapping[str, Sequence[float]], tolerance: float = TOLERANCE) -> None:
    """Raise `NoisyMeasurement` where repeats differ by more than `tolerance`; the worst are named."""
    apart = sorted(((spread(found), what) for what, found in repeats.items() if not settled(found, tolerance)), reverse=True)
    if apart:
        worst = ", ".join(f"{what} by {by:.0%}" for by, what in apart[:5])
        raise NoisyMeasurement(
            f"{len(apart)} of {len(repeats)} measurements do not repeat within {tolerance:.0%} ({worst}): nothing is written. Stop what "
            "else runs on these machines, give each rank a core of its own or a real-time priority (chrt -r 5), and calibrate again."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A curve with its relative errors over the sizes it was fitted to."""

    curve: Curve
    mean_error: float
    max_error: float


def fit_curve(nbytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The best curve of one or two segments through measured times, by relative error.

    >>> sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
    >>> fit_curve(sizes, [1e-4 + 1e-9 * x for x in sizes]).curve
    Curve(alpha=0.0001, beta=1e-09, limit=inf, beta_above=0.0)
    """
    x, t = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    best = _with_break(x, t, math.inf)
    if len(x) >= 5:
        limits = [*x[1:-1], *np.sqrt(x[1:-2] * x[2:-1])]
        second = min((_with_break(x, t, float(limit)) for limit in limits), key=lambda found: found[0])
        best = second if best[0] > EXACT and second[0] < WORTH**2 * best[0] else best
    errors = np.abs(best[1].seconds(x) / t - 1)
    return Fit(curve=best[1], mean_error=float(errors.mean()), max_error=float(errors.max()))


def _with_break(x: Floats, t: Floats, limit: float) -> tuple[float, Curve]:
    """Squared relative error and curve of the best fit that breaks at `limit`."""
    columns = [np.ones_like(x), np.minimum(x, limit)]
    if limit < math.inf:
        columns.append(np.maximum(x - limit, 0.0))
    found = _nonnegative(np.stack(columns, axis=1) / t[:, None])
    error = float((((np.stack(columns, axis=1) @ found) / t - 1) ** 2).sum())
    figures = [float(f"{value:.6g}") for value in found]
    above = {"limit": limit, "beta_above": figures[2]} if limit < math.inf else {}
    return error, Curve(alpha=figures[0], beta=figures[1], **above)


def _nonnegative(columns: Floats) -> Floats:
    """Least squares of `columns @ x = 1` with x not negative: the best over all sets of columns."""
    ones, count = np.ones(len(columns)), columns.shape[1]
    best, error = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            some = np.linalg.lstsq(part / scale, ones, rcond=None)[0] / scale
            left = float(((part @ some - 1) ** 2).sum())
            if (some >= 0).all() and left < error:
                best, error = np.zeros(count), left
                best[list(chosen)] = some
    return best


def fit_collectives(times: Mapping[Key, Sequence[float]], drivers: Mapping[tuple[str, int], int]) -> tuple[Measured, ...]:
    """A curve for each collective, level and group; `drivers` by level and group."""
    groups: dict[tuple[str, str, int], dict[int, Sequence[float]]] = {}
    for (kind, level, group, nbytes), repeats in times.items():
        groups.setdefault((kind, level, group), {})[nbytes] = repeats
    found = []
    for (kind, level, group), by_size in groups.items():
        fit = fit_curve([max(size, 1) for size in by_size], [agreed(repeats) for repeats in by_size.values()])
        found.append(
            Measured(
                kind=kind, level=level, group=group, curve=fit.curve if kind != "barrier" else _constant(fit.curve),
                drivers=drivers.get((level, group), 1), residual=fit.mean_error, spread=max(map(spread, by_size.values())),
            )
        )  # fmt: skip
    return tuple(found)


def _constant(curve: Curve) -> Curve:
    """The curve of a collective that moves no bytes."""
    return Curve(alpha=float(curve.seconds(1.0)), beta=0.0)


def fit_level(name: str, size: int, measured: Sequence[Measured], *, shared_by: int) -> tuple[Level, dict[str, str]]:
    """A level with the latency and rate of one sender's message."""
    send = next(entry for entry in measured if (entry.kind, entry.level) == ("send", name))
    per_byte = send.curve.beta_above if send.curve.limit < math.inf else send.curve.beta
    rate = min(shared_by, send.drivers) / max(per_byte, 1e-15)
    said = f"measured: messages between two ranks, the fit leaves a mean error of {send.residual:.1%}"
    level = Level(name=name, size=size, latency=max(send.curve.alpha, 1e-9), bandwidth=rate, shared_by=shared_by)
    return level, {f"{name}.latency": said, f"{name}.bandwidth": said, f"{name}.efficiency": "the bandwidth is as measured"}


def ports_shared(alone: Sequence[float], together: Sequence[float], ranks: int) -> int:
    """The number of a node's `ranks` that share a port, from the slowdown when all of them send at once.

    >>> ports_shared([1.0] * 3, [4.1] * 3, 4), ports_shared([1.0] * 3, [1.05] * 3, 4)
    (4, 1)
    """
    slower = agreed(together) / agreed(alone)
    return min((d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(math.log(slower / d)))


def calibrated(
    name: str, backend: str, device: tuple[Device, Mapping[str, str]], levels: Sequence[tuple[Level, Mapping[str, str]]], measured:
    Sequence[Measured], *, inside: Cluster | None = None, cores: int | None = None,
) -> Cluster:  # fmt: skip
    """The measured cluster on hosts of `cores`; with `inside`, each rank across nodes stands for a whole node calibrated before."""
    sources = {where: Source.of(text) for part in (device, *levels) for where, text in part[1].items()}
    shared = len(levels) == 1 and backend == "gloo" and levels[0][0].name != "nic"
    found = Cluster(
        name=name, device=device[0], levels=tuple(level for level, _ in levels), backend=backend, shared_host=shared,
        cores=cores / levels[0][0].size if shared and cores else None, sources=sources, measured=tuple(measured),
    )  # fmt: skip
    if inside is None:
        return found
    outer = tuple(replace(level, shared_by=inside.devices) for level in found.levels)
    return replace(
        found, device=inside.device, levels=(*inside.levels, *outer), shared_host=False, cores=inside.cores,
        measured=(*inside.measured, *found.measured), sources={**found.sources, **inside.sources},
    )  # fmt: skip
