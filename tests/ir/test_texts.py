"""Graphs as texts: they come back as they were, and other texts are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.ir import Graph, Ref, Role, graph_of, text_of, with_loss
from tests.ir.test_graph import chain, operator, tensor


def rich() -> Graph:
    """A graph with all that a text holds."""
    tensors = [
        tensor("x", 4, role=Role.INPUT),
        tensor("w", 4, role=Role.PARAMETER),
        tensor("count", role=Role.CONSTANT, dtype="int64"),
        tensor("y", 4),
        tensor("count:1", dtype="int64"),
    ]
    add = operator(
        "add", ("x", "w"), ("y",), "aten.add.Tensor", other=Ref(1), alpha=-0.1, far=float("inf")
    )
    shapes: Any = ((1, (True, None)), "text")
    step = operator("step", ("count",), ("count:1",), shapes=shapes, one=1, yes=True)
    return with_loss(
        Graph(
            name="rich",
            tensors={t.name: t for t in tensors},
            operators=(add, step),
            inputs=("x",),
            outputs=("y",),
            replicated=frozenset({"aten.b", "aten.a"}),
            updates={"count": "count:1"},
        ),
        ["y"],
    )


@pytest.mark.parametrize("graph", [chain(), rich()], ids=["chain", "rich"])
def test_a_graph_comes_back(graph: Graph) -> None:
    back = graph_of(text_of(graph))
    assert back == graph
    # True and 1 are equal, and not the same.
    assert repr(back.operators) == repr(graph.operators)
    assert back.fingerprint() == graph.fingerprint()


def test_constants_are_in_no_text() -> None:
    with pytest.raises(ValueError, match="holds constants"):
        text_of(replace(chain(), constants={"x": np.ones(4)}))


def changed(place: str, value: Any) -> str:
    data = json.loads(text_of(rich()))
    *parts, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inner = data
    for part in parts:
        inner = inner[part]
    inner[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        changed("name", 1),
        changed("tensors", {}),
        changed("tensors.0", ["x"]),
        changed("tensors.0.1", [True]),
        changed("tensors.0.1", [-1]),
        changed("tensors.0.2", "float1"),
        changed("tensors.0.3", "king"),
        changed("tensors.0.4", 1),
        changed("operators.0.1", None),
        changed("operators.0.2", "xw"),
        changed("operators.0.2", ["y"]),
        changed("operators.0.4.self", {"input": 2}),
        changed("operators.0.4.self", {"input": -1}),
        changed("operators.0.4.self", {}),
        changed("outputs", ["z"]),
        changed("updates", {"z": "y"}),
    ],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        graph_of(text)
