"""Every operator of the table passes onnx's own node tests, but for the listed exceptions."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, numpy_helper

from autopar.frontends.onnx import import_onnx
from autopar.frontends.onnx_canonical import OPTIONAL, REQUIRED
from autopar.frontends.onnx_values import signature
from autopar.runtime.onnx_module import OnnxModule, to_torch
from autopar.runtime.onnx_ops import ONNX_FUNCTIONS

# Node tests that cannot pass: element types that torch lacks, random numbers, values that would decide shapes, optional values and
# sequences as inputs, and half precision that rounds otherwise.
EXCEPTIONS = re.compile(
    r"FNUZ|E8M0|E5M2|e5m2|INT4|int4|INT2|int2|FLOAT4|float4|uint(16|32|64)|bf16|fp16|STRING|string|training_dropout|optional|bitwise_not_3d"
    r"|no_saturate|identity_opt|identity_sequence|dft_inverse|blocked_symmetric|_expanded"
)


@cache
def cases() -> dict[str, list[Any]]:
    """Node tests of a single operator, by its kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found: dict[str, list[Any]] = defaultdict(list)
        for case in collect_testcases(None):
            assert case.model is not None
            nodes = case.model.graph.node
            if len(nodes) == 1 and nodes[0].domain == "" and not EXCEPTIONS.search(case.name):
                found[f"onnx.{nodes[0].op_type}"].append(case)
    return found


def array(value: object) -> np.ndarray:
    """A test's value as an array."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def with_constants(model: ModelProto, inputs: list[np.ndarray]) -> tuple[ModelProto, list[np.ndarray]]:
    """The model with inputs that decide shapes turned into constants, and the inputs that are left."""
    copy = ModelProto()
    copy.CopyFrom(model)
    (node,) = copy.graph.node
    copy.opset_import[0].version = max(7, copy.opset_import[0].version)
    names = {*REQUIRED.get(node.op_type, ()), *OPTIONAL.get(node.op_type, ())} - {"ratio", "training_mode"}
    formal = signature("", node.op_type, copy.opset_import[0].version).inputs
    fixed = {name for name, role in zip(node.input, formal, strict=False) if role in names}
    kept, feeds = [], []
    for value, data in zip(model.graph.input, inputs, strict=True):
        if value.name in fixed:
            copy.graph.initializer.append(numpy_helper.from_array(data, value.name))
        else:
            kept.append(onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, data.shape))
            feeds.append(data)
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    return copy, feeds


def check(case: Any) -> None:
    """Runs one node test."""
    for given, expected in case.data_sets:
        model, feeds = with_constants(case.model, [array(item) for item in given])
        graph = import_onnx(model)
        with torch.no_grad():
            found = OnnxModule(graph)(*[to_torch(feed) for feed in feeds])
        for name, result, wanted in zip(graph.outputs, found, map(array, expected), strict=False):
            assert tuple(result.shape) == wanted.shape == graph.tensors[name].shape
            exact = wanted if wanted.dtype.kind in "biufc" else wanted.astype(np.float32)
            plain = result.float() if result.dtype in (torch.bfloat16, torch.float8_e4m3fn) else result
            assert plain.numpy().dtype == exact.dtype
            np.testing.assert_allclose(plain.numpy(), exact, rtol=case.rtol, atol=case.atol)


# Operators whose results have a shape that depends on values, and one that onnx has no node test for.
UNTESTED = {"onnx.NonZero", "onnx.Compress", "onnx.GlobalLpPool"}


@pytest.mark.parametrize("kind", sorted(set(ONNX_FUNCTIONS) - UNTESTED))
def test_operator(kind: str) -> None:
    chosen = cases().get(kind, [])
    assert chosen, f"no node test for {kind}"
    failed = {}
    for case in chosen:
        try:
            check(case)
        except Exception as error:  # all failures of an operator are reported together
            failed[case.name] = f"{type(error).__name__}: {str(error)[:200]}"
    assert not failed


def test_few_node_tests_are_out_of_reach() -> None:
    covered = sum(len(found) for kind, found in cases().items() if kind in ONNX_FUNCTIONS)
    total = sum(len(found) for found in cases().values())
    assert covered >= 900
    assert covered / total > 0.88
