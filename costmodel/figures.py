"""Figures of a cluster file: a value with its unit and source, read into base units and written back.

A figure is `{"value": 312, "unit": "TFLOP/s", "source": "..."}`, or a plain number in the base unit (FLOP/s, B/s, B, s).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from autopar.errors import ClusterError, unknown

# Base unit of each kind of figure -> the units it may be written in, as multiples of the base unit.
UNITS: Mapping[str, Mapping[str, float]] = {
    "FLOP/s": {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "B/s": {"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GiB/s": 2.0**30, "Mbit/s": 1.25e5, "Gbit/s": 1.25e8},
    "B": {"B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "1": {"1": 1.0, "%": 0.01},
}
BASE_UNITS: Mapping[str, str] = {
    "peak": "FLOP/s",
    "memory_bandwidth": "B/s",
    "bandwidth": "B/s",
    "peer_bandwidth": "B/s",
    "copy_bandwidth": "B/s",
    "memory_capacity": "B",
    "reserved": "B",
    "host_bandwidth": "B/s",
    "host_memory": "B",
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


class Model(BaseModel):
    """A part of a file: no unknown fields, unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FigureFile(Model):
    """A figure in a file."""

    value: float = Field(allow_inf_nan=False)
    unit: str | None = None
    source: str = ""


def _figure(given: object) -> object:
    """A plain number stands for a figure in the base unit."""
    return {"value": given} if isinstance(given, int | float | str) and not isinstance(given, bool) else given


Figure = Annotated[FigureFile, BeforeValidator(_figure)]


def _number(figure: FigureFile, base: str, where: str, sources: dict[str, str]) -> float:
    """The figure in its base unit; where it comes from is noted in `sources`."""
    if figure.source:
        sources[where] = figure.source
    unit = figure.unit or base
    if unit not in UNITS[base]:
        raise ClusterError(f"{where}: " + unknown("unit", unit, UNITS[base]))
    return figure.value * UNITS[base][unit]


def numbers(model: Model, owner: str, sources: dict[str, str]) -> dict[str, Any]:
    """The figures of `model` by field."""
    out: dict[str, Any] = {}
    for name, base in BASE_UNITS.items():
        given = getattr(model, name, None)
        if isinstance(given, dict):
            out[name] = {key: _number(figure, base, f"{owner}.{name}.{key}", sources) for key, figure in given.items()}
        elif given is not None:
            out[name] = _number(given, base, f"{owner}.{name}", sources)
    return out


def dump_figures(sources: Mapping[str, str], owner: str, part: object) -> dict[str, object]:
    """The figures of a device, level or protocol as a file has them, each with its source."""

    def figure(where: str, base: str, value: float) -> dict[str, object]:
        return {"value": value, "unit": base, **({"source": sources[where]} if where in sources else {})}

    out: dict[str, object] = {}
    for name, base in BASE_UNITS.items():
        given = getattr(part, name, None)
        if isinstance(given, Mapping):
            out[name] = {key: figure(f"{owner}.{name}.{key}", base, value) for key, value in given.items()}
        elif given is not None:
            out[name] = figure(f"{owner}.{name}", base, given)
    return out
