"""The signature and the docstring of `autopar.plan`, made from the table of options."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .keywords import PlanKeywords
from .table import IN_PYTHON

WIDTH = 100
Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(function: Function) -> Function:
    """Give a function that takes `**PlanKeywords` a parameter for each option, and say what it is.

    Type checkers read `PlanKeywords`; `inspect.signature` and `help` read what is set here.
    """
    own = inspect.signature(function)
    fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    signature = own.replace(parameters=[*fixed, *_parameters()])
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.getdoc(function)}\n\n" + "\n".join(_lines())
    return function


def _parameters() -> Iterator[inspect.Parameter]:
    """The options as keyword-only parameters."""
    for name, option in IN_PYTHON.items():
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=PlanKeywords.__annotations__[name].__forward_arg__,
        )


def _lines() -> Iterator[str]:
    """The options as a list, one an entry."""
    for name, option in IN_PYTHON.items():
        yield from textwrap.wrap(
            f"- `{name}`: {option.told}.",
            width=WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
