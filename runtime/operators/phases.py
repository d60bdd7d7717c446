"""Local forms that leave, work and arrive apart: others run while their rows are under way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .local_call import Function

UnderWay = tuple[Tensor, Any]
"""What leads the gradient from phase to phase, and all else that the next phase must know."""


class Phases(NamedTuple):
    """The parts of a form; all but the first take `tag` and `way` from the one before.

    Each takes those of the form's arguments that it names.
    """

    leave: Callable[..., UnderWay]
    work: Callable[..., UnderWay]
    arrive: Callable[..., Tensor]

    def __call__(self, **arguments: Any) -> Tensor:
        """All phases, one behind the other."""
        tag, way = self.leave(**_named(self.leave, arguments))
        tag, way = self.work(tag, way, **_named(self.work, arguments))
        return self.arrive(tag, way, **_named(self.arrive, arguments))


def _named(phase: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in names_of(phase) if name in arguments}


def names_of(phase: Function) -> tuple[str, ...]:
    """The names of a form's arguments that one of its phases takes."""
    return tuple(n for n in inspect.signature(phase).parameters if n not in ("tag", "way"))


_PHASES: dict[Function, Phases] = {}


def in_phases(function: Function, phases: Phases) -> None:
    """Enter the phases of a form, which together are `function`."""
    _PHASES[function] = phases


def phases_of(function: Function) -> Phases:
    """The phases of a form in which rows travel."""
    return _PHASES[function]
