"""Operators profiled inside whole GPT layers, as tables of kernels.

Columns: gpu, folder, op, micro_batch, tp, algo, fwd_us, weights_MB, activations_MB (of 2^20 B,
elements of 2 B). Products are the MLP's two and the attention's last: [k, n] has the bytes of the
weights, [m, n] those of the activations. Left out are rows with a collective (the row-parallel ones
if tp > 1, and everything that algo 1 splits by rows), the projection of queries, keys and values
(timed with a copy), and the backward passes (their gradients differ from device to device). The
streaming operators are the fused GELU, which reads and writes its activations, and dropout, which
also writes a mask of bytes; from 64 MiB on.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from autopar.errors import UsageError

from .rows import FOLDS, Rows

FILE = "mist_ops.csv.gz"
MIB = 2**20
ELEMENT = 2
WIDE = "enc-MLP-GEMM-1"
NARROW = "enc-MLP-GEMM-2"
DENSE = "enc-attention-dense"
RATIO: Mapping[str, tuple[int, int]] = {WIDE: (4, 1), NARROW: (1, 4), DENSE: (1, 1)}
"""Columns and rows of the weights, as multiples of the hidden size."""
STREAMED: Mapping[str, float] = {"enc-MLP-gelu": 2.0, "enc-attention-dropout": 2.5 / 1.5}
"""Bytes that move, as a multiple of the activations that are kept."""
LEAST = 64 * MIB
"""Less than this may stay in a cache."""


def _lines(folder: Path, gpu: str) -> list[dict[str, str]]:
    path = folder / FILE
    if not path.exists():
        raise UsageError(f"{folder} has no table {FILE}")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [
            line
            for line in csv.DictReader(file)
            if line["gpu"] == gpu and float(line["fwd_us"]) > 0
        ]


def _pure(line: Mapping[str, str]) -> bool:
    """Whether a product's forward pass holds no collective."""
    return line["op"] in RATIO and (
        line["tp"] == "1" or (line["op"] == WIDE and line["algo"] == "0")
    )


def _sizes(line: Mapping[str, str]) -> tuple[int, int, int]:
    """m, n and k of a product."""
    weights = float(line["weights_MB"]) * MIB / ELEMENT
    tp = int(line["tp"])
    wide, narrow = RATIO[line["op"]]
    hidden = round((weights * tp / (wide * narrow)) ** 0.5)
    n = wide * hidden // tp
    return round(float(line["activations_MB"]) * MIB / ELEMENT / n), n, narrow * hidden


def products(folder: Path, gpu: str) -> Rows:
    """The products of a device in 16-bit floats, as rows of the tables of products."""
    table = []
    for line in _lines(folder, gpu):
        if _pure(line):
            m, n, k = _sizes(line)
            sizes = {
                "m": str(m),
                "n": str(n),
                "k": str(k),
                "seconds": repr(float(line["fwd_us"]) * 1e-6),
            }
            table.append({"framework": "torch", "dtype": "float16", "mode": "burst", **sizes})
    return _rows("gemm", table, [f"{row['m']}x{row['n']}x{row['k']}" for row in table])


def streams(folder: Path, gpu: str) -> Rows:
    """The streaming operators of a device; their column `bytes` is the moved bytes."""
    table = []
    for line in _lines(folder, gpu):
        moved = STREAMED.get(line["op"], 0.0) * float(line["activations_MB"]) * MIB
        if moved >= LEAST and line["algo"] == "0":
            table.append(
                {
                    "bytes": repr(moved),
                    "op": line["op"],
                    "seconds": repr(float(line["fwd_us"]) * 1e-6),
                }
            )
    return _rows("elementwise", table, [f"{row['op']} {row['bytes']}" for row in table])


def _rows(kind: str, table: list[dict[str, str]], shapes: list[str]) -> Rows:
    fold = np.array([zlib.crc32(shape.encode()) % FOLDS for shape in shapes], dtype=np.int64)
    return Rows(
        kind=kind,
        rows=tuple(table),
        seconds=np.array([float(row["seconds"]) for row in table]),
        fold=fold,
    )
