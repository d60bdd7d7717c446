"""Cluster files and presets: JSON or YAML, checked by pydantic, each figure with unit and source.

A file describes devices and levels, or joins pools of devices:

    {"name": "mixed",
     "pools": [{"cluster": "dgx-a100", "devices": 16}, ...],
     "between": {"latency": ..., ...}}

`cluster` is a preset, a file of the same folder, or the contents of a file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autopar.costmodel.device import Device
from autopar.costmodel.device.measured_kernels import (
    SHEET,
    Kernels,
    kernels_from,
    kernels_of,
    measured,
    sheet_kernels,
)
from autopar.errors import ClusterError, unknown
from autopar.file_limits import CLUSTER_BYTES
from autopar.reading import read_text

from .cluster import Cluster, join
from .figures import numbers
from .file_schema import (
    ClusterFile,
    DeviceFile,
    KernelsFile,
    LevelFile,
    LinksFile,
    MeasuredFile,
    PoolFile,
    PoolsFile,
    ProtocolFile,
)
from .level import Level
from .link_presets import with_links
from .measured_collectives import Curve, Measured
from .protocols import KINDS, Protocol
from .residual import Residual
from .source import Source
from .wiring import Wiring

SUFFIXES = (".json", ".yaml", ".yml")


def _level(file: LinksFile, sources: dict[str, Source]) -> Level:
    # The links between pools have no size of their own: it is that of the cluster.
    size, slots = (file.size, file.slots) if isinstance(file, LevelFile) else (1, 0)
    wiring = (
        None if file.wiring is None else Wiring(torus=file.wiring.torus, joined=file.wiring.joined)
    )
    protocols = tuple(_protocol(file.name, one, sources) for one in file.protocols)
    return Level(
        name=file.name,
        size=size,
        slots=slots,
        shared_by=file.shared_by,
        duplex=file.duplex,
        features=file.features,
        protocols=protocols,
        wiring=wiring,
        residuals={name: Residual(**left.model_dump()) for name, left in file.residuals.items()},
        **numbers(file, file.name, sources),
    )


def _protocol(level: str, file: ProtocolFile, sources: dict[str, Source]) -> Protocol:
    # Protocols of one name are told apart by their first collective.
    key = ".".join((level, file.name, *file.collectives[:1]))
    figures = numbers(file, key, sources, file.said)
    return Protocol(
        name=file.name, algorithms=file.algorithms, collectives=file.collectives, **figures
    )


def _cluster(file: ClusterFile) -> Cluster:
    sources: dict[str, Source] = {}
    device = _device(file.device, sources)
    levels = tuple(_level(level, sources) for level in file.levels)
    measured = tuple(map(_measured, file.measured))
    return Cluster(
        name=file.name,
        device=device,
        levels=levels,
        backend=file.backend,
        shared_host=file.shared_host,
        cores=file.cores,
        sources=sources,
        measured=measured,
    )


def _device(file: DeviceFile, sources: dict[str, Source]) -> Device:
    """Return a device with the named measured kernels, or with those in the file.

    Without kernels it needs fractions of its peak.
    """
    absent = [name for name in ("matmul_fraction", "half_size") if getattr(file, name) is None]
    if file.kernels is None and absent:
        raise ClusterError(
            f"device.{absent[0]}: Field required where no kernels are given; "
            f"{', '.join(measured())} were measured"
        )
    kernels = KernelsFile(name=file.kernels) if isinstance(file.kernels, str) else file.kernels
    if isinstance(kernels, KernelsFile) and kernels.source:
        sources["device.kernels"] = Source.of(kernels.source)
    figures = numbers(file, "device", sources)
    form = None
    if isinstance(kernels, KernelsFile) and kernels.name == SHEET:
        form = _by_data_sheet(file.name, figures)
    elif isinstance(kernels, KernelsFile):
        form = kernels_of(kernels.name)
    elif kernels:
        form = kernels_from(kernels, "device.kernels")
    return Device(name=file.name, kernels=form, **figures)


def _by_data_sheet(name: str, figures: Mapping[str, Any]) -> Kernels:
    """The kernels of a device that nobody measured, scaled by the figures of its data sheet."""
    if not figures["units"]:
        raise ClusterError(
            f"device {name!r}: kernels by {SHEET} need units, the processors that compute the "
            "tiles of a matrix product"
        )
    return sheet_kernels(
        peak=figures["peak"], memory=figures["memory_bandwidth"], units=figures["units"]
    )


def _measured(entry: MeasuredFile) -> Measured:
    if entry.kind not in KINDS:
        raise ClusterError(unknown("collective", entry.kind, KINDS))
    limit = math.inf if entry.limit is None else entry.limit
    curve = Curve(
        alpha=entry.seconds,
        beta=entry.seconds_per_byte,
        limit=limit,
        beta_above=entry.seconds_per_byte_above,
    )
    return Measured(
        kind=entry.kind,
        level=entry.level,
        group=entry.group,
        curve=curve,
        drivers=entry.drivers,
        residual=entry.residual,
        spread=entry.spread,
    )


def _pool(file: PoolFile, where: str, folder: Path | None) -> Cluster:
    if isinstance(file.cluster, dict):
        cluster = _made(file.cluster, f"{where}.cluster", None)
    elif file.cluster in presets():
        cluster = _preset(file.cluster)
    elif folder is None or Path(file.cluster).suffix.lower() not in SUFFIXES:
        raise ClusterError(f"{where}.cluster: " + unknown("cluster", file.cluster, presets()))
    else:
        # A file from somebody else must not make this one read files outside its folder.
        path = folder / file.cluster
        if path.resolve().parent != folder.resolve():
            raise ClusterError(
                f"{where}.cluster: {file.cluster!r} is not a file of the same folder"
            )
        cluster = _read(path, None)
    return cluster if file.devices is None else cluster.sized(file.devices)


def _made(data: object, where: str, folder: Path | None) -> Cluster:
    """The cluster in the contents of a file; a pool (no `folder`) cannot have pools of its own."""
    try:
        if not (isinstance(data, dict) and "pools" in data and folder is not None):
            return _cluster(
                ClusterFile.model_validate(with_links(data) if isinstance(data, dict) else data)
            )
        file = PoolsFile.model_validate(data)
        sources = dict[str, Source]()
        between = _level(file.between, sources)
        return join(
            file.name,
            [_pool(pool, f"pools.{i}", folder) for i, pool in enumerate(file.pools)],
            between=between,
            sources=sources,
        )
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) for part in e['loc']) or 'file'}: {e['msg']}"
            for e in error.errors()
        ]
        raise ClusterError(f"{where} is not a cluster file:\n" + "\n".join(lines)) from None
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _from_yaml(text: str) -> object:
    import yaml  # only files in YAML need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def parse_cluster(text: str, where: str, *, as_yaml: bool, folder: Path | None = None) -> Cluster:
    try:
        data = _from_yaml(text) if as_yaml else json.loads(text)
    # Deeply nested JSON exhausts the recursion of its parser.
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{where} is not {'YAML' if as_yaml else 'JSON'}: {error}") from None
    return _made(data, where, folder)


def presets() -> tuple[str, ...]:
    """Names of the clusters that come with autopar."""
    files = resources.files("autopar.costmodel").joinpath("presets").iterdir()
    return tuple(
        sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))
    )


@functools.cache
def _preset(name: str) -> Cluster:
    text = (
        resources.files("autopar.costmodel")
        .joinpath("presets", f"{name}.json")
        .read_text(encoding="utf-8")
    )
    return parse_cluster(text, f"preset {name}", as_yaml=False)


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
        raise ClusterError(
            unknown("cluster", name, presets()) + " A file must end in .json, .yaml or .yml."
        )
    return _read(path, path.parent)


def _read(path: Path, folder: Path | None) -> Cluster:
    text = read_text(path, CLUSTER_BYTES, what="cluster file", error=ClusterError)
    return parse_cluster(text, str(path), as_yaml=path.suffix.lower() != ".json", folder=folder)
