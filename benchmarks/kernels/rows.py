"""Rows of measured kernels from a folder of tables, with those that are held back.

Rows with a `trap` are left out.

The shapes are in four folds, by the checksum of their text ("128x64x1536") modulo four; fold 0 is
held back.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.device.attention import Scores
from autopar.costmodel.device.grouped_products import ROWS, Dealt, Layer
from autopar.costmodel.device.products import Product
from autopar.errors import UsageError

Floats = NDArray[np.float64]
Row = Mapping[str, str]

KINDS = ("gemm", "attention", "moe")
FOLDS = 4
DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8",
    "fp8_static": "float8",
    "fp8_block": "float8_block",
    "nvfp4": "float4",
}
"""Dtype of a row -> dtype of its arithmetic."""
SHAPES = {
    "gemm": ("m", "n", "k"),
    "attention": ("causal", "batch", "seq", "q_heads", "kv_heads", "head_dim", "window"),
    "moe": ("tokens", "hidden", "inter", "experts", "topk", "tp", "ep"),
}
SAMPLES = 24
"""Draws of an uneven routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one kind: the table's own, their measured seconds, and the folds of their shapes."""

    kind: str
    rows: tuple[Row, ...]
    seconds: Floats
    fold: NDArray[np.int64]

    @property
    def held(self) -> NDArray[np.bool_]:
        """Whether each row is held back."""
        return self.fold == 0

    def leaving(self, fold: int) -> Rows:
        """The same rows, with this fold held back in place of fold 0."""
        return replace(self, fold=(self.fold - fold) % FOLDS)

    def part(self, chosen: Sequence[bool] | NDArray[np.bool_]) -> Rows:
        """The chosen rows."""
        mask = np.asarray(chosen, dtype=bool)
        rows = tuple(row for row, kept in zip(self.rows, mask, strict=True) if kept)
        return Rows(kind=self.kind, rows=rows, seconds=self.seconds[mask], fold=self.fold[mask])

    def numbers(self, column: str) -> Floats:
        """A column of numbers; an empty cell is 0."""
        return np.array([float(row[column] or 0) for row in self.rows])

    def equal(self, column: str, *values: str) -> NDArray[np.bool_]:
        """Whether each row has one of the values."""
        return np.array([row[column] in values for row in self.rows], dtype=bool)


def devices_in(folder: Path, kind: str) -> tuple[str, ...]:
    """The devices with a table of a kind of kernels."""
    names = (
        path.name.removesuffix(".gz").removesuffix(".csv") for path in folder.glob(f"{kind}_*.csv*")
    )
    return tuple(
        sorted({name.removeprefix(f"{kind}_") for name in names if not name.startswith("moe_a2a")})
    )


def read(folder: Path, kind: str, device: str) -> Rows:
    """The rows of a device without a trap."""
    path = folder / f"{kind}_{device}.csv.gz"
    if not path.exists():
        raise UsageError(
            f"{folder} has no table {path.name}; it has those of "
            f"{', '.join(devices_in(folder, kind)) or 'none'}"
        )
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = tuple(row for row in csv.DictReader(file) if not row["trap"] and _fits(kind, row))
    shapes = ["x".join(row[column] for column in SHAPES[kind]) for row in rows]
    fold = np.array([zlib.crc32(shape.encode()) % FOLDS for shape in shapes], dtype=np.int64)
    return Rows(
        kind=kind, rows=rows, seconds=np.array([float(row["seconds"]) for row in rows]), fold=fold
    )


def _fits(kind: str, row: Row) -> bool:
    """Attention must have 16-bit queries and keys.

    The tables do not tell the arithmetic of a narrower cache.
    """
    return kind != "attention" or (
        row["dtype"] == "bfloat16" and row["kv_cache_dtype"] in ("bfloat16", "")
    )


def product_of(rows: Rows) -> Product:
    """The products of a table."""
    return Product(
        batch=np.ones(len(rows.rows)), m=rows.numbers("m"), n=rows.numbers("n"), k=rows.numbers("k")
    )


def scores_of(rows: Rows) -> Scores:
    """The attention of a table."""
    sequence = rows.numbers("seq")
    return Scores(
        batch=rows.numbers("batch"),
        heads=rows.numbers("q_heads"),
        kv_heads=rows.numbers("kv_heads"),
        queries=sequence,
        keys=sequence,
        width=rows.numbers("head_dim"),
        window=rows.numbers("window"),
        causal=rows.equal("causal", "1"),
    )


def layer_of(rows: Rows) -> Layer:
    """The layers of experts of a table; uneven rows are drawn as the tables' authors draw them."""
    tokens, experts, topk, ep = (rows.numbers(name) for name in ("tokens", "experts", "topk", "ep"))
    dealt = np.array(
        [
            _dealt(*sizes, row["distribution"])
            for *sizes, row in zip(tokens, experts, topk, ep, rows.rows, strict=True)
        ]
    ).T
    gated = np.array(["nongated" not in row["kernel"] for row in rows.rows], dtype=bool)
    return Layer(
        dealt=Dealt(rows=dealt[0], active=dealt[1], tiles=dealt[2:]),
        tokens=tokens,
        experts=experts / ep,
        width=rows.numbers("hidden"),
        inner=rows.numbers("inter") / rows.numbers("tp"),
        gated=gated,
        others=tokens * topk - dealt[0],
        even=rows.equal("distribution", "balanced"),
    )


def _dealt(
    tokens: float, experts: float, topk: float, ep: float, distribution: str
) -> Sequence[float]:
    """Rows, experts with rows, and tiles of the busiest rank.

    Loads follow x^-a for x from 1 to 0.8 of the tokens.
    """
    if distribution == "balanced":
        even = Dealt.evenly(np.array([tokens * topk / ep]), np.array([experts / ep]))
        return [float(even.rows[0]), float(even.active[0]), *even.tiles[:, 0].tolist()]
    power = 1 - float(distribution.rpartition("_")[2])
    key = f"{tokens:g} {experts:g} {topk:g} {ep:g} {distribution}"
    drawn = np.random.default_rng(zlib.crc32(key.encode())).random((SAMPLES, int(experts)))
    low, high = (1.0, 0.8 * tokens) if tokens * topk > experts else (0.01, 2.0)
    loads = ((high**power - low**power) * drawn + low**power) ** (1 / power)
    loads = np.round(loads / loads.sum(axis=1, keepdims=True) * tokens * topk).reshape(
        SAMPLES, int(ep), -1
    )
    most = loads[np.arange(SAMPLES), loads.sum(axis=2).argmax(axis=1)]
    tiles = [float(np.ceil(most / rows).sum(axis=1).mean()) for rows in ROWS[:, 0]]
    return [float(most.sum(axis=1).mean()), float((most > 0).sum(axis=1).mean()), *tiles]
