"""Texts of values, by which answers are remembered: equal values have equal texts, others not."""

from __future__ import annotations

import types
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

_OURS = "autopar."


def value_text(value: Any) -> str:
    """The text of a value; `ValueError` for an object that no text tells whole.

    Told are numbers, texts, bytes, arrays of numbers, containers, and this package's own functions
    and dataclasses, but for fields that are left out of their `repr`.
    """
    if value is None or type(value) in (bool, int, float, str, range):
        return repr(value)
    if type(value) is bytes:
        return f"b{value.hex()}"
    if isinstance(value, Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        return f"{value.dtype.str}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(value_text, value))})"
    if isinstance(value, Mapping):
        told = sorted((value_text(key), value_text(held)) for key, held in value.items())
        return f"{{{','.join(f'{key}:{held}' for key, held in told)}}}"
    if isinstance(value, Set):
        return f"<{','.join(sorted(map(value_text, value)))}>"
    if isinstance(value, types.FunctionType | types.MethodType):
        return _function(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={value_text(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{_named(type(value))}({','.join(parts)})"
    raise ValueError(f"{value!r:.100} has no text of its own")


def _function(value: types.FunctionType | types.MethodType) -> str:
    if isinstance(value, types.MethodType):
        return f"{value_text(value.__self__)}.{value.__func__.__qualname__}"
    # What a function was made with is in no text.
    if value.__closure__ or "<" in value.__qualname__:
        raise ValueError(f"{value!r:.100} has no text of its own")
    return _named(value)


def _named(kind: Any) -> str:
    if not kind.__module__.startswith(_OURS):
        raise ValueError(f"{kind!r:.100} is code of which nothing is known")
    return f"{kind.__module__}.{kind.__qualname__}"
