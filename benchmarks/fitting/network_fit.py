"""Fits the protocols of a network to all-reduces that cross it, given the links inside the nodes.

Fitted are the start and the rate of LL, LL128 and Simple; a step's latency is half of the network's
addition to an empty all-reduce on two nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.costmodel import Cluster, collective_time, load_cluster
from autopar.costmodel.cluster.protocols import Protocol
from benchmarks.validating.collectives import Point, Scored

from .link_fits import PROTOCOLS, rate, share, us

STEP = 30e-6
"""Seconds of a step over EFA (p4de: 164 us for 8 B on 2 x 8 GPUs)."""
GUESS = (60e-6, 0.01, 90e-6, 0.3, 400e-6, 0.84)
SPAN = "nvlink:8+nic:2"
GROUP = 16


def _with(cluster: Cluster, figures: Sequence[float]) -> Cluster:
    nic = cluster.level("nic")
    protocols = tuple(
        Protocol(
            name=name,
            algorithms=("ring", "tree"),
            overhead=figures[2 * i],
            latency=STEP,
            efficiency=figures[2 * i + 1],
        )
        for i, name in enumerate(PROTOCOLS)
    )
    return replace(
        cluster,
        levels=tuple(
            replace(nic, protocols=protocols) if level.name == "nic" else level
            for level in cluster.levels
        ),
    )


def fit_network(name: str, points: Sequence[Point]) -> tuple[list[float], float]:
    """Fit starts and efficiencies in turn; return them with the median error on the same points.

    The points are too few to hold some out.
    """
    cluster = load_cluster(name).sized(GROUP)
    sizes = np.array([point.size for point in points])
    measured = np.log([point.measured for point in points])

    def residuals(packed: NDArray[np.float64]) -> NDArray[np.float64]:
        there = _with(cluster, np.exp(packed).tolist())
        return (
            np.log(collective_time("all_reduce", sizes, GROUP, level=SPAN, cluster=there))
            - measured
        )

    bounds = np.log([1e-7, 1e-4] * len(PROTOCOLS)), np.log([1e-2, 1.0] * len(PROTOCOLS))
    solution = least_squares(residuals, np.log(GUESS), bounds=bounds, loss="soft_l1", f_scale=0.1)
    return np.exp(solution.x).tolist(), float(np.median(np.abs(np.expm1(residuals(solution.x)))))


def network_file(groups: Mapping[str, Scored]) -> dict[str, Any]:
    """The EFA of p4d as a file of links."""
    points = groups["p4de, 2 nodes"].points
    figures, error = fit_network("p4d", points)
    source = (
        "all-reduce on 2 x 8 GPUs of p4de: "
        "awslabs/awsome-distributed-training@0edaf152:micro-benchmarks/nccl-tests"
    )
    fitted = {"source": source, "kind": "fitted", "error": round(error, 4), "rows": len(points)}
    assumed = {"kind": "assumed", "source": "half of the network's part of an empty all-reduce"}
    rows = [
        {
            "name": name,
            "algorithms": ["ring", "tree"],
            "overhead": us(figures[2 * i]),
            "latency": {**us(STEP), **assumed},
            "efficiency": share(figures[2 * i + 1]),
            "said": fitted,
        }
        for i, name in enumerate(PROTOCOLS)
    ]
    rows.append(
        {
            "name": "sends",
            "algorithms": ["peer to peer", "message"],
            "overhead": us(60e-6),
            "latency": us(STEP / 8),
            "efficiency": share(0.75),
            "said": {
                "source": "no measurement: as InfiniBand, eight peers at once",
                "kind": "assumed",
            },
        }
    )
    return {
        "latency": {**us(STEP), **assumed},
        "bandwidth": {
            **rate(12.5e9),
            "source": "AWS p4d.24xlarge: 4 x 100 Gbit/s EFA for 8 GPUs",
            "kind": "data sheet",
        },
        "efficiency": {**share(figures[-1]), **fitted},
        "shared_by": 2,
        "protocols": rows,
    }
