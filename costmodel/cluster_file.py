"""Cluster files and presets: JSON or YAML, checked by pydantic, with the unit and the source of every figure.

A figure is `{"value": 312, "unit": "TFLOP/s", "source": "..."}`, or a plain number in the base unit (FLOP/s, B/s, B, s).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from autopar.errors import ClusterError, unknown

from .backends import KINDS
from .cluster import Cluster, Device, Level
from .measured import Curve, Measured
from .protocols import Protocol

MAX_FILE_BYTES = 1 << 20
# Base unit of each kind of figure -> the units it may be written in, as multiples of the base unit.
UNITS: Mapping[str, Mapping[str, float]] = {
    "FLOP/s": {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "B/s": {"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GiB/s": 2.0**30, "Mbit/s": 1.25e5, "Gbit/s": 1.25e8},
    "B": {"B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "1": {"1": 1.0, "%": 0.01},
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Figure(_Model):
    value: float = Field(allow_inf_nan=False)
    unit: str | None = None
    source: str = ""


def _figure(given: object) -> object:
    """A plain number stands for a figure in the base unit."""
    return {"value": given} if isinstance(given, int | float | str) and not isinstance(given, bool) else given


Figure = Annotated[_Figure, BeforeValidator(_figure)]


class _DeviceFile(_Model):
    name: str
    peak: dict[str, Figure]
    matmul_fraction: Figure
    half_size: Figure
    memory_bandwidth: Figure
    memory_fraction: Figure
    memory_capacity: Figure
    launch: Figure
    reserved: Figure
    dispatch: Figure = _Figure(value=0.0)
    units: Figure = _Figure(value=0)
    ragged_fraction: Figure = _Figure(value=1.0)
    attention: dict[str, Figure] = {}


class _ProtocolFile(_Model):
    name: str
    algorithms: tuple[str, ...]
    overhead: Figure = _Figure(value=0.0)
    latency: Figure
    efficiency: Figure


class _LevelFile(_Model):
    name: str
    size: int
    latency: Figure
    bandwidth: Figure
    efficiency: Figure = _Figure(value=1.0)
    shared_by: int = 1
    duplex: bool = True
    peer_bandwidth: Figure | None = None
    features: tuple[str, ...] = ()
    copy_bandwidth: Figure | None = None
    protocols: tuple[_ProtocolFile, ...] = ()


class _MeasuredFile(_Model):
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


class _ClusterFile(_Model):
    version: Literal[1] = 1
    name: str
    backend: str = "nccl"
    shared_host: bool = False
    device: _DeviceFile
    levels: tuple[_LevelFile, ...]
    measured: tuple[_MeasuredFile, ...] = ()


_BASE_UNITS: Mapping[str, str] = {
    "peak": "FLOP/s",
    "memory_bandwidth": "B/s",
    "bandwidth": "B/s",
    "peer_bandwidth": "B/s",
    "copy_bandwidth": "B/s",
    "memory_capacity": "B",
    "reserved": "B",
    "launch": "s",
    "dispatch": "s",
    "latency": "s",
    "overhead": "s",
    "matmul_fraction": "1",
    "memory_fraction": "1",
    "efficiency": "1",
    "half_size": "1",
    "units": "1",
    "ragged_fraction": "1",
    "attention": "1",
}


def _number(figure: _Figure, base: str, where: str, sources: dict[str, str]) -> float:
    """The figure in its base unit; where it comes from is noted in `sources`."""
    if figure.source:
        sources[where] = figure.source
    unit = figure.unit or base
    if unit not in UNITS[base]:
        raise ClusterError(f"{where}: " + unknown("unit", unit, UNITS[base]))
    return figure.value * UNITS[base][unit]


def _numbers(model: _DeviceFile | _LevelFile | _ProtocolFile, owner: str, sources: dict[str, str]) -> dict[str, Any]:
    """The figures of `model` by field."""
    out: dict[str, Any] = {}
    for name, base in _BASE_UNITS.items():
        given = getattr(model, name, None)
        if isinstance(given, dict):
            out[name] = {key: _number(figure, base, f"{owner}.{name}.{key}", sources) for key, figure in given.items()}
        elif given is not None:
            out[name] = _number(given, base, f"{owner}.{name}", sources)
    return out


def _cluster(file: _ClusterFile) -> Cluster:
    sources: dict[str, str] = {}
    device = Device(name=file.device.name, **_numbers(file.device, "device", sources))
    levels = tuple(
        Level(
            name=level.name,
            size=level.size,
            shared_by=level.shared_by,
            duplex=level.duplex,
            features=level.features,
            protocols=tuple(
                Protocol(name=one.name, algorithms=one.algorithms, **_numbers(one, f"{level.name}.{one.name}", sources))
                for one in level.protocols
            ),
            **_numbers(level, level.name, sources),
        )
        for level in file.levels
    )
    measured = tuple(map(_measured, file.measured))
    return Cluster(
        name=file.name, device=device, levels=levels, backend=file.backend, shared_host=file.shared_host, sources=sources, measured=measured
    )  # fmt: skip


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


def _parse(text: str, where: str, *, as_yaml: bool) -> Cluster:
    try:
        data = yaml.safe_load(text) if as_yaml else json.loads(text)
        return _cluster(_ClusterFile.model_validate(data))
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in e['loc']) or 'file'}: {e['msg']}" for e in error.errors()]
        raise ClusterError(f"{where} is not a cluster file:\n" + "\n".join(lines)) from None
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ClusterError(f"{where} is not {'YAML' if as_yaml else 'JSON'}: {error}") from None


def presets() -> tuple[str, ...]:
    """Names of the clusters that come with autopar."""
    files = resources.files(__package__).joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


@functools.cache
def _preset(name: str) -> Cluster:
    text = resources.files(__package__).joinpath("presets", f"{name}.json").read_text(encoding="utf-8")
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
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise ClusterError(unknown("cluster", name, presets()) + " A file must end in .json, .yaml or .yml.")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ClusterError(f"{name} is larger than {MAX_FILE_BYTES} B; that is not a cluster file")
        text = raw.decode("utf-8")
    except OSError as error:
        raise ClusterError(f"the cluster file {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"the cluster file {name} is not UTF-8 text") from None
    return _parse(text, name, as_yaml=path.suffix.lower() != ".json")


def _dump_figures(cluster: Cluster, owner: str, part: Device | Level | Protocol) -> dict[str, object]:
    def figure(where: str, base: str, value: float) -> dict[str, object]:
        return {"value": value, "unit": base, **({"source": cluster.sources[where]} if where in cluster.sources else {})}

    out: dict[str, object] = {}
    for name, base in _BASE_UNITS.items():
        given = getattr(part, name, None)
        if isinstance(given, Mapping):
            out[name] = {key: figure(f"{owner}.{name}.{key}", base, value) for key, value in given.items()}
        elif given is not None:
            out[name] = figure(f"{owner}.{name}", base, given)
    return out


def _dump_protocol(cluster: Cluster, level: Level, protocol: Protocol) -> dict[str, object]:
    figures = _dump_figures(cluster, f"{level.name}.{protocol.name}", protocol)
    return {"name": protocol.name, "algorithms": list(protocol.algorithms), **figures}


def dump(cluster: Cluster) -> str:
    """The text of a cluster file (JSON, base units) from which `load_cluster` makes an equal cluster."""
    levels = [
        {
            "name": level.name,
            "size": level.size,
            "shared_by": level.shared_by,
            "duplex": level.duplex,
            "features": list(level.features),
            **_dump_figures(cluster, level.name, level),
            **({"protocols": [_dump_protocol(cluster, level, one) for one in level.protocols]} if level.protocols else {}),
        }
        for level in cluster.levels
    ]
    data = {
        "version": 1,
        "name": cluster.name,
        "backend": cluster.backend,
        "shared_host": cluster.shared_host,
        "device": {"name": cluster.device.name, **_dump_figures(cluster, "device", cluster.device)},
        "levels": levels,
        **({"measured": [_dump_measured(entry) for entry in cluster.measured]} if cluster.measured else {}),
    }
    return json.dumps(data, indent=2) + "\n"
