"""`autopar calibrate`: measure on the available ranks, refuse noise, fit, and show the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.calibration import calibrated, fit_collectives, fit_level, ports_shared, refuse_noise, settled
from autopar.costmodel.device_calibration import DeviceRepeats, fit_device

from ..errors import UsageError, unknown
from .tables import Table
from .units import bytes_text, rate_text, seconds_text

SIZES = (2**10, 2**26)
QUICK_SIZES = (2**10, 2**24)


def calibrate(
    *,
    nproc: int | None,
    backend: str | None,
    name: str,
    kinds: Sequence[str] = (),
    quick: bool,
    tolerance: float,
    inside: Cluster | None,
) -> Cluster | None:
    """The cluster of the available ranks, with `kinds` of collectives (default: all); None on ranks that do not report.

    `nproc`, `backend`: the ranks. `quick`: fewer sizes. `tolerance`: the largest relative spread of repeats. `inside`:
    the cluster of one node, calibrated before, if each rank stands for a whole node.
    """
    from autopar.runtime.measuring import KINDS, Wanted, byte_sizes, measure

    sizes = byte_sizes(*(QUICK_SIZES if quick else SIZES))
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(unknown("collective", kind, KINDS))
    chosen = (*(kind for kind in kinds if kind != "send"), "send") if kinds else KINDS
    wanted = Wanted(kinds=chosen, sizes=sizes, settled=partial(settled, tolerance=tolerance), device=True, quick=quick)
    found, speaks = measure(wanted, nproc=nproc, backend=backend)
    return from_measurements(found, name=name, tolerance=tolerance, inside=inside) if speaks else None


def from_measurements(found: Any, *, name: str, tolerance: float, inside: Cluster | None = None) -> Cluster:
    """The cluster of `runtime.measuring.Measurements`; `NoisyMeasurement` if the repeats do not agree."""
    device = DeviceRepeats(**{each.name: getattr(found.device, each.name) for each in fields(DeviceRepeats)})
    refuse_noise({**_named(found.collectives), **device.named()}, tolerance)
    drivers = {(place.level, place.size): place.drivers for place in found.places}
    measured = fit_collectives(found.collectives, drivers)
    shared = ports_shared(found.port[0], found.port[1], found.per_node) if found.port else 1
    joined = [(place.level, found.per_node if place.drivers == 1 and found.per_node > 1 else found.nodes, place) for place in found.places]
    levels = []
    for level, size in dict.fromkeys((level, size) for level, size, _ in joined if ":" not in level):
        levels.append(fit_level(level, size, measured, shared_by=shared if level == "nic" else 1))
    return calibrated(name, found.backend, fit_device(device), levels, measured, inside=inside, cores=found.cores)


def _named(times: Mapping[tuple[str, str, int, int], Sequence[float]]) -> dict[str, Sequence[float]]:
    return {f"{kind} of {bytes_text(nbytes)} on {group} ranks ({level})": found for (kind, level, group, nbytes), found in times.items()}


def calibrated_parts(cluster: Cluster) -> list[str | Table]:
    """The measured collectives with their fits."""
    rows = []
    for entry in cluster.measured:
        curve = entry.curve
        two = curve.limit < math.inf
        rows.append(
            (
                entry.kind, entry.level, str(entry.group), seconds_text(curve.alpha), _rate(curve.beta),
                bytes_text(curve.limit) if two else "-", _rate(curve.beta_above) if two else "-",
                f"{entry.residual:.1%}", f"{entry.spread:.1%}",
            )
        )  # fmt: skip
    columns = ("collective", "level", ">ranks", ">latency", ">rate", ">up to", ">rate above", ">residual", ">repeats within")
    return [Table(title="Collectives as measured", columns=columns, rows=tuple(rows))]


def _rate(beta: float) -> str:
    return rate_text(1 / beta, "B/s") if beta else "-"
