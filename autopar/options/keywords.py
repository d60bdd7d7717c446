"""The keywords of `autopar.plan` with their types, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.model.progress import Progress
from autopar.sharding.mesh import Mesh


class PlanKeywords(TypedDict, total=False):
    """The options of `autopar.plan`, in the order of its signature.

    `table.py` says what each of them is.
    """

    devices: int | None
    cluster: str | Path | Cluster | None
    target: str | None
    mode: str
    batch: int | None
    dims: Mapping[str, int] | None
    shapes: Mapping[str, tuple[int, ...]] | None
    values: Mapping[str, float | Sequence[float]] | None
    outputs: Sequence[str]
    dtype: str | None
    precision: str | None
    master: str | None
    reduce: str | None
    trust: bool
    proof: bool | None
    frozen: Sequence[str]
    trained: Sequence[str]
    optimizer: str
    memory: float | str | None
    loss: str | Callable[..., Any] | None
    search: str
    gap: float | str | None
    seconds: float | None
    routing: str | Path
    mesh: Mesh | Sequence[int] | None
    scheme: str | None
    stages: int | None
    micro_batches: int | None
    recompute: str | None
    zero: int | None
    offload: str | None
    schedule: str | None
    interleave: int | None
    overlap_experts: str | None
    pins: Sequence[str] | Pins
    load: str | Path | Plan | None
    reuse_from: str | Path | Plan | None
    discover: bool
    replicate_unknown: bool
    compress: Mapping[str, str] | float | None
    progress: Progress | None
