"""Reads the values of an archive's JSON, each checked for its form.

They are numbers, texts, devices and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .entries import Malformed

_LINE = 200
_INT64 = 2**63
_UNREAL = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Spellings of floats that JSON lacks."""


def tensor_meta(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The type, sizes and device of a tensor, all of them numbers."""
    return {
        "dtype": integer(meta["dtype"]),
        "sizes": [size(value, name) for value in listed(meta["sizes"])],
        "requires_grad": meta["requires_grad"] is True,
        "device": device(meta["device"]),
        "strides": [size(value, name) for value in listed(meta["strides"])],
        "storage_offset": size(meta["storage_offset"], name),
        "layout": integer(meta["layout"]),
    }


def size(value: Any, name: str = "") -> dict[str, int]:
    """A size that is a number, not an expression."""
    kind, inner = one(value)
    if kind != "as_int":
        raise Malformed(open_size(name))
    if integer(inner) < 0:
        raise Malformed(f"a size of {shown(name)} is {inner}")
    return {kind: inner}


def device(value: Mapping[str, Any]) -> dict[str, Any]:
    """A device; the caller checks whether this machine has it."""
    if value["type"] not in ("cpu", "cuda", "meta"):
        raise Malformed(f"a tensor lies on the device {shown(value['type'])}")
    return {
        "type": value["type"],
        "index": None if value.get("index") is None else integer(value["index"]),
    }


def integer(value: Any) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise Malformed(f"{shown(value)} stands where a whole number of 64 bits must")
    return value


def _float(value: Any) -> float:
    if type(value) in (int, float):
        return float(value)
    number = _UNREAL.get(value) if isinstance(value, str) else None
    if number is None:
        raise Malformed(f"{shown(value)} stands where a number must")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{shown(value)} stands where a text must")
    return value


def _many(read: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda values: [read(value) for value in listed(values)]


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda value: True,
    "as_bool": lambda value: value is True,
    "as_bools": _many(lambda value: value is True),
    "as_int": integer,
    "as_ints": _many(integer),
    "as_float": _float,
    "as_floats": _many(_float),
    "as_string": _text,
    "as_strings": _many(_text),
    "as_device": device,
    "as_scalar_type": integer,
    "as_memory_format": integer,
    "as_layout": integer,
    "as_complex": lambda value: {"real": _float(value["real"]), "imag": _float(value["imag"])},
}


def one(value: Any, wanted: str = "") -> tuple[str, Any]:
    """The kind and the value of a union, which holds one kind: `wanted`, where it is given."""
    if not isinstance(value, dict) or len(value) != 1 or (wanted and wanted not in value):
        raise Malformed(f"{shown(value)} stands where a union of one kind must")
    return next(iter(value.items()))


def listed(value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise Malformed(f"{shown(value)} stands where a list must")
    return value


def open_size(name: str) -> str:
    """The message about a size that is no number."""
    return (
        f"the size of {name!r} is an expression; export the model again with fixed sizes, without "
        "dynamic_shapes"
    )


def shown(value: Any) -> str:
    """A value of the file as it may be printed."""
    text = repr(value)
    return text if len(text) <= _LINE else text[:_LINE] + "..."
