"""Tells which operators of a graph draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir import Graph, Operator
from autopar.runtime.operators.registry import FORMS, form_of

from . import attention_dropout, dropout, random_tensors, seeded_operators

_FAMILIES = tuple(
    module.__name__ for module in (attention_dropout, random_tensors, dropout, seeded_operators)
)
_RATES = ("p", "ratio", "dropout_p", "dropout")
_SWITCHES = ("train", "training_mode", "training")


def draws_numbers(operator: Operator) -> bool:
    """Whether an operator may draw: its kind does, and its attributes do not switch that off."""
    # The table is filled when a form is first asked for.
    form_of(operator.kind)
    form = FORMS.get(operator.kind)
    if form is None or form.local is None:
        return False
    if not is_drawing(form.local):
        return False
    attributes = operator.attributes
    # Graphs leave out arguments that have their default: attention's rate is zero, others' not.
    if "attention" in operator.kind and not attributes.get("dropout_p"):
        return False
    return all(attributes.get(name, True) for name in (*_SWITCHES, *_RATES))


def is_drawing(function: Callable[..., Any]) -> bool:
    """Whether a function is one of those that draw."""
    return getattr(getattr(function, "func", function), "__module__", "") in _FAMILIES


def is_random(graph: Graph) -> bool:
    """Whether some operator of a graph may draw."""
    return any(draws_numbers(operator) for operator in graph.operators)
