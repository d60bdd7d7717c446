"""Runs the node tests of onnx on one device, and writes what came out: `python -m
tests.frontends.onnx.lowering.node_report [FILE]`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch

from autopar.frontends.onnx import import_onnx
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from tests.frontends.onnx.lowering.node_tests import REASONS, NodeTest, node_tests

FILE = Path(__file__).parents[4] / "docs" / "onnx-node-tests.json"
# What may fail, and why.
KNOWN: Mapping[str, str] = {
    r"test_attention_[34]d\w*_(bf16|fp16)(_expanded)?": (
        "half precision: the recorded numbers were rounded after every step, these are not"
    ),
    r"test_dft_inverse(_opset19)?": "the recorded number is the rounding error of an exact zero",
    r"test_image_decoder_\w+": "the input is an encoded image file",
    r"test_(adagrad|adam|momentum|nesterov_momentum)\w*": "a step of an optimizer, not of a model",
    r"test_(ai_onnx_ml|tfidfvectorizer)_\w+": "features of text or trees: nothing in it is split",
}
# Dtypes of recorded outputs that are held in another one.
_HELD_IN = {
    "int4": "int8",
    "int2": "int8",
    "uint4": "uint8",
    "uint2": "uint8",
    "float4_e2m1fn": "float8_e4m3fn",
}


def known_reason(name: str) -> str | None:
    """Why a test may fail, or None where it may not."""
    return next((reason for pattern, reason in KNOWN.items() if re.fullmatch(pattern, name)), None)


def compare(actual: torch.Tensor, wanted: np.ndarray, *, rtol: float, atol: float) -> None:
    """Fails where the shape, the dtype or a number differs."""
    assert tuple(actual.shape) == wanted.shape, (
        f"shape {tuple(actual.shape)} instead of {wanted.shape}"
    )
    dtype = str(actual.dtype).removeprefix("torch.")
    assert dtype == _HELD_IN.get(wanted.dtype.name, wanted.dtype.name), (
        f"{dtype} instead of {wanted.dtype.name}"
    )
    if wanted.dtype.name in _HELD_IN or wanted.dtype.name.startswith(("bfloat", "float8")):
        actual = actual.float()
        wanted = wanted.astype(np.float32)
    np.testing.assert_allclose(actual.numpy(), wanted, rtol=rtol, atol=atol)


def run(test: NodeTest) -> tuple[torch.Tensor, ...]:
    """The outputs of the imported model; fails where one has not the shape that the graph says."""
    model, feeds = test.ready()
    graph = import_onnx(model)
    with torch.no_grad():
        outputs = OnnxModule(graph)(*[to_torch(feed) for feed in feeds])
    for name, value in zip(graph.outputs, outputs, strict=True):
        assert tuple(value.shape) == graph.tensors[name].shape, (
            f"{name!r} has the shape {tuple(value.shape)}, not the graph's"
        )
    return outputs


def problem(test: NodeTest) -> str | None:
    """The error in a test's outputs, in one line; None where they are right."""
    try:
        for actual, wanted in zip(run(test), test.outputs, strict=True):
            compare(actual, wanted, rtol=test.rtol, atol=test.atol)
    except Exception as error:  # whatever goes wrong is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def failures(tests: Iterable[NodeTest]) -> dict[str, str]:
    """The tests that count and fail, with what is wrong."""
    problems = {test.name: problem(test) for test in tests if test.left_out is None}
    return {name: wrong for name, wrong in problems.items() if wrong is not None}


def report() -> dict[str, object]:
    """How many tests count and are right, and which are left out or wrong for which reason."""
    tests = node_tests()
    wrong = failures(tests)
    counted = sum(test.left_out is None for test in tests)
    out = Counter(test.left_out for test in tests if test.left_out)
    return {
        "onnx": onnx.__version__,
        "tests": len(tests),
        "counted": counted,
        "right": counted - len(wrong),
        "share": round((counted - len(wrong)) / counted, 4),
        "left_out": {reason: out[reason] for reason in REASONS},
        "wrong": {name: known_reason(name) or wrong[name] for name in sorted(wrong)},
        "left_out_tests": {
            reason: sorted(test.name for test in tests if test.left_out == reason)
            for reason in REASONS
        },
    }


def main() -> None:
    """Writes the report to the file given."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    torch.set_num_threads(1)
    counts = report()
    path.write_text(json.dumps(counts, indent=1) + "\n")
    print(
        f"{counts['right']} of {counts['counted']} node tests are right ({counts['share']:.1%}); "
        f"written to {path}"
    )


if __name__ == "__main__":
    main()
