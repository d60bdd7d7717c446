"""Cluster files written: the text from which `reading` makes an equal cluster."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from autopar.costmodel.device.measured_kernels import SHEET, dumped, kernels_of, measured

from .cluster import Cluster
from .figures import dump_figures
from .level import Level
from .measured_collectives import Measured
from .protocols import Protocol


def _dump_measured(entry: Measured) -> dict[str, object]:
    curve = entry.curve
    above = (
        {"limit": curve.limit, "seconds_per_byte_above": curve.beta_above}
        if curve.limit < math.inf
        else {}
    )
    return {
        "kind": entry.kind,
        "level": entry.level,
        "group": entry.group,
        "drivers": entry.drivers,
        "seconds": curve.alpha,
        "seconds_per_byte": curve.beta,
        **above,
        "residual": entry.residual,
        "spread": entry.spread,
    }


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
        **(
            {"protocols": [_dump_protocol(cluster, level, one) for one in level.protocols]}
            if level.protocols
            else {}
        ),
        **(
            {"residuals": {name: asdict(left) for name, left in level.residuals.items()}}
            if level.residuals
            else {}
        ),
    }


def _dump_device(cluster: Cluster) -> dict[str, object]:
    device = cluster.device
    figures = dump_figures(cluster.sources, "device", device)
    if device.kernels is None:
        return figures
    kernels = device.kernels
    # Constants that come with autopar are written by name only, all others in full.
    known = kernels.name == SHEET or (
        kernels.name in measured() and kernels_of(kernels.name) == kernels
    )
    named = {
        "name": kernels.name,
        **({"source": said.text} if (said := cluster.sources.get("device.kernels")) else {}),
    }
    return {**figures, "kernels": named if known else dumped(kernels)}


def _dumped(cluster: Cluster) -> dict[str, object]:
    if cluster.joined:
        pools = [{"cluster": _dumped(pool)} for pool in cluster.joined]
        return {
            "version": 1,
            "name": cluster.name,
            "pools": pools,
            "between": _dump_level(cluster, cluster.levels[-1]),
        }
    return {
        "version": 1,
        "name": cluster.name,
        "backend": cluster.backend,
        "shared_host": cluster.shared_host,
        **({} if cluster.cores is None else {"cores": cluster.cores}),
        "device": {"name": cluster.device.name, **_dump_device(cluster)},
        "levels": [
            {"size": level.size, "slots": level.slots, **_dump_level(cluster, level)}
            for level in cluster.levels
        ],
        **(
            {"measured": [_dump_measured(entry) for entry in cluster.measured]}
            if cluster.measured
            else {}
        ),
    }


def dump(cluster: Cluster) -> str:
    """Return the text of a cluster file from which `load_cluster` makes an equal cluster.

    It is JSON in base units.
    """
    return json.dumps(_dumped(cluster), indent=2) + "\n"
