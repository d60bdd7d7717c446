"""A device as if nobody had measured it: kernels by its data sheet, from all other devices.

`data/left_out` has them for each measured device (`benchmarks/fit_devices.py --left-out`). Devices
whose operators were profiled in layers are in no such fit; theirs is that of all measured ones. The
share of the memory's bandwidth that elementwise operators reach is the mean of the other profiled
devices.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

from autopar.costmodel import load_cluster
from autopar.costmodel.device import Device
from autopar.costmodel.device.measured_kernels import SHEET, Kernels, kernels_from, kernels_of

from .sizes import DATA

LEFT_OUT = DATA / "left_out"
PROFILED = {"A100": "dgx-a100-80g", "V100": "p3.16xlarge", "L4": "l4", "A10G": "g5"}
"""Presets of devices with profiled operators, by the first word of the device's name."""


def by_data_sheet(device: Device) -> Device:
    """The device with kernels that saw no row of it."""
    if device.kernels is None:
        return device
    kernels = replace(
        _without(device.kernels.name),
        # Rates of narrow types stand beside the measured kernels, by data sheet as well.
        peak={**device.kernels.peak, **device.peak},
        memory=device.memory_bandwidth,
        units=device.units or device.kernels.units,
    )
    return replace(unprofiled(device), kernels=kernels)


def unprofiled(device: Device) -> Device:
    """The device with elementwise operators as fast as on the other profiled ones."""
    own = device.name.partition("-")[0]
    if own not in PROFILED:
        return device
    shares = [
        load_cluster(preset).device.memory_fraction
        for name, preset in PROFILED.items()
        if name != own
    ]
    return replace(device, memory_fraction=sum(shares) / len(shares))


@functools.cache
def _without(name: str) -> Kernels:
    path = LEFT_OUT / f"{name}.json"
    if not path.exists():
        return kernels_of(SHEET)
    return kernels_from(json.loads(path.read_text(encoding="utf-8")), path.name)
