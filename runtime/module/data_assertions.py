"""Assertions of a model's code about its data, asked of a call's whole batch before it is split.

On parts of a batch they may fail although the batch is right, or hold although it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.model import Check
from autopar.runtime.operators.functions import arguments_of, function_of, returns_sequence


def require(checks: Iterable[Check], tensors: Mapping[str, Tensor]) -> None:
    """Raise `RunError` where an assertion does not hold.

    `tensors`: the inputs of a call and the constants of the model, whole and by name.
    """
    for check in checks:
        if not check.checkable:
            continue
        with torch.no_grad():
            known = _with_computed(check, tensors)
            if not all(holds(known) for holds in check.holds):
                raise RunError(
                    f"an assertion of the model's own code, at {check.place}, does not hold of "
                    "this batch: the counts that it compares, such as those of image tokens and "
                    "of images, differ; give a batch in which they agree, as in the example inputs"
                )


def _with_computed(check: Check, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and those that a check's operators make of them."""
    known = dict(tensors)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    for op in check.operators:
        function = function_of(op.kind)
        inputs = [known[name].to(device) for name in op.inputs]
        result = function(**arguments_of(function, op.attributes, inputs, device))
        results = result if returns_sequence(function, op) else [result]
        known.update(zip(op.outputs, results, strict=True))
    return known
