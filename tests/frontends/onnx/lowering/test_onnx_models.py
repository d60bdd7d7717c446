"""Whole public models with random weights agree with onnxruntime: the convolutional networks of the
onnx package, graphs of onnxscript.
"""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from autopar.frontends.onnx import import_onnx, load_weights
from autopar.frontends.onnx.model import stored_tensors
from autopar.runtime.models.onnx_module import OnnxModule, to_torch

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NETWORKS = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
SCRIPTS = ("bart_encoder", "smollm_2", "whisper_decoder", "whisper_encoder")


def drawn(
    rng: np.random.Generator, shape: tuple[int, ...], name: str, *, positive: bool
) -> TensorProto:
    """A weight whose products keep the size of their inputs, or a positive statistic."""
    fan_in = math.prod(shape[1:])
    values = rng.standard_normal(shape, dtype=np.float32) * math.sqrt(1.5 / fan_in)
    return numpy_helper.from_array(1 + np.abs(values) if positive else values, name)


def network(name: str) -> ModelProto:
    """A network of the package; the weights, which it makes by repeating one number, are drawn."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    rng = np.random.default_rng(0)
    parameters = {
        tensor.name: tensor
        for tensor in import_onnx(model).tensors.values()
        if tensor.role in ("parameter", "constant")
    }
    variances = {node.input[4] for node in model.graph.node if node.op_type == "BatchNormalization"}
    kept = []
    for node in model.graph.node:
        stored = parameters.get(node.output[0]) if node.op_type == "ConstantOfShape" else None
        if stored is None:
            kept.append(node)
        else:
            model.graph.initializer.append(
                drawn(rng, stored.shape, stored.name, positive=stored.name in variances)
            )
    assert len(kept) < len(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def script(name: str) -> ModelProto:
    """A graph that onnxscript spells out; its matrices are drawn anew, since its own, between 0 and
    1, magnify rounding.
    """
    state = np.random.get_state()
    try:
        model: ModelProto = importlib.import_module(
            f"onnxscript.rewriter.models._{name}"
        ).make_model_with_random_weights()
    finally:
        np.random.set_state(state)
    rng = np.random.default_rng(0)
    for tensor in stored_tensors(model.graph):
        shape = tuple(tensor.dims)
        if tensor.data_type == TensorProto.FLOAT and (len(shape) >= 2 or math.prod(shape) >= 16):
            scale = drawn(
                rng, shape if len(shape) > 1 else (1, *shape), tensor.name, positive=len(shape) == 1
            )
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(scale).reshape(shape), tensor.name)
            )
    return model


def feeds(model: ModelProto, size: int) -> dict[str, np.ndarray]:
    """Random images, tokens, masks of ones and counted positions; dims without a number take
    `size`.
    """
    rng = np.random.default_rng(1)
    stored = {tensor.name for tensor in model.graph.initializer}
    results: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name in stored:
            continue
        shape = [dim.dim_value or size for dim in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if "position" in value.name:
            results[value.name] = np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy()
        elif "mask" in value.name:
            results[value.name] = np.ones(shape, dtype)
        else:
            results[value.name] = (
                rng.standard_normal(shape).astype(dtype)
                if dtype.kind == "f"
                else rng.integers(0, 50, shape).astype(dtype)
            )
    return results


def agree(model: ModelProto, inputs: dict[str, np.ndarray]) -> None:
    """Fails where an output differs from onnxruntime's by more than a hundred-thousandth of the
    largest.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    wanted = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    graph = import_onnx(model, shapes={name: value.shape for name, value in inputs.items()})
    with torch.no_grad():
        actual = OnnxModule(graph, load_weights(model))(
            *[to_torch(inputs[name]) for name in graph.inputs]
        )
    for value, right in zip(actual, wanted, strict=True):
        assert tuple(value.shape) == right.shape and float(np.std(right)) > 0
        np.testing.assert_allclose(
            value.numpy(), right, rtol=0, atol=1e-5 * float(np.abs(right).max())
        )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", NETWORKS)
def test_network_agrees_with_onnxruntime(name: str) -> None:
    model = network(name)
    agree(model, feeds(model, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_transformer_agrees_with_onnxruntime(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = script(name)
    agree(model, feeds(model, 4))
