"""The files of published measurements.

Recognised by their columns, checked row by row, and brought to one form.

A file with the columns of a grid (`gpus, global_batch, ..., step_time_s` and no framework) becomes
rows of a file of training steps.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from autopar.errors import UsageError

from .columns import unnamed

Row = Mapping[str, str]

COLUMNS: Mapping[str, frozenset[str]] = {
    "steps": frozenset(
        (
            "id",
            "group",
            "framework",
            "model",
            "arch",
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "ffn",
            "gated_mlp",
            "vocab",
            "seq_len",
            "gpu",
            "gpus",
            "network",
            "tp",
            "pp",
            "dp",
            "cp",
            "zero_stage",
            "seq_parallel",
            "recompute",
            "attn_impl",
            "micro_batch",
            "global_batch",
            "interleave",
            "precision",
            "step_time_s",
            "step_time_derived_s",
            "peak_mem_gib",
            "outcome",
            "notes",
        )
    ),
    "grid": frozenset(
        (
            "gpus",
            "global_batch",
            "micro_batch",
            "hidden",
            "heads",
            "layers",
            "seq_len",
            "tp",
            "dp",
            "pp",
            "step_time_s",
        )
    ),
    "golden": frozenset(
        (
            "case",
            "family",
            "gpus_inferred",
            "deterministic",
            "iter_time_s",
            "mem_max_allocated_bytes",
            "trap",
        )
    ),
    "simumax": frozenset(
        ("case", "real_step_s", "real_alloc_gib_max_rank", "pred_step_s", "cp_comm", "ce_fusion")
    ),
    "mist": frozenset(
        (
            "grad_accum",
            "layer_partitions",
            "device_assignment_dp_tp",
            "recomputed_layers_per_stage",
            "flash_attn",
            "step_s",
        )
    ),
    "aceso": frozenset(
        ("system", "stages", "micro_batch", "global_batch", "step_s", "pred_step_s", "source_dir")
    ),
    "stages": frozenset(
        ("gpu", "system", "run", "stage", "rank", "fwd_ms", "bwd_ms", "max_allocated_MB")
    ),
    "sailor": frozenset(
        (
            "cluster",
            "gpu_types",
            "heterogeneous",
            "stages",
            "step_s",
            "peak_mem_bytes",
            "grad_reduce_s",
        )
    ),
    "sailor layers": frozenset(
        ("entries", "layer_fwd_s", "layer_bwd_s", "embed_fwd_s", "head_fwd_s")
    ),
    "experts": frozenset(
        ("case", "dispatcher", "router", "forward_s", "backward_s", "shared_expert_ffn")
    ),
    "layers": frozenset(("what", "gpu", "setting", "forward_ms", "backward_ms", "combined_ms")),
    "collectives": frozenset(
        (
            "collective",
            "machine",
            "gpus",
            "nodes",
            "size_bytes",
            "busbw_GBps",
            "algbw_GBps",
            "time_us",
        )
    ),
    "memory": frozenset(("kind", "model", "config", "gpu", "component", "value", "unit")),
}
"""Columns that identify a file's kind; the first kind with all its columns present counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one file.

    `kind` is a key of COLUMNS, `name` the file's name without its ending.
    """

    kind: str
    name: str
    path: Path
    rows: tuple[Row, ...]


class Run(BaseModel):
    """The scored fields of one published training run; empty cells are absent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = ""
    group: str = Field(min_length=1)
    framework: str = ""
    model: str = ""
    gpu: str = ""
    gpus: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    vocab: PositiveInt | None = None
    gated_mlp: bool = False
    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    interleave: PositiveInt | None = None
    recompute: str = ""
    attn_impl: str = ""
    step_time_s: PositiveFloat | None = None
    step_time_derived_s: PositiveFloat | None = None
    tflops_per_gpu: PositiveFloat | None = None
    tflops_kind: str = ""
    peak_mem_gib: PositiveFloat | None = None
    outcome: str = ""

    @property
    def seconds(self) -> float | None:
        """The measured step, or the one derived from the printed throughput."""
        return self.step_time_s or self.step_time_derived_s

    @property
    def sweep(self) -> tuple[Any, ...]:
        """The common key of configurations among which a user would choose."""
        shape = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        return (self.model, *shape, self.seq_len, self.gpu, self.gpus, self.global_batch)


def read_tables(folder: Path) -> tuple[list[Table], list[str]]:
    """Every recognised CSV file of a folder by name, and the names of what is not read.

    That are other files, and columns that nobody named (`columns.py`).
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder of CSV files")
    tables = []
    others = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = frozenset(reader.fieldnames or ())
            kind = next((kind for kind, needed in COLUMNS.items() if needed <= columns), None)
            if kind is None:
                others.append(path.name)
                continue
            if extra := unnamed(kind, columns):
                others.append(f"{', '.join(extra)} of {path.name}")
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    raise UsageError(
                        f"{path.name}, line {reader.line_num}: as many cells as columns are needed"
                    )
                rows.append(row)
        tables.append(Table(kind=kind, name=path.stem, path=path, rows=tuple(rows)))
    if not tables:
        kinds = "; ".join(
            f"{kind}: {', '.join(sorted(columns))}" for kind, columns in COLUMNS.items()
        )
        raise UsageError(f"{folder} holds no CSV file with the columns of a known kind ({kinds})")
    return tables, others


def training_rows(tables: Sequence[Table]) -> list[tuple[Row, Run]]:
    """All training runs, those of grids included."""
    rows: list[tuple[Row, Run]] = []
    for table in tables:
        if table.kind not in ("steps", "grid"):
            continue
        for number, row in enumerate(table.rows):
            full = row if table.kind == "steps" else grid_row(row, table.name, number)
            rows.append((full, checked(full, table.path, number)))
    return rows


def checked(row: Row, path: Path, number: int) -> Run:
    """The row's figures, or an error that names the file, the row and the column."""
    given = {name: cell for name, cell in row.items() if cell != "" and name in Run.model_fields}
    try:
        return Run.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        column = ".".join(map(str, first["loc"])) or "row"
        cell = row.get(column, "")
        raise UsageError(
            f"{path.name}, row {number + 1}, column {column}: {first['msg']} (given {cell!r})"
        ) from error


GRID: Mapping[str, str] = {
    "framework": "vTrain",
    "arch": "gpt",
    "gated_mlp": "0",
    "vocab": "51200",
    "gpu": "A100-SXM4-80GB",
    "gpu_mem_gb": "80",
    "gpus_per_node": "8",
    "network": "4x200Gb/node",
    "cp": "1",
    "ep": "1",
    "experts": "0",
    "zero_stage": "0",
    "seq_parallel": "0",
    "recompute": "full",
    "attn_impl": "unfused",
    "interleave": "1",
    "precision": "fp16",
    "outcome": "ok",
}
"""The common values of a grid's rows.

VTrain's validation runs (VIA-Research/vTrain@f8dda847, config/validation).
"""


def grid_row(row: Row, group: str, number: int) -> Row:
    """A row of a grid as a row of training steps; missing sizes have GPT's usual proportions."""
    own = {
        "id": f"{group}-{number + 1:03}",
        "group": group,
        "model": f"GPT h{row['hidden']} L{row['layers']}",
    }
    return {**dict.fromkeys(sorted(COLUMNS["steps"]), ""), **GRID, **row, **own}


def thinned(rows: Sequence[tuple[Row, Run]], most: int) -> list[tuple[Row, Run]]:
    """At most that many rows of each group, evenly spaced."""
    groups: dict[str, list[tuple[Row, Run]]] = {}
    for row, run in rows:
        groups.setdefault(run.group, []).append((row, run))
    kept = []
    for members in groups.values():
        count = min(most, len(members))
        kept += [members[index * len(members) // count] for index in range(count)]
    return kept
