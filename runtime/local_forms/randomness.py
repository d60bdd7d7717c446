"""Operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir import Graph, Operator

from . import attention_dropout, drawn, dropout, seeded
from .registry import FORMS, form_of

_FAMILIES = tuple(module.__name__ for module in (attention_dropout, drawn, dropout, seeded))
_RATES = ("p", "ratio", "dropout_p", "dropout")
_SWITCHES = ("train", "training_mode", "training")


def draws_numbers(operator: Operator) -> bool:
    """Whether an operator may draw: its kind does, and its attributes do not switch that off."""
    form_of(operator.kind)  # the table is filled when it is first asked
    form = FORMS.get(operator.kind)
    if form is None or form.local is None:
        return False
    if not is_drawing(form.local):
        return False
    given = operator.attributes
    if "attention" in operator.kind and not given.get("dropout_p"):  # graphs leave out arguments that have their default
        return False
    return all(given.get(name, True) for name in _SWITCHES) and all(given.get(name, True) for name in _RATES)


def is_drawing(function: Callable[..., Any]) -> bool:
    """Whether a function is one of those that draw."""
    return getattr(getattr(function, "func", function), "__module__", "") in _FAMILIES


def is_random(graph: Graph) -> bool:
    """Whether some operator of a graph may draw."""
    return any(draws_numbers(operator) for operator in graph.operators)
