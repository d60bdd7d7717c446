"""The choices that a file makes of a framework's habits and kernels, beside those of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from autopar.errors import UsageError, unknown

from .framework import Framework
from .habits import Habits
from .kernels import Kernels
from .table import FRAMEWORKS

Value = TypeVar("Value", Habits, Kernels)
Changed = bool | float | str | tuple[str, ...] | None
"""The value of a habit."""


def changes_of(framework: Framework) -> dict[str, Changed]:
    """The habits and kernels that differ from those of the framework in the table, by name."""
    if framework.name not in FRAMEWORKS:
        return {}
    known = FRAMEWORKS[framework.name]
    return {
        one.name: getattr(now, one.name)
        for now, before in ((framework.habits, known.habits), (framework.kernels, known.kernels))
        for one in fields(now)
        if getattr(now, one.name) != getattr(before, one.name)
    }


def changed(framework: Framework, changes: Mapping[str, Changed]) -> Framework:
    """The framework with such differences; `UsageError` for an unknown name or a wrong value."""
    names = [{one.name for one in fields(kind)} for kind in (Habits, Kernels)]
    for name in changes:
        if not any(name in some for some in names):
            raise UsageError(unknown("habit", name, sorted(names[0] | names[1])))
    return replace(
        framework,
        habits=_with(framework.habits, changes),
        kernels=_with(framework.kernels, changes),
    )


def _with(values: Value, changes: Mapping[str, Changed]) -> Value:
    """The dataclass with those of the changes that are its own."""
    now = {one.name: getattr(values, one.name) for one in fields(values)}
    own = {name: changes[name] for name in now if name in changes}
    if not own:
        return values
    try:
        return TypeAdapter(type(values)).validate_python(now | own)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"habit {where}: {first['msg']}") from error
