"""Repeated measurements on ranks become a cluster's figures, or an error if the repeats disagree.

The device is fitted in `device_kernels`.

    collectives   alpha + beta * min(x, limit) + beta_above * max(x - limit, 0)
                  the break with the least squared relative error; figures are not negative (least
                  squares by active sets: Lawson and Hanson 1974)
    noise         the fastest three repeats must agree, since a disturbance only adds time; their
                  median counts
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.device import Device
from autopar.errors import NoisyMeasurement

Floats = NDArray[np.float64]
Key = tuple[str, str, int, int]
"""Collective, level, group size, bytes."""

AGREE = 3
"""The number of repeats that must agree."""
TOLERANCE = 0.10
"""The largest difference of agreeing repeats, as a fraction of the fastest."""
WORTH = 0.9
EXACT = 1e-10
"""A second segment is kept if the error falls below `WORTH` times one line's, unless one line is
exact (`EXACT`: its squared error).
"""


def spread(repeats: Sequence[float]) -> float:
    """Return the difference of the fastest `AGREE` repeats, as a fraction of the fastest.

    It is infinite if there are fewer repeats.

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
    """Raise `NoisyMeasurement` where repeats differ by more than `tolerance`, naming the worst."""
    apart = sorted(
        ((spread(times), what) for what, times in repeats.items() if not settled(times, tolerance)),
        reverse=True,
    )
    if apart:
        worst = ", ".join(f"{what} by {by:.0%}" for by, what in apart[:5])
        raise NoisyMeasurement(
            f"{len(apart)} of {len(repeats)} measurements do not repeat within {tolerance:.0%} "
            f"({worst}): nothing is written. Stop what "
            "else runs on these machines, give each rank a core of its own or a real-time priority "
            "(chrt -r 5), and calibrate again."
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
    x = np.asarray(nbytes, dtype=np.float64)
    t = np.asarray(seconds, dtype=np.float64)
    best = _with_break(x, t, math.inf)
    # Two segments have four constants, so up to four points would be met exactly.
    if len(x) >= 5:
        # Sizes are spaced by factors, so the middle of two of them is their geometric mean.
        limits = [*x[1:-1], *np.sqrt(x[1:-2] * x[2:-1])]
        second = min((_with_break(x, t, float(limit)) for limit in limits), key=lambda fit: fit[0])
        # `WORTH` bounds the error, and these are sums of its squares.
        best = second if best[0] > EXACT and second[0] < WORTH**2 * best[0] else best
    errors = np.abs(best[1].seconds(x) / t - 1)
    return Fit(curve=best[1], mean_error=float(errors.mean()), max_error=float(errors.max()))


def _with_break(x: Floats, t: Floats, limit: float) -> tuple[float, Curve]:
    """Squared relative error and curve of the best fit that breaks at `limit`."""
    columns = [np.ones_like(x), np.minimum(x, limit)]
    if limit < math.inf:
        columns.append(np.maximum(x - limit, 0.0))
    solution = nonnegative_solution(np.stack(columns, axis=1) / t[:, None], np.ones_like(t))
    error = float((((np.stack(columns, axis=1) @ solution) / t - 1) ** 2).sum())
    # More digits than measurements repeat would only lengthen the file.
    figures = [float(f"{value:.6g}") for value in solution]
    above = {"limit": limit, "beta_above": figures[2]} if limit < math.inf else {}
    return error, Curve(alpha=figures[0], beta=figures[1], **above)


def nonnegative_solution(columns: Floats, wanted: Floats) -> Floats:
    """Least squares of `columns @ x = wanted` with x not negative, over all sets of columns."""
    count = columns.shape[1]
    best = np.zeros(count)
    error = math.inf
    # There are at most eight columns, so all 255 sets are tried.
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = columns[:, chosen]
            # Seconds and bytes differ by many orders of magnitude, which least squares takes badly.
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            some = np.linalg.lstsq(part / scale, wanted, rcond=None)[0] / scale
            left = float(((part @ some - wanted) ** 2).sum())
            if (some >= 0).all() and left < error:
                best = np.zeros(count)
                error = left
                best[list(chosen)] = some
    return best


def fit_collectives(
    times: Mapping[Key, Sequence[float]], drivers: Mapping[tuple[str, int], int]
) -> tuple[Measured, ...]:
    """A curve for each collective, level and group; `drivers` by level and group."""
    groups: dict[tuple[str, str, int], dict[int, Sequence[float]]] = {}
    for (kind, level, group, nbytes), repeats in times.items():
        groups.setdefault((kind, level, group), {})[nbytes] = repeats
    measured = []
    for (kind, level, group), by_size in groups.items():
        fit = fit_curve(
            [max(size, 1) for size in by_size], [agreed(repeats) for repeats in by_size.values()]
        )
        measured.append(
            Measured(
                kind=kind,
                level=level,
                group=group,
                curve=fit.curve if kind != "barrier" else _constant(fit.curve),
                drivers=drivers.get((level, group), 1),
                residual=fit.mean_error,
                spread=max(map(spread, by_size.values())),
            )
        )
    return tuple(measured)


def _constant(curve: Curve) -> Curve:
    """The curve of a collective that moves no bytes."""
    return Curve(alpha=float(curve.seconds(1.0)), beta=0.0)


def fit_level(
    name: str, size: int, measured: Sequence[Measured], *, shared_by: int
) -> tuple[Level, dict[str, str]]:
    """A level with the latency and rate of one sender's message."""
    send = next(entry for entry in measured if (entry.kind, entry.level) == ("send", name))
    # Large messages show the rate of the link best, so the last segment counts.
    per_byte = send.curve.beta_above if send.curve.limit < math.inf else send.curve.beta
    # Each of the devices that sent at once had a share of the port, whose rate is that of all.
    rate = min(shared_by, send.drivers) / max(per_byte, 1e-15)
    said = (
        f"measured: messages between two ranks, the fit leaves a mean error of {send.residual:.1%}"
    )
    level = Level(
        name=name,
        size=size,
        latency=max(send.curve.alpha, 1e-9),
        bandwidth=rate,
        shared_by=shared_by,
    )
    return level, {
        f"{name}.latency": said,
        f"{name}.bandwidth": said,
        f"{name}.efficiency": "the bandwidth is as measured",
    }


def ports_shared(alone: Sequence[float], together: Sequence[float], ranks: int) -> int:
    """Return the number of a node's `ranks` that share a port.

    It is estimated from the slowdown when all of them send at once.

    >>> ports_shared([1.0] * 3, [4.1] * 3, 4), ports_shared([1.0] * 3, [1.05] * 3, 4)
    (4, 1)
    """
    slower = agreed(together) / agreed(alone)
    # Nodes are symmetric, so the number divides the ranks: the divisor with the nearest ratio.
    return min(
        (d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(math.log(slower / d))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The fitted levels, each with the sources of its figures, and the measured collectives."""

    levels: Sequence[tuple[Level, Mapping[str, str]]]
    measured: Sequence[Measured] = ()


def calibrated(
    name: str,
    backend: str,
    device: tuple[Device, Mapping[str, str]],
    links: Links,
    *,
    inside: Cluster | None = None,
    cores: int | None = None,
) -> Cluster:
    """Return the measured cluster on hosts of `cores`.

    With `inside`, each rank across nodes stands for a whole node calibrated before.
    """
    levels = links.levels
    sources = {
        where: Source.of(text) for part in (device, *levels) for where, text in part[1].items()
    }
    # Ranks of Gloo on one level that is no network are processes of one host, and divide it.
    shared = len(levels) == 1 and backend == "gloo" and levels[0][0].name != "nic"
    cluster = Cluster(
        name=name,
        device=device[0],
        levels=tuple(level for level, _ in levels),
        backend=backend,
        shared_host=shared,
        cores=cores / levels[0][0].size if shared and cores else None,
        sources=sources,
        measured=tuple(links.measured),
    )
    if inside is None:
        return cluster
    # One rank of each node sent through its port; all devices of the node share it.
    outer = tuple(replace(level, shared_by=inside.devices) for level in cluster.levels)
    return replace(
        cluster,
        device=inside.device,
        levels=(*inside.levels, *outer),
        shared_host=False,
        cores=inside.cores,
        measured=(*inside.measured, *cluster.measured),
        sources={**cluster.sources, **inside.sources},
    )
