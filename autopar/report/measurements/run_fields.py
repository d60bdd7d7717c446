"""Prints the fields of any report of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def report_json(report: Any) -> dict[str, Any]:
    """The fields of a report (a dataclass) as plain values."""
    return {name: _plain(value) for name, value in _fields(report)}


def report_lines(report: Any) -> list[str]:
    """One `name: value` line for each field; lists of records get a line each."""
    lines = []
    for name, value in report_json(report).items():
        words = name.replace("_", " ")
        if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            lines += [f"{words}:", *(f"  {_inline(item)}" for item in value)]
        else:
            lines.append(f"{words}: {_inline(value)}")
    return lines


def _fields(report: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(report, field.name)) for field in dataclasses.fields(report)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in _fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _inline(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_inline, value)) or "none"
    return "none" if value is None else str(value)
