"""Kinds of option values: how the command line takes them, reads their texts, and checks values."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import UsageError
from autopar.units import parse_bytes

DIMS_FORM = "NAME=SIZE"
SHAPES_FORM = "INPUT=1x30"
VALUES_FORM = "INPUT=NUMBER"


def _same(value: Any, option: str) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of value.

    `arguments`: for `argparse`. `read`: makes the value from the words of a command line, whose
    option is named for errors. `check`: checks a value of the Python interface, and may convert it.
    Both raise `UsageError`.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any, str], Any] = _same
    check: Callable[[Any, str], Any] = _same


def pair_of(text: str, option: str, form: str) -> tuple[str, str]:
    """The two sides of a text such as NAME=VALUE; names may hold further signs of equality."""
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text!r} is not of the form {form}")
    return name, value


def size_of(text: str, option: str) -> int:
    """The whole number in a text."""
    if not text.isdecimal():
        raise UsageError(f"{option}: {text!r} is no size; give a whole number")
    return int(text)


def sizes_of(text: str, option: str) -> tuple[int, ...]:
    """The sizes in a text such as 2x4."""
    return tuple(size_of(part, option) for part in text.split("x")) if text else ()


def _read_bytes(text: str | None, option: str) -> float | None:
    return parse_bytes(text, option) if text else None


def _read_mesh(text: str | None, option: str) -> tuple[int, ...] | None:
    return sizes_of(text, option) if text else None


def _read_dims(texts: list[str], option: str) -> dict[str, int]:
    pairs = (pair_of(text, option, DIMS_FORM) for text in texts)
    return {name: size_of(size, f"{option} {name}") for name, size in pairs}


def _read_shapes(texts: list[str], option: str) -> dict[str, tuple[int, ...]]:
    pairs = (pair_of(text, option, SHAPES_FORM) for text in texts)
    return {name: sizes_of(size, f"{option} {name}") for name, size in pairs}


def _read_values(texts: list[str], option: str) -> dict[str, float | tuple[float, ...]]:
    pairs = [pair_of(text, option, VALUES_FORM) for text in texts]
    words = {"true": "1", "false": "0"}
    try:
        read = {
            name: tuple(float(words.get(part.lower(), part)) for part in numbers.split(","))
            for name, numbers in pairs
        }
    except ValueError:
        raise UsageError(f"{option} takes {VALUES_FORM}, numbers with commas between") from None
    return {name: numbers[0] if len(numbers) == 1 else numbers for name, numbers in read.items()}


def _check_share(value: Any, name: str) -> float | None:
    """A share, from a number or a text such as 5%."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        text = str(value).strip()
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{name} is {value!r}; it must be a share such as 5% or 0.05") from None


def _check_seconds(value: Any, name: str) -> float | None:
    """A number of seconds."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}; it must be a number of seconds") from None


def _check_whole(value: Any, name: str) -> int | None:
    """A whole number, also of numpy; a text or a fraction is refused."""
    if value is None:
        return None
    # `operator.index` takes numpy's whole numbers too, and no fraction, which `int` would cut.
    try:
        return operator.index(value)
    except TypeError as error:
        hint = f": write {name}={value}" if isinstance(value, str) and value.isdecimal() else ""
        raise UsageError(
            f"{name} is {value!r}, {_kind_words(value)}; it must be a whole number{hint}"
        ) from error


def _check_bytes(value: Any, name: str) -> float | None:
    """An amount of memory in bytes, from a number or a text with a unit."""
    if isinstance(value, str):
        return parse_bytes(value, name)
    if value is None or isinstance(value, int | float):
        return value
    raise UsageError(
        f"{name} is {value!r}, {_kind_words(value)}; "
        "it must be a number of bytes, or a text such as '80GiB'"
    )


def _kind_words(value: object) -> str:
    """The type of a value in words."""
    words = {"str": "a text", "float": "a fraction", "list": "a list", "tuple": "a tuple"}
    name = type(value).__name__
    return words.get(name, f"of type {name}")


TEXT = Kind()
WHOLE = Kind(arguments={"type": int}, check=_check_whole)
BYTES = Kind(read=_read_bytes, check=_check_bytes)
SHARE = Kind(read=_check_share, check=_check_share)
SECONDS = Kind(read=_check_seconds, check=_check_seconds)
SWITCH = Kind(arguments={"action": "store_true"})
SWITCHED = Kind(arguments={"action": argparse.BooleanOptionalAction})
TEXTS = Kind(arguments={"action": "append", "default": []})
MESH = Kind(read=_read_mesh)
DIMS = Kind(arguments={"action": "append", "default": []}, read=_read_dims)
VALUES = Kind(arguments={"action": "append", "default": []}, read=_read_values)
SHAPES = Kind(arguments={"action": "append", "default": []}, read=_read_shapes)
