"""Cluster files and presets: JSON or YAML, checked by pydantic, with the unit and the source of every figure.

A file describes devices and levels, or joins pools of devices:

    {"name": "mixed", "pools": [{"cluster": "dgx-a100", "devices": 16}, ...], "between": {"latency": ..., ...}}

`cluster` is a preset, a file of the same folder, or the contents of a file.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from autopar.errors import ClusterError, unknown
from autopar.limits import CLUSTER_BYTES

from ..device import Device
from ..device.kernels import dumped, kernels_from, kernels_of, measured
from .constants import Figure, FigureFile, Model, SaidFile, dump_figures, numbers
from .level import Level
from .links import with_links
from .measured import Curve, Measured
from .model import Cluster, join
from .protocols import KINDS, Protocol
from .residual import Residual
from .source import Source
from .wiring import Wiring

SUFFIXES = (".json", ".yaml", ".yml")


class _KernelsFile(Model):
    """Kernels of a measured device, by its name."""

    name: str
    source: str = ""


class _DeviceFile(Model):
    name: str
    peak: dict[str, Figure]
    kernels: str | _KernelsFile | dict[str, Any] | None = None
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
    update_fraction: Figure | None = None
    attention: dict[str, Figure] = Field(default_factory=dict)
    host_bandwidth: Figure | None = None
    host_memory: Figure | None = None


class _ProtocolFile(Model):
    name: str
    algorithms: tuple[str, ...]
    collectives: tuple[str, ...] = ()
    overhead: Figure = FigureFile(value=0.0)
    latency: Figure
    efficiency: Figure
    copy_bandwidth: Figure | None = None
    said: SaidFile | None = None


class _WiringFile(Model):
    torus: tuple[int, ...] = ()
    joined: tuple[tuple[int, int], ...] = ()


class _ResidualFile(Model):
    low: float
    middle: float
    high: float
    rows: int


class _LinksFile(Model):
    name: str
    latency: Figure
    bandwidth: Figure
    efficiency: Figure = FigureFile(value=1.0)
    shared_by: int = 1
    duplex: bool = True
    peer_bandwidth: Figure | None = None
    features: tuple[str, ...] = ()
    oversubscription: Figure = FigureFile(value=1.0)
    wiring: _WiringFile | None = None
    protocols: tuple[_ProtocolFile, ...] = ()
    residuals: dict[str, _ResidualFile] = Field(default_factory=dict)


class _LevelFile(_LinksFile):
    size: int
    slots: int = 0


class _BetweenFile(_LinksFile):
    name: str = "between"


class _MeasuredFile(Model):
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


class _ClusterFile(Model):
    version: Literal[1] = 1
    name: str
    backend: str = "nccl"
    shared_host: bool = False
    cores: float | None = Field(default=None, gt=0)
    device: _DeviceFile
    levels: tuple[_LevelFile, ...]
    measured: tuple[_MeasuredFile, ...] = ()


class _PoolFile(Model):
    cluster: str | dict[str, Any]
    devices: int | None = None


class _PoolsFile(Model):
    version: Literal[1] = 1
    name: str
    pools: tuple[_PoolFile, ...] = Field(min_length=2)
    between: _BetweenFile


def _level(file: _LinksFile, sources: dict[str, Source]) -> Level:
    size, slots = (file.size, file.slots) if isinstance(file, _LevelFile) else (1, 0)
    wiring = None if file.wiring is None else Wiring(torus=file.wiring.torus, joined=file.wiring.joined)
    protocols = tuple(_protocol(file.name, one, sources) for one in file.protocols)
    return Level(
        name=file.name, size=size, slots=slots, shared_by=file.shared_by, duplex=file.duplex, features=file.features, protocols=protocols,
        wiring=wiring, residuals={name: Residual(**left.model_dump()) for name, left in file.residuals.items()},
        **numbers(file, file.name, sources),
    )  # fmt: skip


def _protocol(level: str, file: _ProtocolFile, sources: dict[str, Source]) -> Protocol:
    key = ".".join((level, file.name, *file.collectives[:1]))
    figures = numbers(file, key, sources, file.said)
    return Protocol(name=file.name, algorithms=file.algorithms, collectives=file.collectives, **figures)


def _cluster(file: _ClusterFile) -> Cluster:
    sources: dict[str, Source] = {}
    device = _device(file.device, sources)
    levels = tuple(_level(level, sources) for level in file.levels)
    measured = tuple(map(_measured, file.measured))
    return Cluster(
        name=file.name, device=device, levels=levels, backend=file.backend, shared_host=file.shared_host, cores=file.cores,
        sources=sources, measured=measured,
    )  # fmt: skip


def _device(file: _DeviceFile, sources: dict[str, Source]) -> Device:
    """A device with the named measured kernels, or with given ones; without kernels it needs fractions of its peak."""
    absent = [name for name in ("matmul_fraction", "half_size") if getattr(file, name) is None]
    if file.kernels is None and absent:
        raise ClusterError(f"device.{absent[0]}: Field required where no kernels are given; {', '.join(measured())} were measured")
    kernels = _KernelsFile(name=file.kernels) if isinstance(file.kernels, str) else file.kernels
    if isinstance(kernels, _KernelsFile) and kernels.source:
        sources["device.kernels"] = Source.of(kernels.source)
    found = kernels_of(kernels.name) if isinstance(kernels, _KernelsFile) else kernels_from(kernels, "device.kernels") if kernels else None
    return Device(name=file.name, kernels=found, **numbers(file, "device", sources))


def _measured(entry: _MeasuredFile) -> Measured:
    if entry.kind not in KINDS:
        raise ClusterError(unknown("collective", entry.kind, KINDS))
    limit = math.inf if entry.limit is None else entry.limit
    curve = Curve(alpha=entry.seconds, beta=entry.seconds_per_byte, limit=limit, beta_above=entry.seconds_per_byte_above)
    return Measured(
        kind=entry.kind, level=entry.level, group=entry.group, curve=curve, drivers=entry.drivers, residual=entry.residual,
        spread=entry.spread,
    )  # fmt: skip


def _dump_measured(entry: Measured) -> dict[str, object]:
    curve = entry.curve
    above = {"limit": curve.limit, "seconds_per_byte_above": curve.beta_above} if curve.limit < math.inf else {}
    return {
        "kind": entry.kind, "level": entry.level, "group": entry.group, "drivers": entry.drivers, "seconds": curve.alpha,
        "seconds_per_byte": curve.beta, **above, "residual": entry.residual, "spread": entry.spread,
    }  # fmt: skip


def _pool(file: _PoolFile, where: str, folder: Path | None) -> Cluster:
    if isinstance(file.cluster, dict):
        cluster = _made(file.cluster, f"{where}.cluster", None)
    elif file.cluster in presets():
        cluster = _preset(file.cluster)
    elif folder is None or Path(file.cluster).suffix.lower() not in SUFFIXES:
        raise ClusterError(f"{where}.cluster: " + unknown("cluster", file.cluster, presets()))
    else:
        path = folder / file.cluster
        if path.resolve().parent != folder.resolve():
            raise ClusterError(f"{where}.cluster: {file.cluster!r} is not a file of the same folder")
        cluster = _read(path, None)
    return cluster if file.devices is None else cluster.sized(file.devices)


def _made(data: object, where: str, folder: Path | None) -> Cluster:
    """The cluster in the contents of a file; a pool (no `folder`) cannot have pools of its own."""
    try:
        if not (isinstance(data, dict) and "pools" in data and folder is not None):
            return _cluster(_ClusterFile.model_validate(with_links(data) if isinstance(data, dict) else data))
        file, sources = _PoolsFile.model_validate(data), dict[str, Source]()
        between = _level(file.between, sources)
        return join(file.name, [_pool(pool, f"pools.{i}", folder) for i, pool in enumerate(file.pools)], between=between, sources=sources)
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in e['loc']) or 'file'}: {e['msg']}" for e in error.errors()]
        raise ClusterError(f"{where} is not a cluster file:\n" + "\n".join(lines)) from None
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _from_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _parse(text: str, where: str, *, as_yaml: bool, folder: Path | None = None) -> Cluster:
    try:
        data = _from_yaml(text) if as_yaml else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{where} is not {'YAML' if as_yaml else 'JSON'}: {error}") from None
    return _made(data, where, folder)


def presets() -> tuple[str, ...]:
    """Names of the clusters that come with autopar."""
    files = resources.files("autopar.costmodel").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


@functools.cache
def _preset(name: str) -> Cluster:
    text = resources.files("autopar.costmodel").joinpath("presets", f"{name}.json").read_text(encoding="utf-8")
    return _parse(text, f"preset {name}", as_yaml=False)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The preset of that name, or the cluster of a JSON or YAML file.

    >>> load_cluster("dgx-h100").sized(1024).units
    (8, 1024)
    """
    name = str(name_or_path)
    if name in presets():
        return _preset(name)
    path = Path(name_or_path)
    if path.suffix.lower() not in SUFFIXES:
        raise ClusterError(unknown("cluster", name, presets()) + " A file must end in .json, .yaml or .yml.")
    return _read(path, path.parent)


def _read(path: Path, folder: Path | None) -> Cluster:
    try:
        with path.open("rb") as file:
            raw = file.read(CLUSTER_BYTES + 1)
        if len(raw) > CLUSTER_BYTES:
            raise ClusterError(f"{path} is larger than {CLUSTER_BYTES} B; that is not a cluster file")
        text = raw.decode("utf-8")
    except OSError as error:
        raise ClusterError(f"the cluster file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"the cluster file {path} is not UTF-8 text") from None
    return _parse(text, str(path), as_yaml=path.suffix.lower() != ".json", folder=folder)


def _dump_protocol(cluster: Cluster, level: Level, protocol: Protocol) -> dict[str, object]:
    figures = dump_figures(cluster.sources, f"{level.name}.{protocol.key}", protocol)
    named = {"collectives": list(protocol.collectives)} if protocol.collectives else {}
    return {"name": protocol.name, "algorithms": list(protocol.algorithms), **named, **figures}


def _dump_level(cluster: Cluster, level: Level) -> dict[str, object]:
    return {
        "name": level.name,
        "shared_by": level.shared_by,
        "duplex": level.duplex,
        "features": list(level.features),
        **({"wiring": level.wiring.as_file()} if level.wiring is not None else {}),
        **dump_figures(cluster.sources, level.name, level),
        **({"protocols": [_dump_protocol(cluster, level, one) for one in level.protocols]} if level.protocols else {}),
        **({"residuals": {name: asdict(left) for name, left in level.residuals.items()}} if level.residuals else {}),
    }


def _dump_device(cluster: Cluster) -> dict[str, object]:
    device = cluster.device
    figures = dump_figures(cluster.sources, "device", device)
    if device.kernels is None:
        return figures
    kernels = device.kernels
    known = kernels.name in measured() and kernels_of(kernels.name) == kernels
    named = {"name": kernels.name, **({"source": said.text} if (said := cluster.sources.get("device.kernels")) else {})}
    return {**figures, "kernels": named if known else dumped(kernels)}


def _dumped(cluster: Cluster) -> dict[str, object]:
    if cluster.joined:
        pools = [{"cluster": _dumped(pool)} for pool in cluster.joined]
        return {"version": 1, "name": cluster.name, "pools": pools, "between": _dump_level(cluster, cluster.levels[-1])}
    return {
        "version": 1,
        "name": cluster.name,
        "backend": cluster.backend,
        "shared_host": cluster.shared_host,
        **({} if cluster.cores is None else {"cores": cluster.cores}),
        "device": {"name": cluster.device.name, **_dump_device(cluster)},
        "levels": [{"size": level.size, "slots": level.slots, **_dump_level(cluster, level)} for level in cluster.levels],
        **({"measured": [_dump_measured(entry) for entry in cluster.measured]} if cluster.measured else {}),
    }


def dump(cluster: Cluster) -> str:
    """The text of a cluster file (JSON, base units) from which `load_cluster` makes an equal cluster."""
    return json.dumps(_dumped(cluster), indent=2) + "\n"
