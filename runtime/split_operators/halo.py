"""Convolutions and pools with split space: ranks exchange the rows at their borders, then work locally.

Rank r gets `low` rows of the rank before it and `high` rows of the one behind it; the first and the last rank fill with
zeros (a maximum: with the lowest value), which is the padding of the whole. Where several dims are split they take
turns in their order. Each sends the rows that earlier dims have brought, too, so that the corners are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir import Ref, Value
from autopar.sharding.rules import Call
from autopar.sharding.rules.windows import Window, window_index, windows_of

from ..collectives import AxisGroup, shift
from ..functions import function_of
from ..local_call import LocalCall
from ..local_forms.registry import register


class Border(NamedTuple):
    """A split spatial dim: `dim` counts from the back; a rank gets `low` and `high` rows (negative: gives up)."""

    dim: int
    low: int
    high: int
    group: AxisGroup


class _Exchange(torch.autograd.Function):
    """Rows of the neighbours on both sides; their gradients go home and are added."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, border: Border, fill: float) -> Tensor:
        ctx.border = border
        dim, low, high, group = border
        rows, parts = value.shape[dim], [value]
        if low:
            before = shift(value.narrow(dim, rows - low, low), group)
            parts.insert(0, before if group.coordinate > 0 else torch.full_like(before, fill))
        if high > 0:
            behind = shift(value.narrow(dim, 0, high), group, by=-1)
            parts.append(behind if group.coordinate < group.size - 1 else torch.full_like(behind, fill))
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dim, low, high, group = ctx.border
        gradient = gradients[0]
        rows = gradient.shape[dim] - low - max(high, 0)
        own = gradient.narrow(dim, low, rows).clone()
        if low:
            home = gradient.narrow(dim, 0, low)
            own.narrow(dim, rows - low, low).add_(shift(home if group.coordinate > 0 else torch.zeros_like(home), group, by=-1))
        if high > 0:
            home = gradient.narrow(dim, low + rows, high)
            own.narrow(dim, 0, high).add_(shift(home if group.coordinate < group.size - 1 else torch.zeros_like(home), group))
        return own, None, None


def extended(value: Tensor, borders: Sequence[Border], fill: float = 0.0) -> Tensor:
    """The rows that this rank's windows read: its own and those of its neighbours."""
    for border in itertools.starmap(Border, borders):
        if border.low or border.high > 0:
            value = _Exchange.apply(value, border, fill)  # type: ignore[no-untyped-call]
        if border.high < 0:
            value = value.narrow(border.dim, 0, value.shape[border.dim] + border.high)
    return value


def split_space(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form for all the spatial dims that are split, on whichever axes."""
    options, rule = call.decision.options, call.decision.rule
    assert rule is not None
    windows = windows_of(Call(operator=call.operator, inputs=call.inputs, outputs=call.outputs))
    halos = [(option.factor, axis) for axis, option in enumerate(options) if option.communication == "halo" and call.mesh[axis] > 1]
    split = {window_index(rule.factors[factor].name): call.groups[axis] for factor, axis in sorted(halos)}
    # Plain tuples: the code of a `torch.fx` graph cannot spell a named tuple within another.
    borders = tuple((i - len(windows), windows[i].low, windows[i].high, own) for i, own in split.items())
    kind, attributes = call.operator.kind, call.operator.attributes
    image = next(name for name, value in attributes.items() if isinstance(value, Ref) and value.index == 0)
    fixed: dict[str, Value] = {"kind": kind, "image": image, "borders": borders}
    pads = [(0, 0) if i in split else (w.before, w.after) for i, w in enumerate(windows)]
    if windows[0].transposed:
        own = {i: _Grown.of(windows[i], i - len(windows), group.size) for i, group in split.items()}
        extra = attributes.get("output_padding", 0)
        more = extra if isinstance(extra, tuple) else (extra,)
        left = tuple(0 if i in split else more[i % len(more)] for i in range(len(windows)))
        return transposed, fixed | _padding(kind, pads) | {"output_padding": left, "grown": tuple(own.values())}
    if "pool" in kind.lower():
        divided = ("avg" in kind or "Average" in kind) and attributes.get("divisor_override") is None
        padded = bool(attributes.get("count_include_pad", not kind.startswith("onnx.")))
        counts = tuple(_Count.of(windows[i], i - len(windows), group, padded) for i, group in split.items()) if divided else ()
        return pool, fixed | _padding(kind, pads) | {"counts": counts}
    widened = tuple(amount for pair in reversed(pads) for amount in pair) if kind.endswith(".padding") else ()
    if widened:
        fixed["kind"], pads = kind.replace(".padding", ".default"), [(0, 0)] * len(pads)
    return convolution, fixed | _padding(kind, pads) | {"widened": widened}


def _padding(kind: str, pads: Sequence[tuple[int, int]]) -> dict[str, Value]:
    """The padding that the operator itself makes."""
    before, behind = tuple(low for low, _ in pads), tuple(high for _, high in pads)
    return {"pads": (*before, *behind)} if kind.startswith("onnx.") else {"padding": before}


def convolution(kind: str, image: str, borders: Sequence[Border], widened: Sequence[int], **arguments: Any) -> Tensor:
    """A convolution of this rank's rows; `widened`: zeros around the dims that are not split."""
    value = extended(arguments[image], borders)
    if any(widened):
        value = F.pad(value, list(widened))
    out: Tensor = function_of(kind)(**{**arguments, image: value})
    return out


class _Grown(NamedTuple):
    """The rows of a transposed convolution's output that belong to a rank: `length` rows from `start`.

    The input first gets `spare` more rows of zeros.
    """

    dim: int
    start: int
    length: int
    spare: int

    @classmethod
    def of(cls, window: Window, dim: int, shards: int) -> _Grown:
        """The rows of one of `shards` shards."""
        start, length = window.before + window.low * window.stride, window.made // shards
        rows = window.rows // shards + window.low + window.high
        return cls(dim, start, length, max(0, 1 - rows - (window.span - start - length) // window.stride))


def transposed(kind: str, image: str, borders: Sequence[Border], grown: Sequence[_Grown], **arguments: Any) -> Tensor:
    """A transposed convolution of this rank's rows, without the rows that belong to its neighbours."""
    value = extended(arguments[image], borders)
    for dim, _, _, spare in grown:
        if spare:
            value = torch.cat([value, torch.zeros_like(value.narrow(dim, 0, spare))], dim)
    out: Tensor = function_of(kind)(**{**arguments, image: value})
    for dim, start, length, _ in grown:
        out = out.narrow(dim, start, length)
    return out.contiguous()


class _Count(NamedTuple):
    """The window of a mean along a split dim; `first`: the rank's first output row; rows `low` to `end` count."""

    dim: int
    first: int
    kernel: int
    stride: int
    dilation: int
    before: int
    low: int
    end: int

    @classmethod
    def of(cls, window: Window, dim: int, group: AxisGroup, padded: bool) -> _Count:
        """The window of this rank; `padded`: the padding counts."""
        low, end = (-window.before, window.rows + window.after) if padded else (0, window.rows)
        first = group.coordinate * (window.made // group.size)
        return cls(dim, first, window.kernel, window.stride, window.dilation, window.before, low, end)

    def weights(self, like: Tensor) -> Tensor:
        """The factor of each output row's mean over all places of the window."""
        rows = torch.arange(self.first, self.first + like.shape[self.dim], device=like.device)
        reach = torch.arange(self.kernel, device=like.device) * self.dilation - self.before
        places = rows[:, None] * self.stride + reach
        counted = ((places >= self.low) & (places < self.end)).sum(1)
        return (self.kernel / counted.to(like.dtype)).reshape(-1, *(1,) * (-1 - self.dim))


def pool(kind: str, image: str, borders: Sequence[Border], counts: Sequence[_Count], **arguments: Any) -> Tensor:
    """A pool of this rank's rows; a mean counts the same rows as in the whole."""
    value = arguments[image]
    fill = 0.0
    if "max" in kind.lower():
        fill = -math.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
    out: Tensor = function_of(kind)(**{**arguments, image: extended(value, borders, fill)})
    for count in counts:
        out = out * count.weights(out)
    return out


register("halo", talks=split_space)
