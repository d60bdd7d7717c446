"""The node tests of onnx on one device: nearly all that count are right, and the others are known
or refused by name.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto
from onnx.reference.ops import op_pool_common

from autopar.errors import AutoparError
from autopar.frontends.onnx import import_onnx
from autopar.frontends.onnx.lowering import LOWERED
from autopar.ir.dtype import cast_graph
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from tests.frontends.onnx.lowering.node_report import FILE, compare, failures, known_reason, run
from tests.frontends.onnx.lowering.node_tests import (
    OLDEST_OPSET,
    REASONS,
    NodeTest,
    node_tests,
    quick_pool,
)


@cache
def wrong() -> dict[str, str]:
    """The tests that count and fail."""
    return failures(node_tests())


def test_nearly_all_that_count_are_right() -> None:
    counted = sum(test.left_out is None for test in node_tests())
    share = 1 - len(wrong()) / counted
    print(f"{counted - len(wrong())} of {counted} node tests are right ({share:.1%})")
    unexplained = {name: text for name, text in wrong().items() if known_reason(name) is None}
    assert not unexplained
    assert share >= 0.95


def test_every_function_is_tested() -> None:
    kinds = {
        test.kind for test in node_tests() if test.left_out is None and test.name not in wrong()
    }
    assert set(LOWERED) - kinds == {"onnx.GlobalLpPool"}  # onnx has no node test of it


def halves() -> list[NodeTest]:
    """The tests in half precision whose recorded numbers differ."""
    return [
        test
        for test in node_tests()
        if test.name in wrong() and (known_reason(test.name) or "").startswith("half precision")
    ]


def test_half_precision_is_nearer_to_the_exact_numbers_than_the_recorded_ones() -> None:
    for test in halves():
        model, feeds = test.ready()
        exact_graph = cast_graph(import_onnx(model), "float64")
        tensors = [to_torch(feed) for feed in feeds]
        exact = OnnxModule(exact_graph)(
            *[value.double() if value.is_floating_point() else value for value in tensors]
        )
        for result, right, recorded in zip(run(test), exact, test.outputs, strict=True):
            unit = torch.finfo(result.dtype).eps * right.abs().max()
            ours = (result.double() - right).abs().max() / unit
            theirs = (torch.from_numpy(recorded.astype(np.float64)) - right).abs().max() / unit
            assert ours <= 1 and ours <= theirs, test.name


def test_the_written_report_is_current() -> None:
    written = json.loads(FILE.read_text())
    tests = node_tests()
    assert written["onnx"] == onnx.__version__ and written["tests"] == len(tests)
    assert written["left_out_tests"] == {
        reason: sorted(t.name for t in tests if t.left_out == reason) for reason in REASONS
    }
    assert written["counted"] + sum(written["left_out"].values()) == len(tests)
    assert all(known_reason(name) == reason for name, reason in written["wrong"].items())


def recent(test: NodeTest) -> ModelProto:
    """The model at an opset that is read."""
    model = ModelProto()
    model.CopyFrom(test.model)
    for entry in model.opset_import:
        entry.version = (
            max(OLDEST_OPSET, entry.version) if entry.domain in ("", "ai.onnx") else entry.version
        )
    return model


def refusal(test: NodeTest) -> str | None:
    """The message of the import or the module against a model; None where it is taken."""
    try:
        OnnxModule(import_onnx(recent(test)))
    except AutoparError as error:
        return str(error)
    return None


def test_what_is_left_out_is_refused_by_name_or_folds_away() -> None:
    said = {
        test.name: refusal(test)
        for test in node_tests()
        if test.left_out not in (None, "random numbers")
    }
    taken = [name for name, text in said.items() if text is None]
    assert all(name.startswith("test_optional_has_element_empty_no_input") for name in taken), (
        taken
    )  # constants
    words = ("onnx.", "ai.onnx.ml.", "STRING", "strings", "sequence", "optional")
    assert [
        name for name, text in said.items() if text and not any(word in text for word in words)
    ] == []


@pytest.mark.parametrize("name", ["default", "default_mask", "", "mask"])
def test_dropout_while_training(name: str) -> None:
    full = "_".join(part for part in ("test_training_dropout", name) if part)
    test = next(item for item in node_tests() if item.name == full)
    assert test.left_out == "random numbers"
    model, feeds = test.ready()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actual = OnnxModule(import_onnx(model))(*[to_torch(feed) for feed in feeds])
    data = to_torch(feeds[0])
    ratio = float(feeds[1])
    for value, wanted in zip(actual, test.outputs, strict=True):
        assert value.numpy().dtype == wanted.dtype and tuple(value.shape) == wanted.shape
    kept = actual[0] != 0
    assert torch.allclose(actual[0][kept], data[kept] / (1 - ratio))
    spread = 5 * (ratio * (1 - ratio) / data.numel()) ** 0.5
    assert abs(float((~kept).float().mean()) - ratio) <= spread
    assert all(torch.equal(mask, kept) for mask in actual[1:])


def test_the_quick_collection_pools_as_onnx_does() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 45, 41)).astype(np.float32)
    quick = quick_pool(op_pool_common.pool)
    for kind, power in (("AVG", 1), ("MAX", 1), ("LPPOOL", 3)):
        for arguments in ([[2, 3], [1, 1], [44, 39]], [[2, 3], [2, 1], [22, 39]]):
            expected = op_pool_common.pool(x, x.shape, *arguments, kind, p=power)
            np.testing.assert_allclose(
                quick(x, x.shape, *arguments, kind, p=power), expected, rtol=1e-5, atol=1e-6
            )


def test_a_wrong_number_is_found() -> None:
    test = next(item for item in node_tests() if item.name == "test_relu")
    (result,) = run(test)
    compare(result, test.outputs[0], rtol=test.rtol, atol=test.atol)
    with pytest.raises(AssertionError):
        compare(result + 0.01, test.outputs[0], rtol=test.rtol, atol=test.atol)
