"""The machines of published runs: a preset, with differences that a row or its source states."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.costmodel.device import Device

from .missing import Missing
from .networks import ONE_PORT, Network, network_of
from .seen import KERNELS
from .sheets import by_data_sheet, unprofiled

FITTED: Mapping[str, Network] = {
    # 100 Gbit/s Omni-Path without GPUDirect: 5 GB/s a node were measured before the host's topology
    # was set right, and no figure after (bigscience-workshop/bigscience@9e64edec:
    # experiments/bandwidth, train/tr11-176B-ml/chronicles-prequel.md); fitted to the sweep.
    "4x100Gb OPA": Network(rate=2.2e9, shared_by=2)
}
"""Networks fitted to rows that are scored on them; `seen` says which."""
PRESETS: Mapping[str, str] = {
    "A100": "dgx-a100-80g",
    "H100": "dgx-h100",
    "H200": "hgx-h200",
    "V100": "p3.16xlarge",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "L4": "l4",
    "L40S": "l40s",
    "A10G": "g5",
    "MI300X": "mi300x",
    "RTX4090": "rtx4090",
}
"""By the first word of a device's name."""
VENDORS = ("NVIDIA", "AMD", "Tesla")
EFA: Mapping[str, str] = {"A100": "p4d", "H100": "p5"}
"""Presets with the network of Amazon's machines, by device."""
OTHERS = re.compile(r"PCIE|\bNVL\b|CNX")
"""In names of devices with other links or clocks, which no preset has."""
USUAL_NODE = 8
"""Devices of a host that share its ports, at most."""
CLOSE = 0.1
"""The share by which GB and GiB of a memory differ; more is another memory."""
POWER = 0.5
"""The exponent of arithmetic rate over power.

Power goes with the clock and the square of the voltage, which follows the clock in the upper part
of its range and stays in the lower one. So the exponent lies between a third and one; assumed.
"""
CLOCKS: Mapping[str, tuple[float, float]] = {"L4": (1050.0, 2040.0)}
"""MHz at which a device's operators were profiled, and its highest (data sheet).

L4: Dazz993/Mist@d69e530a, README: `nvidia-smi -ac 6251,1050`. A device of 72 W that is not locked
runs anywhere between, as its power allows.
"""
PRODUCTS_OF = {
    # SimuMax's own table of products on its node (MooreThreads/SimuMax@4dcaae51:
    # configs/system/b200_bf16_ceperm.json, 401 large products): 0.79 to 0.82 of the rates of this
    # kind of device, by operand order; attention as fast.
    "simumax": 0.81
}
"""Machines with measured products, and their share of the rates of their kind."""
# The same file's lines of collectives, fitted there to tests of messages: seconds a step and once,
# B/s, steps by the group.
COLLECTIVES_OF: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "simumax": {
        "all_reduce": (5.518e-6, 22.23e-6, 0.7424 * 900 * 2**30),
        "all_gather": (9.183e-6, 23.10e-6, 0.6735 * 900 * 2**30),
        "reduce_scatter": (8.033e-6, 25.56e-6, 0.6731 * 900 * 2**30),
        "all_to_all": (7.304e-6, 0.0, 0.5968 * 900 * 2**30),
    }
}
"""Machines whose collectives were measured, by kind."""


@functools.cache
def cluster_of(
    gpu: str,
    network: str = "",
    source: str = "",
    *,
    memory: float = 0.0,
    node: int = 0,
    without: frozenset[str] = frozenset(),
) -> Cluster:
    """The machines of a row.

    `memory`: GB of a device; `node`: devices of a node (0: as in the preset). `without`: what is
    not taken of all that was measured or fitted (`seen.taken_away`).
    """
    word = _first_word(gpu)
    if word not in PRESETS or OTHERS.search(gpu.upper()):
        raise Missing(f"no preset for {gpu or 'no GPU'}")
    efa = "EFA" in network and word in EFA
    cluster = load_cluster(EFA[word] if efa else PRESETS[word])
    device = _unfitted(_device(cluster.device, gpu, memory), word, without)
    if source in PRODUCTS_OF:
        device = replace(device, clock=PRODUCTS_OF[source])
    cluster = replace(
        cluster, device=device, measured=_measured(cluster, COLLECTIVES_OF.get(source, {}))
    )
    return _joined(cluster, network, node, fitted="network" not in without)


RESERVED: Mapping[str, float] = {"A100": 1.5 * 2**30}
"""Bytes in use beside a step's tensors where those of a device were read off runs: what presets
assume for devices without such runs (context 0.5 GiB, buffers of NCCL 1 GiB).
"""


def _unfitted(device: Device, word: str, without: frozenset[str]) -> Device:
    """The device without some of what was read off machines or runs that are scored."""
    if without & {KERNELS, "operators"}:
        device = by_data_sheet(device)
    elif "elementwise" in without:
        device = unprofiled(device)
    if "memory in use" in without:
        device = replace(device, reserved=RESERVED.get(word, device.reserved))
    return device


def locked(cluster: Cluster, gpu: str, *, profiled: bool = True) -> Cluster:
    """The machines of runs at the clock at which operators were profiled."""
    word = _first_word(gpu)
    # Kernels by a data sheet are at the highest clock, profiled ones at the locked one.
    return cluster if profiled or word not in CLOCKS else _clocked(cluster, _locked_share(word))


def _locked_share(word: str) -> float:
    return CLOCKS[word][0] / CLOCKS[word][1]


def without_features(cluster: Cluster) -> Cluster:
    """The machines with what their switches compute turned off (NCCL_NVLS_ENABLE=0)."""
    levels = tuple(replace(level, features=()) for level in cluster.levels)
    return replace(cluster, levels=levels)


def unlocked(
    cluster: Cluster, gpu: str, *, profiled: bool = True
) -> tuple[Cluster, tuple[Cluster, ...]]:
    """The machines of runs that locked no clock, in the middle of its range, and at its ends."""
    word = _first_word(gpu)
    if word not in CLOCKS:
        return cluster, ()
    low = locked(cluster, gpu, profiled=profiled)
    highest = 1 / _locked_share(word)
    return _clocked(low, highest**0.5), (low, _clocked(low, highest))


def _clocked(cluster: Cluster, times: float) -> Cluster:
    peak = {family: rate * times for family, rate in cluster.device.peak.items()}
    return replace(cluster, device=replace(cluster.device, peak=peak))


def _first_word(gpu: str) -> str:
    words = [word for word in re.split(r"[-\s(]+", gpu.strip()) if word not in VENDORS]
    return words[0] if words else ""


def _device(device: Device, gpu: str, memory: float) -> Device:
    """The device of a row, of which its name or its memory may say that it is another variant."""
    if gpu.startswith("A100") and (memory == 40 or "40GB" in gpu):
        device = load_cluster("dgx-a100").device
    if "96GB" in gpu:  # HBM2e instead of HBM3, and 500 W of 700 W
        device = replace(device, memory_bandwidth=2.4e12, clock=(500 / 700) ** POWER)
    stated = memory or float((re.search(r"(\d+)\s*GB", gpu) or [0, 0])[1])
    if stated and abs(stated * 2**30 / device.memory_capacity - 1) > CLOSE:
        # Drivers take the same share of a memory of any size.
        device = replace(device, memory_capacity=stated * 2**30 * _usable(device))
    return device


def _usable(device: Device) -> float:
    """The share of a device's nominal memory that programs may use."""
    nominal = re.search(r"(\d+)GB", device.name)
    return device.memory_capacity / (float(nominal[1]) * 2**30) if nominal else 1.0


def _joined(cluster: Cluster, text: str, node: int, *, fitted: bool) -> Cluster:
    """The cluster with the nodes and the network that a row states."""
    inner = cluster.levels[0]
    # A rack whose devices share one switch is a node here, however many hosts it has.
    if node and len(cluster.levels) == 2 and node < inner.size and inner.size <= USUAL_NODE:
        inner = replace(inner, size=node)
    port = cluster.levels[-1]
    own = next((own for word, own in FITTED.items() if fitted and text.startswith(word)), None)
    usual = port.bandwidth if port.shared_by == 1 else 0.0
    devices = min(inner.size, USUAL_NODE)
    if text == ONE_PORT:
        port = replace(port, shared_by=devices)
    elif network := own or network_of(text, devices, usual):
        port = replace(port, bandwidth=network.rate, shared_by=network.shared_by)
    return replace(cluster, levels=(inner, *cluster.levels[1:-1], port))


def _measured(
    cluster: Cluster, lines: Mapping[str, tuple[float, float, float]]
) -> tuple[Measured, ...]:
    """Collectives on a node's links.

    N - 1 steps and a share (n - 1) / n of the bytes, twice for an all-reduce.
    """
    constants = []
    for kind, (step, once, rate) in lines.items():
        passes = 2 if kind == "all_reduce" else 1
        for group in (2, 4, 8):
            curve = Curve(
                alpha=once + passes * (group - 1) * step, beta=passes * (group - 1) / group / rate
            )
            constants.append(
                Measured(kind=kind, level=cluster.levels[0].name, group=group, curve=curve)
            )
    return tuple(constants)
