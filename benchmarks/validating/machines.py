"""The machines of published runs: a preset, with differences that a row or its source states."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.cluster.measured_collectives import Curve, Measured

from .missing import Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network of a row, if it is not the preset's.

    B/s of a port, and the number of devices that share it.
    """

    bandwidth: float
    shared_by: int


NETWORKS: Mapping[str, Network] = {
    # 100 Gbit/s Omni-Path without GPUDirect: 5 GB/s a node were measured before the host's topology
    # was set right, and no figure after (bigscience-workshop/bigscience@9e64edec:
    # experiments/bandwidth, train/tr11-176B-ml/chronicles-prequel.md); fitted to the sweep.
    "4x100Gb OPA": Network(bandwidth=2.2e9, shared_by=2),
    "400Gbps": Network(bandwidth=5e10, shared_by=8),
    "800Gbps": Network(bandwidth=1e11, shared_by=8),
}
PRESETS = (
    ("A100", "dgx-a100-80g"),
    ("H100", "dgx-h100"),
    ("H200", "hgx-h200"),
    ("V100", "p3.16xlarge"),
    ("GB200", "gb200-nvl72"),
    ("GB300", "gb300-nvl72"),
    ("B200", "dgx-b200"),
    ("B300", "dgx-b300"),
    ("L4", "l4"),
    ("A10G", "g5"),
)
POWER = 0.5
"""The exponent of arithmetic rate over power.

Power goes with the clock and the square of the voltage, which follows the clock in the upper part
of its range and stays in the lower one. So the exponent lies between a third and one; assumed.
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
def cluster_of(gpu: str, network: str = "", source: str = "") -> Cluster:
    """The machines of a row."""
    preset = next((preset for word, preset in PRESETS if gpu.startswith(word)), None)
    if preset is None:
        raise Missing(f"no preset for {gpu or 'no GPU'}")
    cluster = load_cluster(preset)
    device = cluster.device
    if gpu.startswith("A100") and "40GB" in gpu:
        device = load_cluster("dgx-a100").device
    if "96GB" in gpu:  # HBM2e instead of HBM3, and 500 W of 700 W
        capacity = device.memory_capacity * 96 / 80
        device = replace(
            device, memory_bandwidth=2.4e12, memory_capacity=capacity, clock=(500 / 700) ** POWER
        )
    if "V100" in gpu and "32GB" in gpu:
        device = replace(device, memory_capacity=device.memory_capacity * 2)
    if source in PRODUCTS_OF:
        device = replace(device, clock=PRODUCTS_OF[source])
    cluster = replace(
        cluster, device=device, measured=_measured(cluster, COLLECTIVES_OF.get(source, {}))
    )
    for word, name in NETWORKS.items():
        if network.startswith(word):
            port = replace(cluster.levels[-1], bandwidth=name.bandwidth, shared_by=name.shared_by)
            cluster = replace(cluster, levels=(*cluster.levels[:-1], port))
    return cluster


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
