"""Assertions of a model's code about its data, asked of the whole batch of a call before it is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.model import Check

from .functions import arguments_of, function_of, returns_sequence


def require(checks: Iterable[Check], tensors: Mapping[str, Tensor]) -> None:
    """Raise `RunError` where an assertion does not hold of these inputs and constants of the model, whole and by name."""
    for check in checks:
        if not check.checkable:
            continue
        with torch.no_grad():
            known = _made(check, tensors)
            if not all(holds(known) for holds in check.holds):
                raise RunError(
                    f"an assertion of the model's own code, at {check.place}, does not hold of this batch: the counts that it compares, "
                    "such as those of image tokens and of images, differ; give a batch in which they agree, as in the example inputs"
                )


def _made(check: Check, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a check reads, beside those that it makes them of."""
    known = dict(tensors)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    for op in check.operators:
        function = function_of(op.kind)
        made = function(**arguments_of(function, op.attributes, [known[name].to(device) for name in op.inputs], device))
        known.update(zip(op.outputs, made if returns_sequence(function, op) else [made], strict=True))
    return known
