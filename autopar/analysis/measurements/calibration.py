"""`autopar calibrate`: measure on the available ranks, refuse noise, fit, and show the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.calibration.collective_curves import (
    Links,
    calibrated,
    fit_collectives,
    fit_level,
    ports_shared,
    refuse_noise,
    settled,
)
from autopar.costmodel.calibration.device_kernels import DeviceRepeats, fit_device
from autopar.errors import UsageError, unknown
from autopar.units import bytes_text

from .host_calibration import small_trainings, steps_of, with_host

SIZES = (2**10, 2**26)
QUICK_SIZES = (2**10, 2**24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements of a calibration.

    `name`: of the new cluster. `kinds`: of collectives (none: all). `quick`: fewer sizes.
    `tolerance`: the largest relative spread of repeats. `inside`: the cluster of one node,
    calibrated before, if each rank stands for a whole node.
    """

    name: str
    kinds: tuple[str, ...] = ()
    quick: bool = False
    tolerance: float
    inside: Cluster | None = None


def calibrate(wanted: Calibration, *, nproc: int | None, backend: str | None) -> Cluster | None:
    """The cluster of the ranks at hand; None on ranks that do not report."""
    from autopar.runtime.launch import default_backend, launched
    from autopar.runtime.measuring import KINDS, Wanted, byte_sizes, measure, ranks_at_hand

    for kind in wanted.kinds:
        if kind not in KINDS:
            raise UsageError(unknown("collective", kind, KINDS))
    kinds = KINDS
    if wanted.kinds:
        # Pipelines need messages between ranks, which no collective tells.
        kinds = (*(kind for kind in wanted.kinds if kind != "send"), "send")
    # On a GPU the host runs ahead of the kernels; forked ranks compute on the host.
    on_host = "nccl" not in (backend, default_backend() if launched() else "")
    trainings = small_trainings(ranks_at_hand(nproc)) if on_host else []
    measuring = Wanted(
        kinds=kinds,
        sizes=byte_sizes(*(QUICK_SIZES if wanted.quick else SIZES)),
        settled=partial(settled, tolerance=wanted.tolerance),
        device=True,
        quick=wanted.quick,
        steps=partial(steps_of, trainings),
    )
    measurements, speaks = measure(measuring, nproc=nproc, backend=backend)
    if not speaks:
        return None
    cluster = from_measurements(
        measurements, name=wanted.name, tolerance=wanted.tolerance, inside=wanted.inside
    )
    # With `inside` the device was calibrated before, and here its nodes are.
    measured = wanted.inside is None and measurements.steps
    return with_host(cluster, trainings, measurements.steps) if measured else cluster


def from_measurements(
    measurements: Any, *, name: str, tolerance: float, inside: Cluster | None = None
) -> Cluster:
    """The cluster of `runtime.measuring.Measurements`.

    Raises `NoisyMeasurement` if the repeats do not agree.
    """
    device = DeviceRepeats(
        **{each.name: getattr(measurements.device, each.name) for each in fields(DeviceRepeats)}
    )
    steps = {f"step of {name}": repeats for name, repeats in measurements.steps.items()}
    refuse_noise({**_named(measurements.collectives), **device.named(), **steps}, tolerance)
    drivers = {(place.level, place.size): place.drivers for place in measurements.places}
    measured = fit_collectives(measurements.collectives, drivers)
    shared = (
        ports_shared(measurements.port[0], measurements.port[1], measurements.per_node)
        if measurements.port
        else 1
    )
    joined = [
        (
            place.level,
            measurements.per_node
            if place.drivers == 1 and measurements.per_node > 1
            else measurements.nodes,
            place,
        )
        for place in measurements.places
    ]
    levels = []
    for level, size in dict.fromkeys(
        (level, size) for level, size, _ in joined if ":" not in level
    ):
        levels.append(fit_level(level, size, measured, shared_by=shared if level == "nic" else 1))
    return calibrated(
        name,
        measurements.backend,
        fit_device(device),
        Links(levels=levels, measured=measured),
        inside=inside,
        cores=measurements.cores,
    )


def _named(
    times: Mapping[tuple[str, str, int, int], Sequence[float]],
) -> dict[str, Sequence[float]]:
    return {
        f"{kind} of {bytes_text(nbytes)} on {group} ranks ({level})": repeats
        for (kind, level, group, nbytes), repeats in times.items()
    }
