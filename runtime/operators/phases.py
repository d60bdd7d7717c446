"""Local forms that leave, work and arrive apart: others run while their rows are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .local_call import Function


class Phases(NamedTuple):
    """The parts of a form: each takes what the one before returns, the first the arguments."""

    leave: Callable[..., Any]
    work: Callable[[Any], Any]
    arrive: Callable[[Any], Any]


_PHASES: dict[Function, Phases] = {}


def in_phases(function: Function, phases: Phases) -> None:
    """Enter the phases of a form, which together are `function`."""
    _PHASES[function] = phases


def phases_of(function: Function) -> Phases:
    """The phases of a form in which rows travel."""
    return _PHASES[function]
