"""The measured kernels of a device: products by dtype, attention and grouped products by kernel."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import UnionType
from typing import Any, get_args, get_type_hints

from autopar.errors import ClusterError, unknown

from .attention import AttentionForm
from .grouped_products import GroupedForm
from .products import Clock, Library, ProductForm, Speed

ITEMSIZE: Mapping[str, float] = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8": 1.0,
    "float8_block": 1.0,
    "float4": 0.5625,
}
"""Bytes of an operand's element, with its share of a block's scale."""


SHEET = "data-sheet"
"""The name of the kernels that stand for a device of which only the data sheet is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Provenance of constants: fitted to `rows` rows, with errors on `held` rows of other shapes.

    `median`, `p90`: of the absolute error; `bias`. `low`, `middle`, `high`: the 5th, 50th and 95th
    percentile of log(measured / predicted), each row judged by a fit without its shape (all three
    0: not known).
    """

    kind: str
    source: str
    rows: int = 0
    held: int = 0
    median: float = 0.0
    p90: float = 0.0
    bias: float = 0.0
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The measured kernels of one kind of device.

    `units`: processors. `peak`: FLOP/s by dtype, and `memory`: B/s; constants are fractions of
    these. `products`: by dtype. `attention`: by kernel. `grouped`: by "kernel dtype".
    `generations`: the measured kernel for a framework's name of attention ("flash2"), with a
    slowdown. `experts`: the grouped kernel of training, by dtype. `fits`: the provenance of each,
    by "products bfloat16".
    """

    name: str
    units: float
    memory: float
    peak: Mapping[str, float] = field(hash=False)
    products: Mapping[str, ProductForm] = field(hash=False)
    attention: Mapping[str, AttentionForm] = field(default_factory=dict, hash=False)
    grouped: Mapping[str, GroupedForm] = field(default_factory=dict, hash=False)
    generations: Mapping[str, Generation] = field(default_factory=dict, hash=False)
    experts: Mapping[str, str] = field(default_factory=dict, hash=False)
    fits: Mapping[str, Fitted] = field(default_factory=dict, hash=False)

    def speed(self, dtype: str) -> Speed:
        """The rates that the forms of `dtype` are fractions of, on the device that was measured."""
        return Speed(
            flops=self.peak[dtype], memory=self.memory, reference=self.memory, units=self.units
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An attention kernel of a framework, priced by a measured one.

    `kernel`: the measured kernel. `slower`: the slowdown against it. `source`: the reason.
    """

    kernel: str
    slower: float = 1.0
    source: str = ""


def measured() -> tuple[str, ...]:
    """Names of the devices that were measured."""
    files = resources.files(__package__).joinpath("data").iterdir()
    names = (file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))
    return tuple(sorted(name for name in names if name != SHEET))


@functools.cache
def kernels_of(name: str) -> Kernels:
    """The kernels of a device that was measured.

    >>> kernels_of("h100_sxm").units
    132
    """
    known = (*measured(), SHEET)
    if name not in known:
        raise ClusterError(unknown("measured device", name, known))
    text = resources.files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8")
    return kernels_from(json.loads(text), name)


def sheet_kernels(*, peak: Mapping[str, float], memory: float, units: float) -> Kernels:
    """The kernels of a device that only its data sheet describes.

    One form stands for all measured devices, in fractions of the peak and of the memory's rate.

    >>> sheet_kernels(peak={"bfloat16": 1e15}, memory=4e12, units=100).memory
    4000000000000.0
    """
    return dataclasses.replace(kernels_of(SHEET), peak=peak, memory=memory, units=units)


def kernels_from(data: object, where: str) -> Kernels:
    """The kernels that a mapping of constants describes."""
    # The version belongs to the file, not to the constants.
    if isinstance(data, Mapping):
        data = {name: value for name, value in data.items() if name != "version"}
    kernels = _built(Kernels, data, where)
    assert isinstance(kernels, Kernels)
    for entry in kernels.generations.values():
        if entry.kernel not in kernels.attention:
            raise ClusterError(
                f"{where}.generations: "
                + unknown("attention kernel", entry.kernel, kernels.attention)
            )
    for kernel in kernels.experts.values():
        if kernel not in kernels.grouped:
            raise ClusterError(
                f"{where}.experts: " + unknown("grouped kernel", kernel, kernels.grouped)
            )
    return kernels


def dumped(kernels: Kernels) -> dict[str, Any]:
    """The mapping that `kernels_from` reads."""
    return dataclasses.asdict(kernels)


def _built(kind: Any, data: object, where: str) -> object:
    """A value of one of this folder's types from JSON data."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, data, where)
    arguments = get_args(kind)
    if arguments and not isinstance(kind, UnionType):
        if not isinstance(data, Mapping):
            raise ClusterError(f"{where} is {data!r}; it must be a table")
        return {
            str(key): _built(arguments[1], value, f"{where}.{key}") for key, value in data.items()
        }
    if kind is str:
        return str(data)
    # JSON's true is an integer in Python; JSON may also hold NaN and infinity.
    if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data):
        raise ClusterError(f"{where} is {data!r}; it must be a finite number")
    return data


def _record(kind: type, data: object, where: str) -> object:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} is {data!r}; it must be a table")
    types = _hints(kind)
    for name in data:
        if name not in types:
            raise ClusterError(f"{where}: " + unknown("constant", str(name), sorted(types)))
    absent = [f.name for f in dataclasses.fields(kind) if f.name not in data and _required(f)]
    if absent:
        raise ClusterError(f"{where}: {', '.join(absent)} must be given")
    return kind(
        **{str(name): _built(types[name], value, f"{where}.{name}") for name, value in data.items()}
    )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _required(given: dataclasses.Field[Any]) -> bool:
    return given.default is dataclasses.MISSING and given.default_factory is dataclasses.MISSING


__all__ = [
    "ITEMSIZE",
    "SHEET",
    "Clock",
    "Fitted",
    "Generation",
    "Kernels",
    "Library",
    "dumped",
    "kernels_from",
    "kernels_of",
    "measured",
    "sheet_kernels",
]
