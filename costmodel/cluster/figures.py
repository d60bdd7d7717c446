"""Figures of a cluster file: values with unit and source, read into base units and written back.

A figure is `{"value": 312, "unit": "TFLOP/s", "source": "...", "kind": "data sheet"}`, or a plain
number in the base unit (FLOP/s, B/s, B, s). A fitted figure also has its median relative `error` on
`rows` rows that the fit did not see. An implausible figure is refused with a question, unless it
says that it is `unusual`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from autopar.errors import ClusterError, unknown

from .plausible_figures import asked_back
from .source import Kind, Source

# Base unit of each kind of figure -> the units it may be written in, as multiples of the base unit.
UNITS: Mapping[str, Mapping[str, float]] = {
    "FLOP/s": {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "B/s": {
        "B/s": 1.0,
        "MB/s": 1e6,
        "GB/s": 1e9,
        "TB/s": 1e12,
        "GiB/s": 2.0**30,
        "Mbit/s": 1.25e5,
        "Gbit/s": 1.25e8,
    },
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
    "oversubscription": "1",
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
    "clock": "1",
    "update_fraction": "1",
    "host": "s",
    "attention": "1",
}


class Model(BaseModel):
    """A part of a file: no unknown fields, unchangeable."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class FigureFile(Model):
    """A figure in a file."""

    value: float = Field(allow_inf_nan=False)
    unit: str | None = None
    source: str = ""
    kind: Kind | None = None
    error: float | None = None
    rows: int | None = None
    unusual: bool = False

    def said(self) -> Source | None:
        """The figure's source, if it states one."""
        if self.kind is None:
            return Source.of(self.source) if self.source else None
        return Source(text=self.source, kind=self.kind, error=self.error, rows=self.rows)


def _figure(given: object) -> object:
    """Read a plain number as a figure in the base unit."""
    # In Python True is an integer; here it is a slip, which pydantic reports.
    return (
        {"value": given}
        if isinstance(given, int | float | str) and not isinstance(given, bool)
        else given
    )


Figure = Annotated[FigureFile, BeforeValidator(_figure)]


class SaidFile(Model):
    """The source of those figures of a part that state none of their own."""

    source: str
    kind: Kind
    error: float | None = None
    rows: int | None = None


def _number(
    figure: FigureFile, base: str, where: str, sources: dict[str, Source], said: Source | None
) -> float:
    """The figure in its base unit; where it comes from is noted in `sources`."""
    source = figure.said() or said
    if source is not None:
        sources[where] = source
    unit = figure.unit or base
    if unit not in UNITS[base]:
        raise ClusterError(f"{where}: " + unknown("unit", unit, UNITS[base]))
    value = figure.value * UNITS[base][unit]
    if not figure.unusual and (asked := asked_back(where, value)):
        raise ClusterError(asked)
    return value


def numbers(
    model: Model, owner: str, sources: dict[str, Source], said: SaidFile | None = None
) -> dict[str, Any]:
    """The figures of `model` by field; `said` is the source of figures without one."""
    known = (
        None
        if said is None
        else Source(text=said.source, kind=said.kind, error=said.error, rows=said.rows)
    )
    out: dict[str, Any] = {}
    for name, base in BASE_UNITS.items():
        given = getattr(model, name, None)
        if isinstance(given, dict):
            out[name] = {
                key: _number(figure, base, f"{owner}.{name}.{key}", sources, known)
                for key, figure in given.items()
            }
        elif given is not None:
            out[name] = _number(given, base, f"{owner}.{name}", sources, known)
    return out


def dump_figures(sources: Mapping[str, Source], owner: str, part: object) -> dict[str, object]:
    """The figures of a device, level or protocol as a file has them, each with its source."""

    def figure(where: str, base: str, value: float) -> dict[str, object]:
        written: dict[str, object] = {"value": value, "unit": base}
        if (source := sources.get(where)) is not None:
            written |= {"source": source.text, "kind": source.kind}
            written |= {} if source.error is None else {"error": source.error, "rows": source.rows}
        # Reading would refuse an implausible figure that is not marked.
        return written | ({"unusual": True} if asked_back(where, value) else {})

    out: dict[str, object] = {}
    for name, base in BASE_UNITS.items():
        given = getattr(part, name, None)
        if isinstance(given, Mapping):
            out[name] = {
                key: figure(f"{owner}.{name}.{key}", base, value) for key, value in given.items()
            }
        elif given is not None:
            out[name] = figure(f"{owner}.{name}", base, given)
    return out
