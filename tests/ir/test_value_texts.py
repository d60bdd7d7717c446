"""Texts of values: equal where the values are equal, and refused for what no text tells whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.ir.value_texts import value_text
from autopar.planning.model.pins import Pins, replicated, together
from autopar.planning.model.request import Request
from autopar.schemes import SCHEMES, scheme_named
from autopar.sharding.mesh import Mesh

CLUSTER = load_cluster("dgx-h100").sized(8)


@dataclass(frozen=True)
class Foreign:
    """A value of other code."""

    number: int = 1


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        (("a", "b"), ("a,b",)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([1], np.int32), np.array([1], np.int64)),
        (range(3), range(4)),
        (Request(cluster=CLUSTER), Request(cluster=CLUSTER, memory=1.0)),
        (CLUSTER, CLUSTER.sized(4)),
        (together(replicated), together(replicated, replicated)),
        (Pins(operators={"a": {"x": "n"}}), Pins(operators={"a": {"x": "k"}})),
    ],
)
def test_unequal_values_have_unequal_texts(one: Any, other: Any) -> None:
    assert value_text(one) != value_text(other)


def test_equal_values_have_equal_texts() -> None:
    assert value_text({"a": 1, "b": 2}) == value_text({"b": 2, "a": 1})
    assert value_text(frozenset("abc")) == value_text(frozenset("cba"))
    assert value_text(Request(cluster=CLUSTER)) == value_text(
        Request(cluster=load_cluster("dgx-h100").sized(8))
    )


def test_every_scheme_has_a_text_of_its_own() -> None:
    assert len({value_text(scheme_named(name)) for name in SCHEMES}) == len(SCHEMES)


@pytest.mark.parametrize(
    "value",
    [
        lambda analysis, mesh: None,
        functools.partial(print),
        Foreign(),
        object(),
        np.array([object()]),
        print,
        Mesh,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_text_tells_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        value_text(value)
    with pytest.raises(ValueError):
        value_text(replace(Request(cluster=CLUSTER), limits=value))
