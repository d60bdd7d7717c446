"""Operators that move, cut, join or create elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.errors import ModelError
from autopar.frontends.onnx.values import FOLD_LIMIT, dtype_name

from .casts import to_type
from .symbols import Number, Symbol, cat, where
from .trace import Asked

Shape = tuple[int, ...]


def reshape(*, data: Symbol, shape: Shape, allowzero: int = 0) -> Symbol:
    """The same elements in another shape."""
    return data.reshape(*shape)


def flatten(*, input: Symbol, axis: int = 1) -> Symbol:
    """The elements in two dims: those before `axis` and the rest."""
    return input.reshape(math.prod(input.shape[:axis]), math.prod(input.shape[axis:]))


def transpose(*, data: Symbol, perm: Shape) -> Symbol:
    """The dims in another order."""
    return data.permute(*perm)


def squeeze(*, data: Symbol, axes: Shape) -> Symbol:
    """The tensor without the dims `axes`, whose size is 1."""
    return data.squeeze(*axes) if axes else data


def unsqueeze(*, data: Symbol, axes: Shape) -> Symbol:
    """Insert dims of size 1 at the places `axes` of the result."""
    for axis in sorted(axes):
        data = data.unsqueeze(axis)
    return data


def expand(*, input: Symbol, shape: Shape) -> Symbol:
    """The tensor broadcast to a shape."""
    return input.expand(*shape)


def concat(*, inputs: tuple[Symbol, ...], axis: int) -> Symbol:
    """Tensors joined along a dim."""
    return cat(inputs, axis)


def split(*, input: Symbol, split: Shape, axis: int = 0) -> tuple[Symbol, ...]:
    """Pieces of the sizes given, cut along a dim."""
    return input.split(split, axis)


def slice_(*, data: Symbol, starts: Shape, ends: Shape, axes: Shape, steps: Shape) -> Symbol:
    """A range of every dim in `axes`; a step may be negative."""
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places = range(data.shape[axis])[start:end:step]
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
    *, data: Symbol, pads: Shape, constant_value: Number | Symbol = 0, mode: str = "constant"
) -> Symbol:
    """The tensor grown (or, where negative, cropped) at both ends of every dim."""
    rank = data.rank
    if mode != "constant":
        for axis in range(rank):
            before, after = pads[axis], pads[rank + axis]
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
    if mode == "DCR":
        moved = input.reshape(n, b, b, depth, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        moved = input.reshape(n, depth, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return moved.reshape(n, depth, h * b, w * b)


def space_to_depth(*, input: Symbol, blocksize: int, mode: str = "DCR") -> Symbol:
    """Turn blocks of places into blocks of channels."""
    n, c, h, w = input.shape
    b = blocksize
    blocks = input.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return blocks.permute(*order).reshape(n, c * b * b, h // b, w // b)


def trilu(*, input: Symbol, k: int = 0, upper: int = 1) -> Symbol:
    """The upper or lower triangle of the innermost matrices."""
    return input.map("triu" if upper else "tril", diagonal=k)


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


def eye_like(*, input: Symbol, dtype: int, k: int = 0) -> Symbol:
    """Ones on a diagonal, zeros elsewhere, in the shape of the input."""
    if input.size > FOLD_LIMIT:
        raise ModelError(f"EyeLike of the shape {input.shape} is too large")
    rows, columns = input.shape
    return to_type(input.constant(np.eye(rows, columns, k=k, dtype=np.float32)), dtype)


def constant_of_shape(asked: Asked, *, input: Shape, value: float = 0.0, dtype: int = 1) -> Symbol:
    """A tensor of one repeated value."""
    trace = asked.trace
    name = dtype_name(dtype, trace.label)
    (val,) = trace.emit(
        "aten.full.default", [(input, name)], {"size": input, "fill_value": value, "dtype": name}
    )
    return Symbol(trace, val)


def range_(
    asked: Asked, *, start: float, limit: float, delta: float, dtype: int, stash_type: int = 1
) -> Symbol:
    """Numbers from `start` to below `limit` in steps of `delta`."""
    trace = asked.trace
    count = max(0, math.ceil((limit - start) / delta))
    name = dtype_name(dtype, trace.label)
    (val,) = trace.emit("aten.arange.default", [((count,), name)], {"end": count, "dtype": name})
    return Symbol(trace, val) * delta + start


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Tile": tile,
    "Pad": pad,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "Trilu": trilu,
    "CenterCropPad": center_crop_pad,
    "ReverseSequence": reverse_sequence,
    "EyeLike": eye_like,
}
ASKING: Mapping[str, Callable[..., Symbol]] = {
    "ConstantOfShape": constant_of_shape,
    "Range": range_,
}
