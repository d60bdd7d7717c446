"""The graph: what it refuses, its fingerprints, and the loss that training gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.ir import Graph, Operator, Ref, Role, Tensor, with_loss
from autopar.ir.dtype import cast_graph


def tensor(name: str, *shape: int, role: Role = Role.ACTIVATION, dtype: str = "float32") -> Tensor:
    return Tensor(name=name, shape=shape, dtype=dtype, role=role, trainable=role is Role.PARAMETER)


def operator(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    kind: str = "aten.relu.default",
    **attributes: Any,
) -> Operator:
    return Operator(
        name=name,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        attributes={"self": Ref(0), **attributes},
    )


def chain(**changes: Any) -> Graph:
    """x → a → b."""
    tensors = [tensor("x", 4, role=Role.INPUT), tensor("a:0", 4), tensor("b:0", 4)]
    given: dict[str, Any] = {
        "name": "chain",
        "tensors": {t.name: t for t in tensors},
        "operators": (operator("a", ("x",), ("a:0",)), operator("b", ("a:0",), ("b:0",))),
        "inputs": ("x",),
        "outputs": ("b:0",),
    }
    return Graph(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": ("y",)}, "input 'y' is unknown"),
        ({"outputs": ("z",)}, "output 'z' is never made"),
        ({"loss": "z"}, "output 'z' is never made"),
        (
            {"operators": (operator("b", ("a:0",), ("b:0",)), operator("a", ("x",), ("a:0",)))},
            "'b' reads 'a:0' before it is made",
        ),
        (
            {"operators": (operator("a", ("x",), ("a:0",)), operator("a", ("a:0",), ("b:0",)))},
            "two operators are called 'a'",
        ),
        (
            {"operators": (operator("a", ("x",), ("b:0",)), operator("b", ("x",), ("b:0",)))},
            "makes 'b:0' a second time",
        ),
        (
            {"operators": (operator("a", ("x",), ("new",)), operator("b", ("x",), ("b:0",)))},
            "makes the undeclared 'new'",
        ),
        (
            {"operators": (operator("a", ("x",), ("x",)), operator("b", ("x",), ("b:0",)))},
            "makes 'x' a second time",
        ),
    ],
)
def test_graphs_that_are_not_well_formed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chain(**changes)


def test_every_problem_is_listed() -> None:
    with pytest.raises(ValueError, match="input 'y' is unknown; output 'z' is never made"):
        chain(inputs=("y",), outputs=("z",))


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [((2, -1), "float32", "negative size"), ((2,), "float31", "unknown dtype")],
)
def test_tensors_that_are_refused(shape: tuple[int, ...], dtype: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tensor(name="t", shape=shape, dtype=dtype)


def test_sizes() -> None:
    t = tensor("t", 2, 3, dtype="bfloat16")
    assert (t.size, t.bytes, t.is_float, tensor("s").size, tensor("i", dtype="int64").is_float) == (
        6,
        12,
        True,
        1,
        False,
    )


def test_who_makes_and_who_reads() -> None:
    assert chain().producers() == {"a:0": (0, 0), "b:0": (1, 0)} and chain().consumers() == {
        "x": [(0, 0)],
        "a:0": [(1, 0)],
    }


def test_an_operators_fingerprint_is_free_of_names() -> None:
    graph = chain()
    first, second = graph.operators
    assert graph.operator_fingerprint(replace(second, name="else")) == graph.operator_fingerprint(
        second
    )
    assert graph.operator_fingerprint(first) != graph.operator_fingerprint(second), (
        "an input is another role than an activation"
    )
    assert graph.operator_fingerprint(
        replace(second, kind="aten.tanh.default")
    ) != graph.operator_fingerprint(second)
    assert graph.operator_fingerprint(
        replace(second, attributes={"self": Ref(0), "a": 1})
    ) != graph.operator_fingerprint(second)
    other = chain(tensors={**graph.tensors, "b:0": tensor("b:0", 4, dtype="float16")})
    assert other.operator_fingerprint(second) != graph.operator_fingerprint(second)


@pytest.mark.parametrize(
    "changes",
    [
        {"operators": (operator("a", ("x",), ("a:0",)), operator("c", ("a:0",), ("b:0",)))},
        {"operators": (operator("a", ("x",), ("a:0",)), operator("b", ("x",), ("b:0",)))},
        {"outputs": ("a:0",)},
        {"loss": "b:0"},
        {
            "operators": (
                operator("a", ("x",), ("a:0",)),
                operator("b", ("a:0",), ("b:0",), alpha=2),
            )
        },
    ],
)
def test_a_models_fingerprint_changes_with_the_model(changes: dict[str, Any]) -> None:
    assert (
        chain().fingerprint()
        == chain(name="another").fingerprint()
        != chain(**changes).fingerprint()
    )


def test_the_loss_is_the_models_own_scalar_or_a_mean_square() -> None:
    graph = with_loss(chain())
    assert (
        graph.loss == "loss/mean_square.0"
        and graph.operators[-1].attributes["count"] == 4
        and with_loss(graph) is graph
    )
    tensors = {**chain().tensors, "b:0": tensor("b:0")}
    assert with_loss(chain(tensors=tensors)).loss == "b:0"
    both = with_loss(chain(outputs=("a:0", "b:0")))
    assert both.loss == "loss/add.1" and both.operators[-1].inputs == (
        "loss/mean_square.0",
        "loss/mean_square.1",
    )
    assert with_loss(chain(outputs=("a:0", "b:0")), ["a:0"]).loss == "loss/mean_square.0"
    integers = {name: replace(t, dtype="int64") for name, t in chain().tensors.items()}
    assert with_loss(chain(tensors=integers)).loss is None


def test_another_dtype() -> None:
    graph = chain(
        operators=(
            operator("a", ("x",), ("a:0",), dtype="float32"),
            operator("b", ("a:0",), ("b:0",), kind="aten.to.dtype", dtype="float32"),
        )
    )
    cast = cast_graph(graph, "bfloat16")
    assert {t.dtype for t in cast.tensors.values()} == {"bfloat16"}
    assert all(op.attributes["dtype"] == "bfloat16" for op in cast.operators)
    with pytest.raises(ValueError, match="'int8' is none of"):
        cast_graph(graph, "int8")
