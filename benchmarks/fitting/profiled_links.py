"""Fits the links of a node to collectives profiled on it.

All-reduces and messages of 1 MiB and more.

    all-reduce    seconds = overhead + bytes 2 (n - 1) / n / rate
    message       the median of bytes / second as they are printed

The sum of soft absolute logarithms of seconds over measured is least. Columns: gpu, op, gpus,
data_MB (of 2^20 B), seconds, and for messages the B/s in the column of bus bandwidths. Other
collectives are left out, since their bytes may be a part or the whole.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopar.costmodel.cluster.residual import Residual, left_by
from autopar.errors import UsageError

from .collective_rows import FOLDS
from .link_fits import rate, share, us

FILE = "mist_collectives.csv.gz"
SOURCE = "{what} on {gpu}: {rows} rows of Dazz993/Mist@d69e530a, collectives profiled on a node"
MIB = 2**20
SCALE = 0.1
GUESS = (1e-4, 0.3)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The links of a node: `gpu` of the rows, B/s one way by its data sheet."""

    name: str
    gpu: str
    bandwidth: float
    sheet: str


NODES = (
    Node(name="pcie-l4", gpu="L4-24GB", bandwidth=32e9, sheet="NVIDIA L4 data sheet: PCIe 4 x16"),
    Node(
        name="pcie-a10g", gpu="A10G-24GB", bandwidth=32e9, sheet="NVIDIA A10 data sheet: PCIe 4 x16"
    ),
)


def _lines(folder: Path, gpu: str) -> list[dict[str, str]]:
    path = folder / FILE
    if not path.exists():
        raise UsageError(f"{folder} has no table {FILE}")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [line for line in csv.DictReader(file) if line["gpu"] == gpu]


def _seconds(packed: Floats, size: Floats, group: Floats, bandwidth: float) -> Floats:
    overhead, efficiency = np.exp(packed)
    return np.asarray(overhead + size * 2 * (group - 1) / group / (efficiency * bandwidth))


def node_file(folder: Path, node: Node) -> dict[str, Any]:
    """The contents of a file of links."""
    lines = _lines(folder, node.gpu)
    reduces = [line for line in lines if line["op"] == "all_reduce"]
    size, group, measured = np.array(
        [[float(r["data_MB"]) * MIB, float(r["gpus"]), float(r["seconds"])] for r in reduces]
    ).T
    fold = np.array(
        [zlib.crc32(f"{line['gpus']} {line['data_MB']}".encode()) % FOLDS for line in reduces]
    )

    def solved(seen: NDArray[np.bool_]) -> Floats:
        def residuals(packed: Floats) -> Floats:
            return np.log(
                _seconds(packed, size[seen], group[seen], node.bandwidth) / measured[seen]
            )

        bounds = np.log([1e-7, 1e-4]), np.log([1e-2, 1.0])
        return np.asarray(
            least_squares(residuals, np.log(GUESS), bounds=bounds, loss="soft_l1", f_scale=SCALE).x
        )

    whole = solved(fold != 0)
    left = np.zeros(len(fold))
    for number in range(1, FOLDS):
        own = fold == number
        left[own] = np.log(
            measured[own] / _seconds(solved(~own), size[own], group[own], node.bandwidth)
        )
    held = fold == 0
    error = float(
        np.median(
            np.abs(_seconds(whole, size[held], group[held], node.bandwidth) / measured[held] - 1)
        )
    )
    overhead, efficiency = np.exp(whole)
    messages = [
        float(r["busbw_GBps_if_data_is_the_full_buffer"]) * 1e9
        for r in lines
        if r["op"] == "p2p_intra_node"
    ]
    said = {
        "source": SOURCE.format(what="all_reduce", gpu=node.gpu, rows=int((~held).sum())),
        "kind": "fitted",
    }
    said |= {"error": round(error, 4), "rows": int(held.sum())}
    sent = {
        "source": SOURCE.format(what="messages", gpu=node.gpu, rows=len(messages)),
        "kind": "measured",
    }
    empty = {"kind": "assumed", "source": "no message of less than 1 MiB was measured"}
    return {
        "bandwidth": {**rate(node.bandwidth), "source": node.sheet, "kind": "data sheet"},
        "latency": {**us(10e-6), **empty},
        "efficiency": {**share(efficiency), **said},
        "features": [],
        "protocols": [
            {
                "name": "simple",
                "algorithms": ["ring", "tree"],
                "overhead": us(overhead),
                "latency": us(0.0),
                "efficiency": share(efficiency),
                "said": said,
            },
            {
                "name": "sends",
                "algorithms": ["peer to peer", "message"],
                "overhead": {**us(overhead), **empty},
                "latency": us(0.0),
                "efficiency": share(float(np.median(messages)) / node.bandwidth),
                "said": sent,
            },
        ],
        "residuals": {left_by("all_reduce", MIB): asdict(Residual.of(left[~held]))},
    }
