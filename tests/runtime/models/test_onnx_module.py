"""Imported models run on one device and agree with onnxruntime."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from autopar.errors import ModelError, UnsupportedOperators
from autopar.frontends.onnx import import_onnx, load_weights
from autopar.runtime.models.onnx_module import OnnxModule

ROOT = Path(__file__).parents[3]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def example() -> ModuleType:
    """The example that writes GPT-2."""
    spec = importlib.util.spec_from_file_location("gpt2_onnx", ROOT / "examples" / "gpt2_onnx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt2_onnx"] = module
    spec.loader.exec_module(module)
    return module


def tiny(folder: Path, *, weights: bool) -> Path:
    """A GPT-2 of two layers."""
    path: Path = example().write_gpt2(
        folder / "t.onnx",
        layers=2,
        hidden=32,
        heads=4,
        vocabulary=101,
        positions=16,
        weights=weights,
    )
    return path


def test_gpt2_agrees_with_onnxruntime(tmp_path: Path) -> None:
    path = tiny(tmp_path, weights=True)
    module = OnnxModule(import_onnx(path, dims={"sequence": 10}, batch=3), load_weights(path))
    ids = np.random.default_rng(0).integers(0, 101, (3, 10))
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"input_ids": ids})
    (actual,) = module(torch.from_numpy(ids))
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-6)
    actual.square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in module.parameters()
    )
    assert set(module.named_tensors()) >= {
        "wte.weight",
        "h.0.attn.c_attn.weight",
        "h.1.mlp.c_proj.bias",
    }


def test_double_precision_is_kept(tmp_path: Path) -> None:
    path = tiny(tmp_path, weights=True)
    module = OnnxModule(
        import_onnx(path, dims={"sequence": 4}, batch=2), load_weights(path)
    ).double()
    ids = torch.arange(8).reshape(2, 4)
    (exact,) = module(ids)
    assert exact.dtype == torch.float64
    weight = module.named_tensors()["h.0.mlp.c_fc.weight"]
    loss = exact.square().sum()
    (gradient,) = torch.autograd.grad(loss, [weight])
    step = 1e-6
    with torch.no_grad():
        weight[3, 5] += step
        higher = module(ids)[0].square().sum()
        weight[3, 5] -= 2 * step
        lower = module(ids)[0].square().sum()
    assert torch.isclose((higher - lower) / (2 * step), gradient[3, 5], rtol=1e-5)


def test_fresh_weights_depend_on_the_seed_and_the_name_only(tmp_path: Path) -> None:
    graph = import_onnx(tiny(tmp_path, weights=False), dims={"sequence": 4}, batch=2)
    first = OnnxModule(graph)
    again = OnnxModule(graph, seed=0)
    other = OnnxModule(graph, seed=1)
    for name, tensor in first.named_tensors().items():
        assert torch.equal(tensor, again.named_tensors()[name])
    weights = first.named_tensors()
    assert not torch.equal(weights["wte.weight"], other.named_tensors()["wte.weight"])
    assert (
        abs(weights["h.0.ln_1.weight"].mean() - 1) < 0.1
        and abs(weights["h.0.ln_1.bias"].mean()) < 0.1
    )
    assert 0.05 < first(torch.arange(8).reshape(2, 4))[0].std() < 20


@pytest.mark.parametrize("name", ["resnet50", "squeezenet", "shufflenet"])
def test_light_networks_agree_with_onnxruntime(name: str) -> None:
    path = LIGHT / f"light_{name}.onnx"
    graph = import_onnx(path)
    x = (
        np.random.default_rng(0)
        .standard_normal(graph.tensors[graph.inputs[0]].shape)
        .astype(np.float32)
    )
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {graph.inputs[0]: x})
    with torch.no_grad():
        (actual,) = OnnxModule(graph)(torch.from_numpy(x))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-6)


def random_model() -> onnx.ModelProto:
    """A network of convolutions, norms and a recurrent layer with random weights."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], auto_pad="SAME_LOWER", strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"]),
        helper.make_node(
            "MaxPool",
            ["n"],
            ["p"],
            kernel_shape=[3, 3],
            strides=[2, 2],
            ceil_mode=1,
            pads=[1, 1, 0, 0],
        ),
        helper.make_node(
            "Resize",
            ["p", "", "scales"],
            ["r"],
            mode="linear",
            coordinate_transformation_mode="align_corners",
        ),
        helper.make_node("InstanceNormalization", ["r", "s", "t"], ["i"]),
        helper.make_node("HardSwish", ["i"], ["h"]),
        helper.make_node("Flatten", ["h"], ["f"], axis=2),
        helper.make_node("Unsqueeze", ["f", "axis"], ["u"]),
        helper.make_node(
            "LSTM", ["u", "lw", "lr", "lb"], ["", "last"], hidden_size=5, direction="bidirectional"
        ),
        helper.make_node("Einsum", ["last", "last"], ["y"], equation="dbh,dbk->bhk"),
    ]
    vector = [rng.standard_normal(6).astype(np.float32) for _ in range(3)]
    stored: dict[str, np.ndarray] = {
        "w": rng.standard_normal((6, 3, 4, 4)),
        "b": vector[0],
        "s": vector[1],
        "t": vector[2],
        "m": vector[0],
        "v": np.abs(vector[1]),
        "scales": np.array([1, 1, 2, 1.5]),
        "lw": rng.standard_normal((2, 20, 48)) / 7,
        "lr": rng.standard_normal((2, 20, 5)) / 2,
        "lb": rng.standard_normal((2, 40)),
    }
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 13, 15])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
        + [numpy_helper.from_array(np.array([0]), "axis")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_random_network_agrees_with_onnxruntime() -> None:
    proto = random_model()
    x = np.random.default_rng(0).standard_normal((2, 3, 13, 15)).astype(np.float32)
    graph = import_onnx(proto)
    width = graph.tensors["f"].shape
    lstm = next(tensor for tensor in proto.graph.initializer if tensor.name == "lw")
    columns = width[1]
    weights = np.random.default_rng(2).standard_normal((2, 20, columns)).astype(np.float32) / 7
    lstm.CopyFrom(numpy_helper.from_array(weights, "lw"))
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    module = OnnxModule(import_onnx(proto), load_weights(proto))
    (actual,) = module(torch.from_numpy(x))
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_weights_in_constant_nodes() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight)),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])]
    made = helper.make_graph(
        nodes, "constant", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2])]
    )
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    graph = import_onnx(proto)
    assert [tensor.name for tensor in graph.parameters] == ["w"]
    x = torch.ones(4, 3)
    (y,) = OnnxModule(graph, load_weights(proto))(x)
    assert torch.allclose(y, x @ torch.from_numpy(weight))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path, weights=True)
    graph = import_onnx(path, dims={"sequence": 4}, batch=2)
    with pytest.raises(ModelError, match="no values are given"):
        OnnxModule(graph, [])
    with pytest.raises(ModelError, match="has the shape"):
        OnnxModule(graph, [("wte.weight", np.zeros((2, 2), np.float32))])
    module = OnnxModule(graph, load_weights(path))
    with pytest.raises(ModelError, match="input_ids"):
        module(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="takes 1 inputs"):
        module()
    node = helper.make_node("RandomNormalLike", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 3]) for name in ("x", "y")]
    proto = helper.make_model(
        helper.make_graph([node], "random", values[:1], values[1:]),
        opset_imports=[helper.make_opsetid("", 18)],
    )
    with pytest.raises(UnsupportedOperators, match="RandomNormalLike"):
        OnnxModule(import_onnx(proto))


def test_a_size_that_the_values_decide_is_what_the_model_declares() -> None:
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [5]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [3]),
    ]
    made = helper.make_graph(
        [helper.make_node("Unique", ["x"], ["y"])], "unique", values[:1], values[1:]
    )
    module = OnnxModule(
        import_onnx(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)]))
    )
    assert module(torch.tensor([3.0, 1.0, 2.0, 1.0, 3.0]))[0].tolist() == [1, 2, 3]
    with pytest.raises(ModelError, match=r"'y' of the shape \(5,\).*declares \(3,\)"):
        module(torch.arange(5.0))
