"""Loops and scans are written out round by round, and are what onnxruntime computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import ModelProto, parser

from autopar.errors import ModelError
from autopar.frontends.onnx import import_onnx, load_weights
from autopar.ir import Graph
from autopar.runtime.models.onnx_module import OnnxModule

onnxruntime = pytest.importorskip("onnxruntime")
LOOP = """<ir_version: 9, opset_import: ["" : {version}]>
g (float[4,3] x) => (float[4,3] y, float[5,4,3] s) <int64 n = {{5}}, bool c = {{1}}> {{
  y, s = Loop (n, c, x) <body = b (int64 i, bool ci, float[4,3] v)
      => (bool co, float[4,3] vo, float[4,3] so) {{
    k = Cast <to = 1> (i)
    v1 = Add (v, k)
    vo = Tanh (v1)
    so = Mul (vo, x)
    co = Identity (ci)
  }}>
}}"""
ENDED = """<ir_version: 9, opset_import: ["" : 18]>
g (float[4,3] x) => (float[4,3] y) <int64 n = {9}, bool c = {1}, int64 three = {3}> {
  y = Loop (n, c, x) <body = b (int64 i, bool ci, float[4,3] v) => (bool co, float[4,3] vo) {
    vo = Sin (v)
    co = Less (i, three)
  }>
}"""
SCAN = """<ir_version: 9, opset_import: ["" : 18]>
g (float[4,8] s, float[6,4,8] x) => (float[4,8] f, float[6,4,8] ys, float[4,6,8] zs) {
  f, ys, zs = Scan (s, x) <body: graph = b (float[4,8] s, float[4,8] xi)
      => (float[4,8] s1, float[4,8] a, float[4,8] b) {
    s0 = Add (s, xi)
    s1 = Tanh (s0)
    a = Identity (s1)
    b = Mul (xi, xi)
  }, num_scan_inputs: int = 1, scan_output_axes: ints = [0, 1],
  scan_input_directions: ints = [1], scan_output_directions: ints = [0, 1]>
}"""


def require_equal(model: ModelProto, *inputs: np.ndarray) -> OnnxModule:
    """The module of a model, whose results are those of onnxruntime."""
    graph = import_onnx(model)
    module = OnnxModule(graph, load_weights(model))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wanted = session.run(None, dict(zip(graph.inputs, inputs, strict=True)))
    for actual, other in zip(module(*map(torch.from_numpy, inputs)), wanted, strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), other, atol=1e-5)
    return module


def draw(*shape: int) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _count(kind: str, graph: Graph) -> int:
    """The operators of a kind, with those inside trees of pointwise operators."""
    return sum(f"{op.kind} {op.attributes}".count(kind) for op in graph.operators)


@pytest.mark.parametrize("version", [11, 18, 22])
def test_a_loop_of_a_known_number_of_rounds(version: int) -> None:
    module = require_equal(parser.parse_model(LOOP.format(version=version)), draw(4, 3))
    assert _count("aten.tanh.default", module.graph) == 5


def test_a_loop_ends_where_its_body_says() -> None:
    module = require_equal(parser.parse_model(ENDED), draw(4, 3))
    assert _count("aten.sin.default", module.graph) == 4


def test_a_scan_in_both_directions() -> None:
    """The body's `s` is another one than the graph's."""
    require_equal(parser.parse_model(SCAN), draw(4, 8), draw(6, 4, 8))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("int64 n = {5}", "int64 n = {9999}", "has 9999 rounds|has 1025 rounds"),
        ("(float[4,3] x)", "(float[4,3] x, int64 n)", "give them by --value"),
        ("co = Identity (ci)", "co = IsNaN (q)", "goes on as values"),
    ],
)
def test_what_is_not_written_out(old: str, new: str, words: str) -> None:
    text = LOOP.format(version=18).replace(old, new)
    if "(float[4,3] x, int64 n)" in text:
        text = text.replace("int64 n = {5}, ", "")
    if "IsNaN" in text:
        text = text.replace("co = ", "q = ReduceMax <keepdims = 0> (vo)\n    co = ")
    with pytest.raises(ModelError, match=words):
        import_onnx(parser.parse_model(text))
