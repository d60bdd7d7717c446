"""Graphs as texts: they come back as they were, and other texts are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.ir import Graph, NarrowCopy, Ref, Role, graph_of, text_of, with_loss
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


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "uint8"])
def test_constants_come_back(dtype: str) -> None:
    constants = {"w": np.arange(6).reshape(2, 3).astype(dtype), "one": np.array(1, dtype)}
    back = graph_of(text_of(replace(chain(), constants=constants))).constants
    assert {name: (a.dtype, a.tolist()) for name, a in back.items()} == {
        name: (a.dtype, a.tolist()) for name, a in constants.items()
    }


def test_narrow_copies_are_in_no_text() -> None:
    graph = chain()
    name, tensor = next(iter(graph.tensors.items()))
    narrow = replace(tensor, narrow=NarrowCopy(recipe="fp8", bits=8, blocks=tensor.shape))
    with pytest.raises(ValueError, match="has no text"):
        text_of(replace(graph, tensors={**graph.tensors, name: narrow}))


def test_constants_of_objects_are_in_no_text() -> None:
    with pytest.raises(ValueError, match="has no text"):
        text_of(replace(chain(), constants={"x": np.array([object()])}))


@pytest.mark.parametrize(
    "row",
    [
        ["|O8", [1], "AAAAAAAAAAA="],
        ["<f4", [2], "AAAA"],
        ["<f4", [2**60], "AAAAAA=="],
        ["<f4", [1], "*"],
        ["<f4", ["1"], "AAAAAA=="],
        ["float32", [1], "AAAAAA=="],
    ],
)
def test_other_constants_are_refused(row: Any) -> None:
    with pytest.raises(ValueError):
        graph_of(changed("constants.x", row))


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
