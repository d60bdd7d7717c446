"""Convolutions and pools with split space: ranks exchange border rows, then work locally.

Rank r gets `low` rows of the rank before it and `high` rows of the one behind it; the first and the
last rank fill with zeros (a maximum: with the lowest value), which is the padding of the whole.
Where several dims are split they take turns in their order. Each sends the rows that earlier dims
have brought, too, so that the corners are right.
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
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.ranks.collectives import shift
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.rules import Call
from autopar.sharding.rules.windows import CAUSAL, Window, window_index, windows_of


class Border(NamedTuple):
    """A split spatial dim and the rows that a rank gets from its neighbours.

    dim: counted from the back. low, high: rows of the rank before and behind; a negative number of
    rows is given up.
    """

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
        rows = value.shape[dim]
        parts = [value]
        if low:
            # The exchange is a ring, so the first rank gets rows of the last: they are replaced.
            before = shift(value.narrow(dim, rows - low, low), group)
            parts.insert(0, before if group.coordinate > 0 else torch.full_like(before, fill))
        if high > 0:
            behind = shift(value.narrow(dim, 0, high), group, by=-1)
            last = group.coordinate == group.size - 1
            parts.append(torch.full_like(behind, fill) if last else behind)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dim, low, high, group = ctx.border
        gradient = gradients[0]
        rows = gradient.shape[dim] - low - max(high, 0)
        own = gradient.narrow(dim, low, rows).clone()
        if low:
            home = gradient.narrow(dim, 0, low)
            if group.coordinate == 0:
                # These rows were filled, not received; the ring still takes a message of each rank.
                home = torch.zeros_like(home)
            own.narrow(dim, rows - low, low).add_(shift(home, group, by=-1))
        if high > 0:
            home = gradient.narrow(dim, low + rows, high)
            if group.coordinate == group.size - 1:
                home = torch.zeros_like(home)
            own.narrow(dim, 0, high).add_(shift(home, group))
        return own, None, None


def extended(value: Tensor, borders: Sequence[Border], fill: float = 0.0) -> Tensor:
    """The rows that this rank's windows read: its own and those of its neighbours."""
    for border in itertools.starmap(Border, borders):
        if border.low or border.high > 0:
            value = _Exchange.apply(value, border, fill)  # type: ignore[no-untyped-call]
        # The rank's last rows belong to no window of its own.
        if border.high < 0:
            value = value.narrow(border.dim, 0, value.shape[border.dim] + border.high)
    return value


def split_space(
    call: LocalCall, group: AxisGroup
) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form for all the spatial dims that are split, on whichever axes."""
    options = call.decision.options
    rule = call.decision.rule
    assert rule is not None
    windows = windows_of(Call(operator=call.operator, inputs=call.inputs, outputs=call.outputs))
    halos = [
        (option.factor, axis)
        for axis, option in enumerate(options)
        if option.communication == "halo" and call.mesh[axis] > 1
    ]
    split = {
        window_index(rule.factors[factor].name): call.groups[axis] for factor, axis in sorted(halos)
    }
    # Plain tuples: the code of a `torch.fx` graph cannot spell a named tuple within another.
    borders = tuple(
        (i - len(windows), windows[i].low, windows[i].high, own) for i, own in split.items()
    )
    kind = call.operator.kind
    attributes = call.operator.attributes
    image = next(
        name for name, value in attributes.items() if isinstance(value, Ref) and value.index == 0
    )
    fixed: dict[str, Value] = {"kind": kind, "image": image, "borders": borders}
    # Split dims have their padding at the ends of the whole, which the exchange fills.
    pads = [(0, 0) if i in split else (w.before, w.after) for i, w in enumerate(windows)]
    if windows[0].transposed:
        cropping = _transposed_options(attributes, windows, split)
        return transposed, fixed | _padding(pads) | cropping
    if "pool" in kind.lower():
        counts = _counts(kind, attributes, windows, split)
        return pool, fixed | _padding(pads) | {"counts": counts}
    widened: tuple[int, ...] = ()
    if kind == CAUSAL:
        # The rows before are those of the exchange.
        fixed["kind"] = "aten.conv1d.default"
    if kind.endswith(".padding"):
        # "same" pads as the window says, which the operator would work out from the shard's size.
        widened = tuple(amount for pair in reversed(pads) for amount in pair)
    if widened:
        fixed["kind"] = kind.replace(".padding", ".default")
        pads = [(0, 0)] * len(pads)
    return convolution, fixed | _padding(pads) | {"widened": widened}


def _transposed_options(
    attributes: Mapping[str, Value], windows: Sequence[Window], split: Mapping[int, AxisGroup]
) -> dict[str, Value]:
    """The rows that a transposed convolution keeps of split dims, and its growth along others."""
    grown = tuple(_Grown.of(windows[i], i - len(windows), group.size) for i, group in split.items())
    extra = attributes.get("output_padding", 0)
    sizes = extra if isinstance(extra, tuple) else (extra,)
    growth = tuple(0 if i in split else sizes[i % len(sizes)] for i in range(len(windows)))
    return {"output_padding": growth, "grown": grown}


def _counts(
    kind: str,
    attributes: Mapping[str, Value],
    windows: Sequence[Window],
    split: Mapping[int, AxisGroup],
) -> tuple[_Count, ...]:
    """The windows of a mean along split dims; none for a maximum or a fixed divisor."""
    is_mean = "avg" in kind
    if not is_mean or attributes.get("divisor_override") is not None:
        return ()
    padded = bool(attributes.get("count_include_pad", True))
    return tuple(
        _Count.of(windows[i], i - len(windows), group, padded) for i, group in split.items()
    )


def _padding(pads: Sequence[tuple[int, int]]) -> dict[str, Value]:
    """The padding that the operator itself makes."""
    return {"padding": tuple(low for low, _ in pads)}


def convolution(
    kind: str, image: str, borders: Sequence[Border], widened: Sequence[int], **arguments: Any
) -> Tensor:
    """A convolution of this rank's rows.

    widened: zeros around the dims that are not split, by dim from the last.
    """
    value = extended(arguments[image], borders)
    if any(widened):
        value = F.pad(value, list(widened))
    out: Tensor = function_of(kind)(**{**arguments, image: value})
    return out


class _Grown(NamedTuple):
    """The rows of a transposed convolution's output that belong to a rank.

    These are `length` rows from `start`; the input first gets `spare` more rows of zeros.
    """

    dim: int
    start: int
    length: int
    spare: int

    @classmethod
    def of(cls, window: Window, dim: int, shards: int) -> _Grown:
        """The rows of one of `shards` shards."""
        start = window.before + window.low * window.stride
        length = window.made // shards
        rows = window.rows // shards + window.low + window.high
        # The last window must reach the last row that this rank owns.
        spare = max(0, 1 - rows - (window.span - start - length) // window.stride)
        return cls(dim, start, length, spare)


def transposed(
    kind: str, image: str, borders: Sequence[Border], grown: Sequence[_Grown], **arguments: Any
) -> Tensor:
    """A transposed convolution of this rank's rows, without those that belong to neighbours."""
    value = extended(arguments[image], borders)
    for dim, _, _, spare in grown:
        if spare:
            value = torch.cat([value, torch.zeros_like(value.narrow(dim, 0, spare))], dim)
    out: Tensor = function_of(kind)(**{**arguments, image: value})
    for dim, start, length, _ in grown:
        out = out.narrow(dim, start, length)
    return out.contiguous()


class _Count(NamedTuple):
    """The window of a mean along a split dim.

    first: the rank's first output row. Rows of the input from `low` to before `end` count.
    """

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
        """The window of this rank; with `padded` the padding counts."""
        low = -window.before if padded else 0
        end = window.rows + (window.after if padded else 0)
        first = group.coordinate * (window.made // group.size)
        return cls(
            dim, first, window.kernel, window.stride, window.dilation, window.before, low, end
        )

    def weights(self, like: Tensor) -> Tensor:
        """The factor of each output row's mean over all places of the window."""
        rows = torch.arange(self.first, self.first + like.shape[self.dim], device=like.device)
        reach = torch.arange(self.kernel, device=like.device) * self.dilation - self.before
        places = rows[:, None] * self.stride + reach
        # The operator has divided by the whole window; this corrects it where padding does not
        # count.
        counted = ((places >= self.low) & (places < self.end)).sum(1)
        return (self.kernel / counted.to(like.dtype)).reshape(-1, *(1,) * (-1 - self.dim))


def pool(
    kind: str, image: str, borders: Sequence[Border], counts: Sequence[_Count], **arguments: Any
) -> Tensor:
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
