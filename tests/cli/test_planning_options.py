"""The table of options: what repeats its names or defaults says the same."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import autopar
from autopar.options.keywords import PlanKeywords
from autopar.options.plan_options import PlanOptions
from autopar.options.table import IN_PYTHON, PLANNED, READING, TABLE

OF_OTHER_ROOMS = {"reductions", "fewer", "cuts"}
"""Options that only the context, schemes and imports set."""


def test_the_signature_is_that_of_the_table() -> None:
    parameters = inspect.signature(autopar.plan).parameters
    assert list(parameters) == ["model", "example_inputs", *IN_PYTHON]
    for name, option in IN_PYTHON.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == option.default


def test_type_checkers_see_the_options_of_the_table() -> None:
    assert list(PlanKeywords.__annotations__) == list(IN_PYTHON)


def test_the_docstring_tells_every_option() -> None:
    text = inspect.getdoc(autopar.plan) or ""
    assert all(f"\n- `{name}`: " in text for name in IN_PYTHON)


def test_plan_options_have_the_defaults_of_the_table() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(PlanOptions)}
    assert set(fields) == {*PLANNED, *OF_OTHER_ROOMS}
    assert {name: fields[name] for name in PLANNED} == {
        name: TABLE[name].default for name in PLANNED
    }


def test_every_option_is_of_one_destination() -> None:
    assert not {*READING} & {*PLANNED}
    assert {*IN_PYTHON} == {*READING, *PLANNED, "compress", "progress"}


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        autopar.plan("model.onnx", device=8)
