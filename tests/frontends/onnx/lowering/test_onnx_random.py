"""The operators that models hold agree with onnx's reference and with onnxruntime on random inputs,
attributes and shapes.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from autopar.frontends.onnx import import_onnx
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from tests.frontends.onnx.lowering.onnx_cases import Case
from tests.frontends.onnx.lowering.onnx_samples import SAMPLES

DRAWS = 8
# Where the reference fails on what the operator allows: pools with uneven pads, means that
# broadcast, LRN of more channels than samples, and backward slices that start before the first
# element.
DEFECTIVE = frozenset({"MaxPool", "Mean", "LRN", "Slice"})


def _reference(case: Case) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            np.asarray(item) for item in ReferenceEvaluator(case.model()).run(None, case.feeds())
        ]


def _onnxruntime(case: Case) -> list[np.ndarray]:
    return list(
        onnxruntime.InferenceSession(case.model().SerializeToString()).run(None, case.feeds())
    )


JUDGES: Mapping[str, Callable[[Case], list[np.ndarray]]] = {
    "reference": _reference,
    "onnxruntime": _onnxruntime,
}


def outputs(case: Case) -> list[np.ndarray]:
    """The outputs of the imported model."""
    with torch.no_grad():
        module = OnnxModule(
            import_onnx(case.model()),
            ((f"x{i}", item) for i, item in enumerate(case.inputs) if item is not None),
        )
        return [
            item.numpy() for item in module(*[to_torch(item) for item in case.feeds().values()])
        ]


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_operator_agrees(kind: str, judge: str) -> None:
    if judge == "reference" and kind in DEFECTIVE:
        judge = "onnxruntime"
    rng = np.random.default_rng(zlib.crc32(f"{kind} {judge}".encode()))
    for _ in range(DRAWS):
        case = SAMPLES[kind](rng)
        for actual, wanted in zip(outputs(case), JUDGES[judge](case), strict=True):
            assert actual.shape == wanted.shape and actual.dtype == wanted.dtype, case
            np.testing.assert_allclose(
                actual, wanted, rtol=2e-4, atol=2e-5, err_msg=f"{case.attributes}"
            )
