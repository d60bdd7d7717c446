"""`StandIn`: the stand-ins that modules have, which torch asks about functions and operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .elsewhere import Elsewhere
from .lists import answered
from .operators import run


class StandIn(Elsewhere):
    """A tensor of another stage."""

    # DTensors leave functions to others, so that this is asked where a list has both.
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return answered(func, args, dict(kwargs or {}))

    # Operators that torch calls itself, in the course of its functions.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, dict(kwargs or {}))
