"""Operators that move, cut, join or create elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.errors import ModelError
from autopar.frontends.onnx.values import FOLD_LIMIT, clamped, dtype_name

from .casts import to_type
from .symbols import Number, Symbol, cat, where
from .trace import Asked

Shape = tuple[int, ...]


def reshape(asked: Asked, *, data: Symbol, **_: object) -> Symbol:
    """The same elements in another shape."""
    return data.reshape(*asked.shape)


def flatten(*, input: Symbol, axis: int = 1) -> Symbol:
    """The elements in two dims: those before `axis` and the rest."""
    return input.reshape(math.prod(input.shape[:axis]), math.prod(input.shape[axis:]))


def transpose(*, data: Symbol, perm: Shape | None = None) -> Symbol:
    """The dims in another order, by default in reverse."""
    order = tuple(reversed(range(data.rank))) if perm is None else perm
    if sorted(order) != list(range(data.rank)):
        raise ModelError(f"{order} is not a permutation of {data.rank} dims")
    return data.permute(*order)


def squeeze(*, data: Symbol, axes: Shape | None = None) -> Symbol:
    """The tensor without the dims `axes`, whose size is 1, by default without all of them."""
    if axes is None:
        axes = tuple(axis for axis, size in enumerate(data.shape) if size == 1)
    return data.squeeze(*axes) if axes else data


def unsqueeze(*, data: Symbol, axes: Shape) -> Symbol:
    """Insert dims of size 1 at the places `axes` of the result."""
    rank = data.rank + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def expand(asked: Asked, *, input: Symbol, **_: object) -> Symbol:
    """The tensor broadcast to a shape."""
    return input.expand(*asked.shape)


def split(asked: Asked, *, input: Symbol, axis: int = 0, **_: object) -> tuple[Symbol, ...]:
    """Pieces of the sizes given, cut along a dim."""
    sizes = [output.shape[axis] for output in asked.outputs]
    return (input,) if len(sizes) == 1 else input.split(sizes, axis)


def slice_(
    *,
    data: Symbol,
    starts: Shape,
    ends: Shape,
    axes: Shape | None = None,
    steps: Shape | None = None,
) -> Symbol:
    """A range of every dim in `axes`; a step may be negative."""
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = steps or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ModelError(f"starts {starts}, ends {ends}, axes {axes} and steps {steps} do not fit")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places = clamped(start, end, step, data.shape[axis])
        if step < 0:
            # Torch has no negative steps: the places are those of the dim in reverse order.
            data = data.flip(axis)
            last = data.shape[axis] - 1
            places = range(last - places.start, last - places.stop, -step)
        data = data.cut(axis, places.start, max(places.start, places.stop), abs(step))
    return data


def tile(*, input: Symbol, repeats: Shape) -> Symbol:
    """The tensor repeated along every dim."""
    shape = tuple(size * count for size, count in zip(input.shape, repeats, strict=True))
    return input.new("repeat.default", shape, self=input, repeats=repeats)


def _padded(data: Symbol, before: Shape, after: Shape, value: Number) -> Symbol:
    # Torch pads no booleans.
    if data.dtype == "bool":
        return data.to("uint8").pad(before, after, int(value)).to("bool")
    return data.pad(before, after, value)


def _shown(size: int, before: int, after: int, mode: str) -> np.ndarray:
    """The places of the source that the padded dim shows, by the mode's way of going on."""
    places = np.arange(-before, size + after)
    if mode == "wrap":
        return places % size
    if mode == "edge" or size == 1:
        return places.clip(0, size - 1)
    # Reflections repeat after the way there and back; the ends are not doubled.
    period = 2 * (size - 1)
    folded = np.abs(places) % period
    return np.where(folded >= size, period - folded, folded)


def pad(
    *,
    data: Symbol,
    pads: Shape,
    axes: Shape | None = None,
    constant_value: Number | Symbol | None = None,
    value: Number | None = None,
    mode: str = "constant",
) -> Symbol:
    """The tensor grown (or, where negative, cropped) at both ends of every dim, or of `axes`."""
    if axes is not None:
        count = len(axes)
        by_axis = {axis % data.rank: (pads[i], pads[count + i]) for i, axis in enumerate(axes)}
        both = [by_axis.get(axis, (0, 0)) for axis in range(data.rank)]
        pads = (*(before for before, _ in both), *(after for _, after in both))
    if len(pads) != 2 * data.rank:
        raise ModelError(f"{len(pads)} pads for {data.rank} dims")
    if constant_value is None:
        constant_value = value or 0
    rank = data.rank
    if mode != "constant":
        for axis in range(rank):
            before, after = pads[axis::rank]
            if before or after:
                data = data.picked(axis, _shown(data.shape[axis], before, after, mode))
        return data
    if not isinstance(constant_value, Symbol):
        return _padded(data, pads[:rank], pads[rank:], constant_value)
    # A number that only a run knows stands where the grown mask is not set.
    inside = data.constant(np.ones((1,) * rank, np.bool_)).expand(*data.shape)
    inside = _padded(inside, pads[:rank], pads[rank:], False)
    return where(inside, _padded(data, pads[:rank], pads[rank:], 0), constant_value.reshape())


def depth_to_space(*, input: Symbol, blocksize: int, mode: str = "DCR") -> Symbol:
    """Turn blocks of channels into blocks of places."""
    n, c, h, w = input.shape
    b = blocksize
    depth = c // b**2
    blocks = (b, b, depth) if mode == "DCR" else (depth, b, b)
    order = (0, 3, 4, 1, 5, 2) if mode == "DCR" else (0, 1, 4, 2, 5, 3)
    moved = input.reshape(n, *blocks, h, w).permute(*order)
    return moved.reshape(n, depth, h * b, w * b)


def space_to_depth(*, input: Symbol, blocksize: int, mode: str = "DCR") -> Symbol:
    """Turn blocks of places into blocks of channels."""
    n, c, h, w = input.shape
    b = blocksize
    blocks = input.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return blocks.permute(*order).reshape(n, c * b * b, h // b, w // b)


def center_crop_pad(*, input_data: Symbol, shape: Shape, axes: Shape | None = None) -> Symbol:
    """The tensor cropped or padded with zeros around its centre to a shape."""
    rank = input_data.rank
    for axis, wanted in zip(range(rank) if axes is None else axes, shape, strict=True):
        size = input_data.shape[axis]
        start = (size - wanted) // 2
        if size > wanted:
            input_data = input_data.cut(axis, start, start + wanted)
        elif size < wanted:
            before = [(wanted - size) // 2 if dim == axis % rank else 0 for dim in range(rank)]
            after = [wanted - size - n if dim == axis % rank else 0 for dim, n in enumerate(before)]
            input_data = _padded(input_data, tuple(before), tuple(after), 0)
    return input_data


def reverse_sequence(
    *, input: Symbol, sequence_lens: Symbol, batch_axis: int = 1, time_axis: int = 0
) -> Symbol:
    """The tensor with the first elements of every sequence in reverse order."""
    time = input.constant(np.arange(input.shape[time_axis]))
    lengths = sequence_lens.to("int64").unsqueeze(1)
    places = where(time < lengths, lengths - 1 - time, time)
    places = places if batch_axis < time_axis else places.t
    shape = [
        size if axis in (batch_axis, time_axis) else 1 for axis, size in enumerate(input.shape)
    ]
    return input.gather(time_axis, places.reshape(*shape).expand(*input.shape))


def eye_like(asked: Asked, *, input: Symbol, k: int = 0, dtype: int = 0) -> Symbol:
    """Ones on a diagonal, zeros elsewhere, in the shape of the input."""
    if input.size > FOLD_LIMIT:
        raise ModelError(f"EyeLike of the shape {input.shape} is too large")
    rows, columns = input.shape
    return to_type(input.constant(np.eye(rows, columns, k=k, dtype=np.float32)), asked.code)


def _made(asked: Asked, kind: str, shape: Shape, **arguments: Number | Shape) -> Symbol:
    dtype = dtype_name(asked.code, asked.trace.label)
    (val,) = asked.trace.emit(kind, [(shape, dtype)], {**arguments, "dtype": dtype})
    return Symbol(asked.trace, val)


def constant_of_shape(asked: Asked, *, input: Shape, value: float = 0.0) -> Symbol:
    """A tensor of one repeated value."""
    return _made(asked, "aten.full.default", asked.shape, size=asked.shape, fill_value=value)


def range_(asked: Asked, *, start: float, limit: float, delta: float, **_: object) -> Symbol:
    """Numbers from `start` to below `limit` in steps of `delta`."""
    (count,) = asked.shape
    return _made(asked, "aten.arange.default", asked.shape, end=count) * delta + start


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Flatten": flatten,
    "Transpose": transpose,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Concat": lambda *, inputs, axis: cat(inputs, axis),
    "Slice": slice_,
    "Tile": tile,
    "Pad": pad,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "Trilu": lambda *, input, k=0, upper=1: input.map("triu" if upper else "tril", diagonal=k),
    "CenterCropPad": center_crop_pad,
    "ReverseSequence": reverse_sequence,
}
ASKING: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Reshape": reshape,
    "Expand": expand,
    "Split": split,
    "EyeLike": eye_like,
    "ConstantOfShape": constant_of_shape,
    "Range": range_,
}
