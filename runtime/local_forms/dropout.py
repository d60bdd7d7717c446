"""Dropout on shards: the mask is this rank's part of the one that a single device would draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir import Value

from ..collectives import Cut, shard_of
from ..local_call import Cuts, LocalCall
from .registry import Knowledge, register


def mask(like: Tensor, p: float, shape: Sequence[int], cuts: Cuts) -> Tensor:
    """This rank's shard of a mask drawn for the whole tensor, the same on every rank that has the same seed."""
    whole = torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_(1 - p)
    return shard_of(whole, [Cut(*cut) for cut in cuts])


def dropout(input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts) -> Tensor:
    """Dropout that equals one device's: mask and scale as `torch.nn.functional.dropout` on CPU."""
    assert train
    return input * mask(input, p, shape, cuts).div(1 - p) if p < 1 else input * 0


def onnx_dropout(
    data: Tensor, shape: Sequence[int], cuts: Cuts, ratio: float, training_mode: bool, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """ONNX `Dropout` that equals one device's: the values, and the mask of what stays."""
    if not training_mode or not ratio:
        return data, torch.ones_like(data, dtype=torch.bool)
    whole = torch.rand(tuple(shape), dtype=torch.float32, device=data.device) >= ratio
    mask = shard_of(whole, [Cut(*cut) for cut in cuts])
    return data * mask / (1 - ratio), mask


def native_dropout(input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts) -> tuple[Tensor, Tensor]:
    """`native_dropout` that equals one device's: the values, and the mask of what stays."""
    assert train
    _, whole = torch.ops.aten.native_dropout.default(input.new_ones(tuple(shape)), p, True)
    mask = shard_of(whole, [Cut(*cut) for cut in cuts])
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _dropout(training: str, rate: str, *, channels: bool = False) -> Knowledge:
    """In training every rank draws the mask of the whole tensor (or of whole channels), so that the result is that of one device."""

    def change(call: LocalCall) -> Mapping[str, Value] | None:
        if not call.operator.attributes.get(training) or not call.operator.attributes.get(rate):
            return None
        shape, cuts = call.inputs[0].shape, call.cuts(call.decision.inputs[0])
        if channels:
            shape, cuts = (*shape[:2], *(1 for _ in shape[2:])), tuple(cut for cut in cuts if cut.dim < 2)
        return {"shape": shape, "cuts": tuple(tuple(cut) for cut in cuts)}

    return change


register("aten.dropout.default", knows=_dropout("train", "p"), local=dropout)
register("aten.feature_dropout.default", knows=_dropout("train", "p", channels=True), local=dropout)
register("aten.native_dropout.default", knows=_dropout("train", "p"), local=native_dropout)
register("onnx.Dropout", knows=_dropout("training_mode", "ratio"), local=onnx_dropout)
