"""Files of every opset from 7 on: what was an attribute and became an input, defaults that changed,
operators that were renamed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, version_converter

from autopar.errors import ModelError
from autopar.frontends.onnx import import_onnx
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from tests.frontends.onnx.lowering.node_report import compare
from tests.frontends.onnx.lowering.node_tests import node_tests
from tests.frontends.onnx.lowering.onnx_cases import Case

RNG = np.random.default_rng(7)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 3, 5, 6)).astype(np.float32)
VECTOR = np.array([0.5, -1.0, 2.0], np.float32)
MATRIX = RNG.standard_normal((4, 3)).astype(np.float32)


def whole(*numbers: int) -> np.ndarray:
    """A vector of integers."""
    return np.array(numbers, np.int64)


def reals(*numbers: float) -> np.ndarray:
    """A vector of floats."""
    return np.array(numbers, np.float32)


GATES = RNG.standard_normal((1, 8, 4)).astype(np.float32)
BOXES = reals(0, 0, 3, 4, 1, 1, 5, 5).reshape(2, 4)
Inputs = Sequence[np.ndarray | None]
# Kind, the opsets in which it was written so, inputs, attributes, the inputs that are stored, the
# number of outputs.
FORMS: list[tuple[str, Sequence[int], Inputs, dict[str, Any], Sequence[int], int]] = [
    ("Squeeze", (7, 11), [X[:, :1]], {"axes": [1]}, (), 1),
    ("Squeeze", (13, 21), [X[:, :1], whole(-2)], {}, (1,), 1),
    ("Unsqueeze", (7, 11), [X], {"axes": [0, 4]}, (), 1),
    ("Unsqueeze", (13, 21), [X, whole(0, -1)], {}, (1,), 1),
    ("Slice", (7, 9), [X], {"starts": [0, -3], "ends": [9, 3], "axes": [1, 2]}, (), 1),
    ("Slice", (7,), [X], {"starts": [1], "ends": [2]}, (), 1),
    ("Slice", (10, 13), [X, whole(3), whole(-9), whole(-1), whole(-2)], {}, (1, 2, 3, 4), 1),
    ("Clip", (7, 10), [X], {"min": -0.3, "max": 0.4}, (), 1),
    ("Clip", (7,), [X], {}, (), 1),
    ("Clip", (11, 13), [X, None, np.float32(0.2)], {}, (2,), 1),
    ("Dropout", (7, 10), [X], {"ratio": 0.3}, (), 1),
    ("Dropout", (12, 22), [X, np.float32(0.3)], {}, (1,), 1),
    ("Pad", (7, 10), [X], {"pads": [0, 1, 2, 1, 0, 1], "value": 1.5}, (), 1),
    ("Pad", (11, 13), [X, whole(0, 1, 2, 1, 0, 1), np.float32(2)], {}, (1, 2), 1),
    ("Pad", (18, 21), [X, whole(1, 2), np.float32(2), whole(-1)], {}, (1, 2, 3), 1),
    ("TopK", (7, 9), [X], {"k": 2, "axis": 1}, (), 2),
    ("TopK", (10,), [X, whole(2)], {"axis": 1}, (1,), 2),
    ("TopK", (11, 21), [X, whole(3)], {"axis": -1, "largest": 0}, (1,), 2),
    ("Upsample", (7, 8), [IMAGE], {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}, (), 1),
    ("Upsample", (9,), [IMAGE, reals(1, 1, 2, 3)], {"mode": "linear"}, (1,), 1),
    ("Resize", (10,), [IMAGE, reals(1, 1, 0.6, 1.5)], {"mode": "linear"}, (1,), 1),
    ("Resize", (11, 13), [IMAGE, reals(), reals(1, 1, 2, 1.5)], {"mode": "nearest"}, (1, 2), 1),
    (
        "Resize",
        (18,),
        [IMAGE, None, None, whole(7, 4)],
        {"mode": "cubic", "axes": [2, 3], "antialias": 1},
        (3,),
        1,
    ),
    *[
        (f"Reduce{kind}", (7, 11), [X * X], {"axes": [1, -1], "keepdims": 0}, (), 1)
        for kind in ("Sum", "Mean", "Max", "Prod", "LogSumExp")
    ],
    ("ReduceSum", (13, 21), [X, whole(0, -1)], {"keepdims": 0}, (1,), 1),
    ("ReduceMean", (13,), [X], {"axes": [1]}, (), 1),
    ("ReduceMean", (18,), [X, whole(1)], {}, (1,), 1),
    ("ReduceL2", (18,), [X], {"noop_with_empty_axes": 1}, (), 1),
    ("Split", (7, 11), [X], {"axis": 2, "split": [1, 3]}, (), 2),
    ("Split", (7, 11), [X], {"axis": 2}, (), 2),
    ("Split", (13,), [X, whole(1, 3)], {"axis": 2}, (1,), 2),
    ("Split", (18, 21), [X], {"axis": 1, "num_outputs": 2}, (), 2),
    *[(kind, (7, 11, 13), [X], {}, (), 1) for kind in ("Softmax", "LogSoftmax", "Hardmax")],
    *[
        (kind, (7, 11, 13), [X], {"axis": 1}, (), 1)
        for kind in ("Softmax", "LogSoftmax", "Hardmax")
    ],
    (
        "BatchNormalization",
        (7, 9, 14, 15),
        [IMAGE, VECTOR, VECTOR, VECTOR, VECTOR**2],
        {"epsilon": 0.01},
        (1, 2, 3, 4),
        1,
    ),
    (
        "Scatter",
        (9, 10),
        [X, whole(2, 0, 1, 2, 0, 1).reshape(2, 3, 1) % 3, X[:, :, :1]],
        {"axis": 1},
        (),
        1,
    ),
    ("ArgMax", (7, 11, 13), [X], {"axis": 1, "keepdims": 0}, (), 1),
    ("Cast", (7, 9, 13), [X], {"to": 11}, (), 1),
    (
        "Gemm",
        (7, 9, 11, 13),
        [MATRIX, MATRIX, VECTOR[:1]],
        {"transB": 1, "alpha": 0.5, "beta": 2.0},
        (),
        1,
    ),
    ("MaxPool", (7, 8, 10, 12), [IMAGE], {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"}, (), 1),
    (
        "AveragePool",
        (7, 10, 11, 19),
        [IMAGE],
        {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1], "count_include_pad": 1},
        (),
        1,
    ),
    ("GlobalLpPool", (7,), [IMAGE], {"p": 3}, (), 1),
    ("GlobalMaxPool", (7,), [IMAGE], {}, (), 1),
    ("LpPool", (7, 11), [IMAGE], {"kernel_shape": [2, 2]}, (), 1),
    ("PRelu", (7, 9, 16), [IMAGE, VECTOR.reshape(3, 1, 1)], {}, (1,), 1),
    ("Pow", (7, 12, 15), [X * X, X], {}, (), 1),
    ("Expand", (8, 13), [X, whole(3, 1, 1, 1)], {}, (1,), 1),
    ("Tile", (7, 13), [X, whole(1, 2, 1)], {}, (1,), 1),
    (
        "OneHot",
        (9, 11),
        [whole(0, -1, 2), np.array(3, np.int64), reals(-1, 4)],
        {"axis": 0},
        (1,),
        1,
    ),
    ("InstanceNormalization", (7, 22), [IMAGE, VECTOR, VECTOR], {}, (1, 2), 1),
    ("Flatten", (7, 9, 11), [IMAGE], {"axis": 2}, (), 1),
    (
        "GroupNormalization",
        (21,),
        [IMAGE.repeat(2, 1), np.tile(VECTOR, 2), np.tile(VECTOR, 2)],
        {"num_groups": 2},
        (1, 2),
        1,
    ),
    ("DepthToSpace", (7, 11), [IMAGE[:, :1].repeat(4, 1)], {"blocksize": 2}, (), 1),
    ("CumSum", (11, 14), [X, np.array(1)], {}, (1,), 1),
    ("Equal", (7, 11), [whole(1, 2), whole(1, 3)], {}, (), 1),
    ("Where", (9, 16), [X > 0, X, X * 2], {}, (), 1),
    (
        "DequantizeLinear",
        (10, 13),
        [np.arange(6, dtype=np.uint8), np.float32(0.5), np.uint8(3)],
        {},
        (1, 2),
        1,
    ),
    ("QuantizeLinear", (10, 13, 19), [X, np.float32(0.05), np.uint8(100)], {}, (1, 2), 1),
    ("LSTM", (7, 14), [X, GATES, GATES[:, :, :2]], {"hidden_size": 2}, (1, 2), 3),
    ("Mean", (8, 13), [X, X * X], {}, (), 1),
    ("Sum", (8, 13), [X, X[:1]], {}, (), 1),
    ("Max", (8, 12), [X, X[:, :1]], {}, (), 1),
    (
        "RoiAlign",
        (10, 16),
        [IMAGE, BOXES, whole(0, 1)],
        {"output_height": 2, "output_width": 2, "sampling_ratio": 2},
        (),
        1,
    ),
    ("Celu", (12,), [X], {"alpha": 2.0}, (), 1),
    ("LayerNormalization", (17,), [X, VECTOR[:1].repeat(4)], {}, (1,), 1),
    ("HardSwish", (14, 22), [X], {}, (), 1),
    ("Trilu", (14,), [X, np.array(-1)], {"upper": 0}, (1,), 1),
]


def cases() -> Iterator[Any]:
    """Every form in every opset, named."""
    for i, (kind, opsets, inputs, attributes, stored, outputs) in enumerate(FORMS):
        for opset in opsets:
            case = Case(
                kind=kind,
                inputs=inputs,
                attributes=attributes,
                stored=stored,
                outputs=outputs,
                opset=opset,
            )
            yield pytest.param(case, id=f"{kind}-{opset}-{i}")


def ours(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of the imported model."""
    graph = import_onnx(model)
    stored = [
        (tensor.name, onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer
    ]
    with torch.no_grad():
        return [
            value.numpy()
            for value in OnnxModule(graph, stored)(
                *[to_torch(feeds[name]) for name in graph.inputs]
            )
        ]


@pytest.mark.parametrize("case", list(cases()))
def test_form_agrees_with_onnxruntime(case: Case) -> None:
    onnxruntime.set_default_logger_severity(3)
    model = case.model()
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, case.feeds())
    for actual, right in zip(ours(model, case.feeds()), wanted, strict=True):
        assert actual.shape == right.shape and actual.dtype == right.dtype
        np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-5)


def converted_forms(target: int) -> Iterator[tuple[Case, ModelProto]]:
    """Every form in the oldest opset that the converter brings to `target`: it goes through all
    opsets between.
    """
    for kind, opsets, inputs, attributes, stored, outputs in FORMS:
        for opset in (older for older in opsets if older < target):
            case = Case(
                kind=kind,
                inputs=inputs,
                attributes=attributes,
                stored=stored,
                outputs=outputs,
                opset=opset,
            )
            try:
                yield (
                    case,
                    version_converter.convert_version(
                        onnx.shape_inference.infer_shapes(case.model()), target
                    ),
                )
            except (
                Exception
            ):  # the converter knows no way for some operators, and raises what its C++ throws
                continue
            break


@pytest.mark.parametrize("target", [13, 18, 21])
def test_converted_models_agree_with_onnxruntime(target: int) -> None:
    # The converted file is what counts: the converter forgets asymmetric coordinates before opset
    # 11 and what Hardmax did before 13.
    onnxruntime.set_default_logger_severity(3)
    compared = 0
    for case, converted in converted_forms(target):
        wanted = onnxruntime.InferenceSession(converted.SerializeToString()).run(None, case.feeds())
        for actual, right in zip(ours(converted, case.feeds()), wanted, strict=True):
            np.testing.assert_allclose(
                actual, right, rtol=1e-4, atol=1e-5, err_msg=f"{case.kind} of opset {case.opset}"
            )
        compared += 1
    print(f"{compared} of {len(FORMS)} forms converted to opset {target}")
    assert compared >= 60


def test_node_tests_converted_to_the_newest_opset_give_the_same() -> None:
    newest = onnx.defs.onnx_opset_version()
    plain = [
        test
        for test in node_tests()
        if test.left_out is None and not test.expanded and test.base.domain == ""
    ]
    chosen = np.random.default_rng(0).permutation(len(plain))[:200]
    compared = 0
    wrong = []
    for test in (plain[i] for i in chosen):
        model, feeds = test.ready()
        try:
            before = OnnxModule(import_onnx(model))(*[to_torch(feed) for feed in feeds])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                converted = version_converter.convert_version(model, newest)
        # what does not run at all is told elsewhere, and the converter raises what its C++ throws
        except Exception:
            continue
        after = OnnxModule(import_onnx(converted))(*[to_torch(feed) for feed in feeds])
        compared += 1
        for actual, wanted in zip(after, before, strict=True):
            if actual.dtype != wanted.dtype or not np.array_equal(
                *(np.nan_to_num(v.double().numpy(), nan=9) for v in (actual, wanted))
            ):
                wrong.append(test.name)
    assert compared >= 120 and not wrong


def test_older_opsets_are_refused() -> None:
    model = Case(kind="Relu", inputs=[X], attributes={}, opset=6).model()
    with pytest.raises(ModelError, match="opset 6, the oldest read here is 7"):
        import_onnx(model)


def test_compare_is_exact_about_types() -> None:
    with pytest.raises(AssertionError, match="float64 instead of float32"):
        compare(torch.zeros(2, dtype=torch.float64), np.zeros(2, np.float32), rtol=0, atol=0)
