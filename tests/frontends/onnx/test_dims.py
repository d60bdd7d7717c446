"""Binding of symbolic dims, and a new batch for a model that was written with a fixed one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from autopar.errors import ModelError, UsageError
from autopar.frontends.onnx import import_onnx
from autopar.frontends.onnx.dims import Dim, bind_dims
from autopar.frontends.onnx.rebatch import scaled_reshape

Inputs = dict[str, tuple[Dim, ...] | None]


Shapes = dict[str, tuple[int, ...]]


def bound(
    inputs: Inputs, *, batch: int | None = None, shapes: Shapes | None = None, **dims: int
) -> Shapes:
    """The sizes found."""
    return bind_dims(inputs, dims=dims, batch=batch, shapes=shapes or {}).shapes


def test_names_and_expressions() -> None:
    assert bound({"x": ("a", "a + b", "2*(b-1)", "a//2", "max(a, b)")}, a=4, b=3) == {
        "x": (4, 7, 4, 2, 4)
    }
    assert bound({"x": ("b", 3), "y": ("b", "s")}, shapes={"y": (2, 5)}) == {
        "x": (2, 3),
        "y": (2, 5),
    }
    assert bound({"x": (None, 3), "y": None}, shapes={"x": (2, 3), "y": (7,)}) == {
        "x": (2, 3),
        "y": (7,),
    }


@pytest.mark.parametrize("text", ["a**2", "__import__('os')", "a/3", "a+", "a b", "a//0"])
def test_odd_expressions_are_refused(text: str) -> None:
    with pytest.raises((ModelError, UsageError)):
        bound({"x": ("a", text)}, a=4)


def test_open_dims_are_all_listed() -> None:
    with pytest.raises(ModelError) as caught:
        bound({"x": ("a", "b + c"), "y": (None, 3), "z": None}, a=1)
    assert "--dim b=SIZE --dim c=SIZE --dim y.0=SIZE --shape z=1x30" in str(caught.value)


def test_conflicts() -> None:
    with pytest.raises(UsageError, match="two sizes"):
        bound({"x": ("b", 3)}, batch=4, b=2)
    with pytest.raises(UsageError, match="fixed"):
        bound({"x": (2, 3)}, shapes={"x": (4, 3)})
    with pytest.raises(UsageError, match="dims"):
        bound({"x": (2, 3)}, shapes={"x": (2, 3, 4)})


def test_batch() -> None:
    assert bound({"x": ("n", 3), "m": (None, 2), "t": ()}, batch=4) == {
        "x": (4, 3),
        "m": (4, 2),
        "t": (),
    }
    actual = bind_dims({"x": (8, 3), "y": (8,), "w": (5, 5)}, dims={}, batch=2, shapes={})
    assert actual.shapes == {"x": (2, 3), "y": (2,), "w": (5, 5)} and actual.old_batch == 8


def test_scaled_reshape() -> None:
    assert scaled_reshape((8, 16, 4), (2, 16, 4), (8, 2, 8, 4)) == (2, 2, 8, 4)
    assert scaled_reshape((8, 16, 4), (2, 16, 4), (128, 4)) == (32, 4)
    assert scaled_reshape((128, 4), (32, 4), (8, 16, 4)) == (2, 16, 4)
    assert scaled_reshape((16, 8, 4), (16, 2, 4), (128, 4)) is None
    assert scaled_reshape((16, 8, 4), (16, 2, 4), (16, 8, 2, 2)) == (16, 2, 2, 2)


def fixed(nodes: list[NodeProto], shape: list[int], **stored: np.ndarray) -> onnx.ModelProto:
    """A model over one input of a fixed shape."""
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_written_batch_follows() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "flat"], ["f"]),
        helper.make_node("Expand", ["token", "wide"], ["e"]),
        helper.make_node("Reshape", ["f", "back"], ["b"]),
        helper.make_node("Concat", ["e", "b"], ["y"], axis=1),
    ]
    token = np.zeros((1, 1, 12), np.float32)
    lists = {"heads": [8, 5, 3, 4], "flat": [24, 20], "wide": [8, 1, 12], "back": [8, 5, 12]}
    proto = fixed(
        nodes, [8, 5, 12], token=token, **{name: np.array(sizes) for name, sizes in lists.items()}
    )
    graph = import_onnx(proto, batch=6)
    assert graph.tensors["f"].shape == (18, 20)
    assert graph.tensors["y"].shape == (6, 6, 12)


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Add", ["x", "table"], ["y"])],
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
            helper.make_node("Reshape", ["t", "flat"], ["y"]),
        ],
        [helper.make_node("Slice", ["x", "none", "eight", "none"], ["y"])],
        [helper.make_node("Gather", ["x", "picks"], ["y"])],
        [helper.make_node("Split", ["x", "halves"], ["y", "z"])],
    ],
)
def test_written_batch_that_cannot_follow_is_refused(nodes: list[NodeProto]) -> None:
    stored = {
        "table": np.zeros((8, 5), np.float32),
        "flat": np.array([40]),
        "none": np.array([0]),
        "eight": np.array([8]),
        "picks": np.array([0, 7]),
        "halves": np.array([4, 4]),
    }
    proto = fixed(nodes, [8, 5], **stored)
    import_onnx(proto)
    with pytest.raises(ModelError):
        import_onnx(proto, batch=16)
