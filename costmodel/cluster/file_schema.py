"""The parts of a cluster file, as pydantic checks them: clusters, devices, levels and pools."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .figures import Figure, FigureFile, Model, SaidFile


class KernelsFile(Model):
    """Kernels of a measured device, by its name."""

    name: str
    source: str = ""


class DeviceFile(Model):
    name: str
    peak: dict[str, Figure]
    kernels: str | KernelsFile | dict[str, Any] | None = None
    matmul_fraction: Figure | None = None
    half_size: Figure | None = None
    memory_bandwidth: Figure
    memory_fraction: Figure
    memory_capacity: Figure
    launch: Figure
    reserved: Figure
    dispatch: Figure = FigureFile(value=0.0)
    units: Figure = FigureFile(value=0)
    ragged_fraction: Figure = FigureFile(value=1.0)
    clock: Figure = FigureFile(value=1.0)
    update_fraction: Figure | None = None
    host: dict[str, Figure] = Field(default_factory=dict)
    attention: dict[str, Figure] = Field(default_factory=dict)
    host_bandwidth: Figure | None = None
    host_memory: Figure | None = None


class ProtocolFile(Model):
    name: str
    algorithms: tuple[str, ...]
    collectives: tuple[str, ...] = ()
    overhead: Figure = FigureFile(value=0.0)
    latency: Figure
    efficiency: Figure
    copy_bandwidth: Figure | None = None
    said: SaidFile | None = None


class WiringFile(Model):
    torus: tuple[int, ...] = ()
    joined: tuple[tuple[int, int], ...] = ()


class ResidualFile(Model):
    low: float
    middle: float
    high: float
    rows: int


class LinksFile(Model):
    name: str
    latency: Figure
    bandwidth: Figure
    efficiency: Figure = FigureFile(value=1.0)
    shared_by: int = 1
    duplex: bool = True
    peer_bandwidth: Figure | None = None
    features: tuple[str, ...] = ()
    oversubscription: Figure = FigureFile(value=1.0)
    wiring: WiringFile | None = None
    protocols: tuple[ProtocolFile, ...] = ()
    residuals: dict[str, ResidualFile] = Field(default_factory=dict)


class LevelFile(LinksFile):
    size: int
    slots: int = 0


class BetweenFile(LinksFile):
    name: str = "between"


class MeasuredFile(Model):
    """A `Measured`; in base units, and without `limit` where it is one line."""

    kind: str
    level: str
    group: int
    drivers: int = 1
    seconds: float
    seconds_per_byte: float
    limit: float | None = None
    seconds_per_byte_above: float = 0.0
    residual: float = 0.0
    spread: float = 0.0


class ClusterFile(Model):
    version: Literal[1] = 1
    name: str
    backend: str = "nccl"
    shared_host: bool = False
    cores: float | None = Field(default=None, gt=0)
    device: DeviceFile
    levels: tuple[LevelFile, ...]
    measured: tuple[MeasuredFile, ...] = ()


class PoolFile(Model):
    cluster: str | dict[str, Any]
    devices: int | None = None


class PoolsFile(Model):
    version: Literal[1] = 1
    name: str
    pools: tuple[PoolFile, ...] = Field(min_length=2)
    between: BetweenFile
