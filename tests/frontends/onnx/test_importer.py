"""The ONNX importer: operators, constants, weights, and the files that are refused."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from autopar.errors import AutoparError, ModelError, UnsupportedOperators, UsageError
from autopar.frontends.onnx import import_onnx
from autopar.ir.graph import Graph, Operator, Ref, Role

ROOT = Path(__file__).parents[3]
FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
BOOL = TensorProto.BOOL
Shape = list[int | str | None]


def example() -> ModuleType:
    """The example that writes GPT-2."""
    spec = importlib.util.spec_from_file_location("gpt2_onnx", ROOT / "examples" / "gpt2_onnx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt2_onnx"] = module
    spec.loader.exec_module(module)
    return module


def model(
    nodes: list[NodeProto],
    inputs: dict[str, tuple[int, Shape]],
    outputs: list[str],
    stored: dict[str, np.ndarray] | None = None,
    opset: int = 18,
) -> ModelProto:
    """A small model; the outputs' types are left open."""
    graph = helper.make_graph(
        nodes,
        "small",
        [
            helper.make_tensor_value_info(name, code, shape)
            for name, (code, shape) in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (stored or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def only(graph: Graph) -> Operator:
    """The single operator of a graph."""
    (operator,) = graph.operators
    return operator


def ints(*numbers: int) -> np.ndarray:
    """A list of 64-bit integers."""
    return np.array(numbers, np.int64)


def test_gpt2_small(tmp_path: Path) -> None:
    path = example().write_gpt2(tmp_path / "gpt2.onnx")
    graph = import_onnx(path, dims={"sequence": 128}, batch=8)
    assert len(graph.operators) == 329
    assert sum(tensor.size for tensor in graph.parameters) == 124_439_808
    assert all(tensor.trainable for tensor in graph.parameters)
    assert graph.tensors["logits"].shape == (8, 128, 50257)
    by_name = {operator.name: operator for operator in graph.operators}
    reshape = by_name["/h.0/attn/query/Reshape"]
    assert reshape.attributes == {"self": Ref(0), "shape": (8, 128, 12, 64)}
    assert by_name["/h.11/attn/Split"].attributes == {
        "self": Ref(0),
        "split_sizes": (768, 768, 768),
        "dim": 2,
    }
    assert by_name["/h.0/attn/Where"].inputs[0] == "causal_mask"
    assert graph.tensors["causal_mask"].role is Role.CONSTANT
    assert np.array_equal(graph.constants["causal_mask"], np.tril(np.ones((128, 128), bool)))
    assert graph.fingerprint() == import_onnx(path, dims={"sequence": 128}, batch=8).fingerprint()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = example().write_gpt2(
        tmp_path / "gpt2.onnx", layers=1, hidden=8, heads=2, vocabulary=11, positions=16
    )
    code = (
        f"import sys; from autopar.frontends.onnx import import_onnx; import_onnx({str(path)!r}, "
        f"dims={{'sequence': 4}}, batch=2)"
    )
    code += "; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("opset", "node", "stored", "expected"),
    [
        (11, helper.make_node("ReduceSum", ["x"], ["y"], axes=[-1], keepdims=0), {}, {"dim": (2,)}),
        (
            13,
            helper.make_node("ReduceSum", ["x", "a"], ["y"]),
            {"a": ints(-1, 0)},
            {"dim": (0, 2), "keepdim": True},
        ),
        (13, helper.make_node("ReduceMean", ["x"], ["y"]), {}, {"dim": (0, 1, 2), "keepdim": True}),
        (11, helper.make_node("Unsqueeze", ["x"], ["y"], axes=[-1]), {}, {"dim": 3}),
        (
            9,
            helper.make_node("Slice", ["x"], ["y"], starts=[1], ends=[-1], axes=[2]),
            {},
            {"dim": 2, "start": 1, "end": 3, "step": 1},
        ),
        (
            13,
            helper.make_node("Slice", ["x", "s", "e", "a", "p"], ["y"]),
            {"s": ints(-1), "e": ints(-9), "a": ints(1), "p": ints(-1)},
            {"dims": (1,)},
        ),
        (
            13,
            helper.make_node("Reshape", ["x", "s"], ["y"]),
            {"s": ints(0, -1)},
            {"shape": (2, 12)},
        ),
        (
            13,
            helper.make_node("Expand", ["x", "s"], ["y"]),
            {"s": ints(5, 1, 3, 1)},
            {"size": (5, 2, 3, 4)},
        ),
        (11, helper.make_node("Softmax", ["x"], ["y"], axis=2), {}, {"dim": 2}),
        (13, helper.make_node("Softmax", ["x"], ["y"]), {}, {"dim": 2}),
        (
            13,
            helper.make_node("Clip", ["x", "", "m"], ["y"]),
            {"m": np.array(6, np.float32)},
            {"max": 6.0},
        ),
        (
            10,
            helper.make_node("Pad", ["x"], ["y"], pads=[0, 0, 1, 0, 0, 2]),
            {},
            {"pad": (1, 2), "value": 0.0},
        ),
        (
            18,
            helper.make_node("Pad", ["x", "p", "", "a"], ["y"]),
            {"p": ints(1, 2), "a": ints(-1)},
            {"pad": (1, 2), "value": 0},
        ),
        (13, helper.make_node("Transpose", ["x"], ["y"]), {}, {"dims": (2, 1, 0)}),
        (
            13,
            helper.make_node("Tile", ["x", "r"], ["y"]),
            {"r": ints(1, 2, 1)},
            {"repeats": (1, 2, 1)},
        ),
        (
            14,
            helper.make_node("CumSum", ["x", "a"], ["y"]),
            {"a": np.array(1, np.int32)},
            {"dim": 1},
        ),
        (
            14,
            helper.make_node("Trilu", ["x", "k"], ["y"]),
            {"k": np.array(-1, np.int64)},
            {"diagonal": -1},
        ),
    ],
)
def test_one_spelling(
    opset: int, node: NodeProto, stored: dict[str, np.ndarray], expected: dict[str, object]
) -> None:
    operator = only(import_onnx(model([node], {"x": (FLOAT, [2, 3, 4])}, ["y"], stored, opset)))
    attributes = {
        name: value for name, value in operator.attributes.items() if not isinstance(value, Ref)
    }
    assert attributes == expected


def test_several_outputs() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("TopK", ["a", "k"], ["v", "i"]),
    ]
    graph = import_onnx(model(nodes, {"x": (FLOAT, [2, 5])}, ["v", "i", "b"], {"k": ints(2)}))
    split, _, values, places = graph.operators
    assert split.attributes["split_sizes"] == (3, 2)
    assert values.attributes["end"] == 2 and (values.name, places.name) == ("v", "v/slice")
    assert (*values.outputs, *places.outputs) == ("v", "i")
    assert graph.tensors["i"].dtype == "int64"


def test_windows_are_explicit() -> None:
    weight = np.zeros((4, 3, 3, 3), np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])
    proto = model([node], {"x": (FLOAT, [1, 3, 8, 8])}, ["y"], {"w": weight})
    padded, product = import_onnx(proto).operators
    assert (padded.name, product.name) == ("y/constant_pad_nd", "y")
    assert padded.attributes["pad"] == (0, 1, 0, 1)
    assert product.attributes["padding"] == (0, 0) and product.attributes["dilation"] == (1, 1)
    node = helper.make_node("Upsample", ["x", "s"], ["y"], mode="nearest")
    scales = {"s": np.array([1, 1, 2, 3], np.float32)}
    graph = import_onnx(model([node], {"x": (FLOAT, [1, 1, 2, 2])}, ["y"], scales, opset=9))
    places = [graph.constants[operator.inputs[1]].tolist() for operator in graph.operators]
    assert places == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_shape_arithmetic_is_folded_and_dead_operators_dropped() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"]),
        helper.make_node("Unsqueeze", ["rows", "first"], ["row_list"]),
        helper.make_node("Concat", ["row_list", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
        helper.make_node("Exp", ["x"], ["unused"]),
        helper.make_node("Identity", ["y"], ["same"]),
        helper.make_node("Cast", ["same"], ["cast"], to=FLOAT),
        helper.make_node("Relu", ["cast"], ["z"]),
    ]
    stored = {"zero": np.array(0, np.int64), "first": ints(0), "rest": ints(-1)}
    graph = import_onnx(model(nodes, {"x": (FLOAT, ["n", 3, 4])}, ["z"], stored), dims={"n": 2})
    assert [operator.kind for operator in graph.operators] == [
        "aten.reshape.default",
        "aten.relu.default",
    ]
    assert graph.operators[1].inputs == ("y",)
    assert not graph.constants


def test_large_constants_are_not_folded() -> None:
    nodes = [
        helper.make_node(
            "ConstantOfShape", ["shape"], ["ones"], value=helper.make_tensor("v", INT64, [1], [1])
        ),
        helper.make_node("Trilu", ["ones"], ["triangle"]),
        helper.make_node("Cast", ["triangle"], ["mask"], to=BOOL),
        helper.make_node("Where", ["mask", "x", "x"], ["y"]),
    ]
    graph = import_onnx(model(nodes, {"x": (FLOAT, [1])}, ["y"], {"shape": ints(4096, 4096)}))
    assert [operator.kind for operator in graph.operators] == [
        "aten.full.default",
        "aten.triu.default",
        "aten.to.dtype",
        "aten.where.self",
    ]
    made = {"size": (4096, 4096), "fill_value": 1, "dtype": "int64"}
    assert graph.operators[0].attributes == made


def test_products_with_a_transposed_weight_read_it_as_it_is_stored() -> None:
    """The weight is a parameter of its products, so that it is gathered, and its gradient summed,
    as one.
    """
    weight, other = (
        np.random.default_rng(seed).standard_normal((5, 4), dtype=np.float32) for seed in (0, 1)
    )
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
        helper.make_node("MatMul", ["y", "u"], ["z"]),
        helper.make_node("Transpose", ["u"], ["back"]),
        helper.make_node("MatMul", ["z", "back"], ["a"]),
        helper.make_node("Transpose", ["a"], ["swapped"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["a", "swapped"], ["b"]),
    ]
    proto = model(nodes, {"x": (FLOAT, [2, 3, 4])}, ["b"], {"w": weight, "u": other})
    graph = import_onnx(proto)
    linear = "aten.linear.default"
    assert [op.kind for op in graph.operators] == [
        linear,
        "aten.matmul.default",
        linear,
        "aten.permute.default",
        "aten.matmul.default",
    ]
    assert graph.operators[0].inputs == ("x", "w") and graph.operators[2].inputs == ("z", "u")
    assert {t.name for t in graph.parameters} == {"w", "u"}


def test_roles() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Mul", ["n", "half"], ["h"]),
        helper.make_node("Gather", ["h", "picks"], ["y"], axis=1),
    ]
    vector = np.ones(4, np.float32)
    stored = {
        "w": np.zeros((4, 3, 1, 1), np.float32),
        "scale": vector,
        "bias": vector,
        "mean": vector,
        "var": vector,
    }
    stored |= {"half": np.array(0.5, np.float32), "picks": ints(0, 2)}
    graph = import_onnx(model(nodes, {"x": (FLOAT, [1, 3, 2, 2])}, ["y"], stored))
    assert [tensor.name for tensor in graph.parameters] == ["w", "scale", "bias"]
    assert {name for name, tensor in graph.tensors.items() if tensor.role is Role.CONSTANT} == {
        "mean",
        "var",
        "half",
        "picks",
    }
    assert set(graph.constants) == {"half", "picks"}


def test_filled_weights_become_parameters() -> None:
    light = (
        Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_resnet50.onnx"
    )
    graph = import_onnx(light)
    assert sum(tensor.size for tensor in graph.parameters) > 25_000_000
    assert sum(tensor.name in graph.constants for tensor in graph.parameters) >= 140
    assert {operator.kind for operator in graph.operators} >= {
        "aten.conv2d.default",
        "aten.linear.default",
        "aten.batch_norm.default",
    }
    assert "aten.full.default" not in {operator.kind for operator in graph.operators}
    assert graph.tensors[graph.outputs[0]].shape == (1, 1000)


def test_sequences_and_branches_are_resolved() -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["second"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")]
    )
    other = helper.make_graph(
        [helper.make_node("Abs", ["second"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")]
    )
    nodes = [
        helper.make_node("SplitToSequence", ["x", "size"], ["pieces"], axis=1),
        helper.make_node("SequenceAt", ["pieces", "one"], ["second"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other),
    ]
    stored = {"size": np.array(2, np.int64), "one": np.array(1, np.int64), "yes": np.array(True)}
    graph = import_onnx(model(nodes, {"x": (FLOAT, [3, 5])}, ["y"], stored))
    assert [operator.kind for operator in graph.operators] == [
        "aten.split_with_sizes.default",
        "aten.relu.default",
    ]
    assert graph.operators[0].attributes["split_sizes"] == (2, 2, 1)


def test_local_functions_are_inlined() -> None:
    body = helper.make_function(
        "mine",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    proto = model(
        [helper.make_node("Twice", ["x"], ["y"], domain="mine")], {"x": (FLOAT, [3])}, ["y"]
    )
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    proto.functions.append(body)
    operator = only(import_onnx(proto))
    assert operator.kind == "aten.add.Tensor" and operator.inputs == ("x", "x")


def test_every_unknown_operator_is_named() -> None:
    nodes = [
        helper.make_node("Rellu", ["x"], ["a"]),
        helper.make_node("Tokenizer", ["a", "a"], ["b"], domain="com.microsoft"),
        helper.make_node("Rellu", ["b"], ["y"]),
    ]
    with pytest.raises(UnsupportedOperators) as caught:
        import_onnx(model(nodes, {"x": (FLOAT, ["n"])}, ["y"]))
    assert caught.value.counts == {"onnx.Rellu": 2, "com.microsoft.Tokenizer": 1}
    assert "onnx.Relu" in str(caught.value)


def loop() -> NodeProto:
    """A Loop node."""
    body = helper.make_graph([], "body", [], [onnx.ValueInfoProto(name="c")])
    return helper.make_node("Loop", ["n", "c", "x"], ["y"], name="again", body=body)


@pytest.mark.parametrize(
    ("nodes", "stored", "words"),
    [
        ([loop()], {"n": np.array(3, np.int64), "c": np.array(True)}, ("again", "onnx.Loop")),
        (
            [helper.make_node("NonZero", ["x"], ["y"], name="nz")],
            {},
            ("nz", "depends on the values"),
        ),
        (
            [
                helper.make_node("Cast", ["x"], ["s"], to=INT64),
                helper.make_node("Slice", ["x", "s", "s"], ["y"], name="cut"),
            ],
            {},
            ("cut", "starts"),
        ),
        (
            [helper.make_node("Add", ["x", "w"], ["y"], name="sum")],
            {"w": np.zeros(3, np.float32)},
            ("sum", "do not fit together", "(2,)"),
        ),
        ([helper.make_node("Relu", ["nothing"], ["y"], name="r")], {}, ("nothing",)),
        ([helper.make_node("Relu", ["x"], ["z"])], {}, ("output 'y' is never made",)),
        ([helper.make_node("Transpose", ["x"], ["y"], perm=[0, 1])], {}, ("Transpose",)),
    ],
)
def test_refused_models(
    nodes: list[NodeProto], stored: dict[str, np.ndarray], words: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        import_onnx(model(nodes, {"x": (FLOAT, [2])}, ["y"], stored))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model file"):
        import_onnx(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match="folder"):
        import_onnx(tmp_path)
    path = tmp_path / "text.onnx"
    path.write_text("this is not a model")
    with pytest.raises(ModelError, match="not an ONNX model"):
        import_onnx(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="not an ONNX model"):
        import_onnx(path)
    with pytest.raises(ModelError, match="opset 6"):
        import_onnx(
            model([helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, [2])}, ["y"], opset=6)
        )


def test_damaged_files_give_errors_for_users(tmp_path: Path) -> None:
    whole = (
        example()
        .write_gpt2(tmp_path / "g.onnx", layers=1, hidden=8, heads=2, vocabulary=11, positions=16)
        .read_bytes()
    )
    path = tmp_path / "damaged.onnx"
    generator = random.Random(0)
    for i in range(300):
        data = bytearray(whole[: generator.randrange(len(whole))] if i % 3 == 0 else whole)
        for _ in range(3):
            if data:
                data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        try:
            import_onnx(path, dims={"sequence": 4}, batch=2)
        except AutoparError:
            continue


def test_options_are_checked() -> None:
    proto = model(
        [helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["batch", "length"])}, ["y"]
    )
    with pytest.raises(ModelError, match=r"--dim batch=SIZE --dim length=SIZE"):
        import_onnx(proto)
    with pytest.raises(UsageError, match="Perhaps you meant 'length'"):
        import_onnx(proto, dims={"lenght": 3})
    with pytest.raises(UsageError, match="unknown input 'z'"):
        import_onnx(proto, shapes={"z": (1, 2)})
    assert import_onnx(proto, shapes={"x": (4, 5)}).tensors["y"].shape == (4, 5)
