"""Checks of the options that the Python interface is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .table import IN_PYTHON


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options by name, with `memory` in bytes.

    Raises `UsageError` for a value of the wrong kind, such as a count that is no whole number.

    >>> checked({"devices": 8, "memory": "2KiB"})
    {'devices': 8, 'memory': 2048.0}
    """
    return {
        name: IN_PYTHON[name].kind.check(value, name) if name in IN_PYTHON else value
        for name, value in values.items()
    }


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values of all options of `autopar.plan`, with defaults for those not given.

    Raises `TypeError` for a name that is no option, as Python does for an unknown keyword.
    """
    for name in values:
        if name not in IN_PYTHON:
            raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    defaults = {name: option.default for name, option in IN_PYTHON.items()}
    return checked({**defaults, **values})
