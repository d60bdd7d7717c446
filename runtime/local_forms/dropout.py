"""Dropout on shards: the mask is this rank's part of the mask of the whole tensor.

It is drawn by counter, or by torch's generator where its order is kept (see `draws`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import Knowledge, register
from autopar.runtime.random_numbers.counter_bits import Region
from autopar.runtime.random_numbers.distributions import Source
from autopar.runtime.random_numbers.draw_state import Draws, current, operator_number
from autopar.runtime.ranks.cuts import Cut, shard_of

from .seeded_operators import seeded

_SELU_FLOOR = 1.0507009873554804934193349852946 * 1.6732632423543772848170429916717
"""The negative of SELU's limit far below zero; alpha dropout writes that limit."""


def _stays(
    draws: Draws, operator: int, rate: float, shape: Sequence[int], cuts: Cuts, device: torch.device
) -> Tensor:
    """This rank's part of a mask that drops the share `rate`, by counter."""
    return Source(draws, operator, Region.of(shape, cuts, device)).chosen(1 - rate)


def _keep_mask(
    operator: int, rate: float, shape: Sequence[int], flat: Sequence[int], device: torch.device
) -> Tensor:
    """As `_stays` with the draws of this thread: an operator that a compiler does not look into."""
    return _stays(current(), operator, rate, shape, _cuts_of(flat), device)


def _fake_mask(
    operator: int, rate: float, shape: Sequence[int], flat: Sequence[int], device: torch.device
) -> Tensor:
    """A mask without values, from which a compiler learns the shape."""
    part = Region.of(shape, _cuts_of(flat), device).shape
    return torch.empty(part, dtype=torch.bool, device=device)


def _cuts_of(flat: Sequence[int]) -> list[Cut]:
    """The cuts whose fields stand in one list, since operators take no lists of tuples."""
    fields = len(Cut._fields)
    return [Cut(*flat[start : start + fields]) for start in range(0, len(flat), fields)]


# The tag tells a compiler that the operator is random: it must not be moved into constants, shared,
# or computed again in the backward pass.
_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "keep_mask(int operator, float rate, int[] shape, int[] flat, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
torch.library.register_fake("autopar::keep_mask", _fake_mask, lib=_LIBRARY)


def exact_dropout(input: Tensor, p: float, shape: Sequence[int], cuts: Cuts) -> Tensor:
    """Mask and scale as `torch.nn.functional.dropout` does on a CPU.

    Each rank draws the whole mask from the same seed, in the order of the input's memory.
    """
    if p >= 1:
        # A product as in torch, where NaN and infinity give NaN.
        return input * 0
    order = list(range(input.ndim))
    # Masks of whole channels, which have dims of size 1, are contiguous in torch.
    if 1 not in shape:
        order.sort(key=lambda dim: -input.stride()[dim])
    whole = torch.empty_permuted(tuple(shape), order, dtype=input.dtype, device=input.device)
    whole.bernoulli_(1 - p)
    return input * shard_of(whole, [Cut(*cut) for cut in cuts]).div(1 - p)


def dropout(
    input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts, operator: int
) -> Tensor:
    """Dropout of elements, or of channels if `shape` has ones for the other dims.

    Autograd keeps a boolean mask, a byte an element.
    """
    assert train
    # A compiler sees one operator with plain numbers, not the Python of the counters.
    if torch.compiler.is_compiling():
        flat = [number for cut in cuts for number in cut]
        mask = torch.ops.autopar.keep_mask(operator, p, tuple(shape), flat, input.device)
        return torch.where(mask, input, 0.0) * (1 / (1 - p) if p < 1 else 0.0)
    draws = current()
    if draws.exact:
        return exact_dropout(input, p, shape, cuts)
    if p >= 1:
        return input * 0
    mask = _stays(draws, operator, p, shape, cuts, input.device)
    return torch.where(mask, input, 0.0).mul_(1 / (1 - p))


def native_dropout(
    input: Tensor, p: float, train: bool | None, shape: Sequence[int], cuts: Cuts, operator: int
) -> tuple[Tensor, Tensor]:
    """Values after dropout, and the mask of the elements that stay.

    With `train` None the operator drops, too, and has a gradient of its own: it runs whole.
    """
    if train is None:
        out: tuple[Tensor, Tensor] = seeded(
            "aten.native_dropout.default", operator, input.device, input=input, p=p, train=None
        )
        return out
    draws = current()
    if draws.exact:
        _, whole = torch.ops.aten.native_dropout.default(input.new_ones(tuple(shape)), p, True)
        mask = shard_of(whole, [Cut(*cut) for cut in cuts])
    else:
        mask = _stays(draws, operator, p, shape, cuts, input.device)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def alpha_dropout(
    kind: str, input: Tensor, p: float, train: bool, shape: Sequence[int], cuts: Cuts, operator: int
) -> Tensor:
    """Dropout that keeps mean and variance after a SELU (arXiv:1706.02515)."""
    draws = current()
    # Torch's order of numbers is asked for only where nothing is split.
    if draws.exact:
        out: Tensor = function_of(kind)(input, p, train)
        return out
    if p >= 1:
        return input * 0
    scale = 1 / math.sqrt((_SELU_FLOOR**2 * p + 1) * (1 - p))
    mask = _stays(draws, operator, p, shape, cuts, input.device)
    return input * (mask * scale) + ((mask.to(input.dtype) - 1 + p) * (_SELU_FLOOR * scale))


def _dropping(
    training: str, rate: str, *, channels: bool = False, untold: bool = False
) -> Knowledge:
    """The shape of the whole mask (or of whole channels) and the shard's place in it, in training.

    untold: a missing training argument counts as training.
    """

    def knows(call: LocalCall) -> Mapping[str, Value] | None:
        attributes = call.operator.attributes
        trains = attributes.get(training)
        if not (trains or (untold and trains is None)) or not attributes.get(rate):
            return None
        shape = call.inputs[0].shape
        cuts = call.cuts(call.decision.inputs[0])
        # A channel is dropped as a whole, so ranks that share one must draw the same number.
        if channels:
            shape = (*shape[:2], *(1 for _ in shape[2:]))
            cuts = tuple(cut for cut in cuts if cut.dim < 2)
        return {
            "shape": shape,
            "cuts": tuple(tuple(cut) for cut in cuts),
            "operator": operator_number(call.operator.name),
        }

    return knows


def _alpha(kind: str) -> Callable[..., Tensor]:
    return functools.partial(alpha_dropout, kind)


_CHANNELS = _dropping("train", "p", channels=True)
register("aten.dropout.default", knows=_dropping("train", "p"), local=dropout)
register("aten.feature_dropout.default", knows=_CHANNELS, local=dropout)
register(
    "aten.native_dropout.default", knows=_dropping("train", "p", untold=True), local=native_dropout
)
register(
    "aten.alpha_dropout.default",
    knows=_dropping("train", "p"),
    local=_alpha("aten.alpha_dropout.default"),
)
register(
    "aten.feature_alpha_dropout.default",
    knows=_CHANNELS,
    local=_alpha("aten.feature_alpha_dropout.default"),
)
