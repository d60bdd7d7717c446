"""Operators that move, cut, join or create elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from .dtypes import torch_dtype

Tensor = torch.Tensor


def reshape(*, data: Tensor, shape: tuple[int, ...], allowzero: int = 0) -> Tensor:
    """The same elements in another shape."""
    return data.reshape(shape)


def flatten(*, input: Tensor, axis: int = 1) -> Tensor:
    """The elements in two dims: those before `axis` and the rest."""
    outer = math.prod(input.shape[:axis])
    return input.reshape(outer, math.prod(input.shape[axis:]))


def transpose(*, data: Tensor, perm: tuple[int, ...]) -> Tensor:
    """The dims in another order."""
    return data.permute(perm)


def squeeze(*, data: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The tensor without the dims `axes`, whose size is 1."""
    return data.squeeze(axes) if axes else data


def unsqueeze(*, data: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Insert dims of size 1 at the places `axes` of the result."""
    for axis in sorted(axes):
        data = data.unsqueeze(axis)
    return data


def expand(*, input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor broadcast to a shape."""
    return input.expand(shape)


def concat(*, inputs: tuple[Tensor, ...], axis: int) -> Tensor:
    """Tensors joined along a dim."""
    return torch.cat(inputs, dim=axis)


def split(*, input: Tensor, split: tuple[int, ...], axis: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the sizes given, cut along a dim."""
    return tuple(torch.split(input, list(split), dim=axis))


def slice_(
    *,
    data: Tensor,
    starts: tuple[int, ...],
    ends: tuple[int, ...],
    axes: tuple[int, ...],
    steps: tuple[int, ...],
) -> Tensor:
    """A range of every dim in `axes`; a step may be negative."""
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 1:
            first, last, _ = slice(start, end).indices(data.shape[axis])
            data = data.narrow(axis, first, max(0, last - first))
        else:
            # Torch has no negative steps: the places are written out.
            picks = range(data.shape[axis])[start:end:step]
            data = data.index_select(
                axis, torch.tensor(list(picks), dtype=torch.int64, device=data.device)
            )
    return data


def tile(*, input: Tensor, repeats: tuple[int, ...]) -> Tensor:
    """The tensor repeated along every dim."""
    return input.repeat(repeats)


def _pad_constant(data: Tensor, pads: tuple[int, ...], value: float | bool) -> Tensor:
    rank = data.dim()
    flat = [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[rank + axis])]
    # Torch pads no booleans.
    if data.dtype == torch.bool:
        return F.pad(data.to(torch.uint8), flat, value=int(value)).bool()
    return F.pad(data, flat, value=float(value))


def _pad_indices(size: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    """The places of the source that the padded dim shows, by the mode's way of going on."""
    places = torch.arange(-before, size + after, device=device)
    if mode == "wrap":
        return places % size
    if mode == "edge" or size == 1:
        return places.clamp(0, size - 1)
    # Reflections repeat after the way there and back; the ends are not doubled.
    period = 2 * (size - 1)
    folded = places.abs() % period
    return torch.where(folded >= size, period - folded, folded)


def pad(
    *,
    data: Tensor,
    pads: tuple[int, ...],
    constant_value: float | Tensor = 0,
    mode: str = "constant",
) -> Tensor:
    """The tensor grown (or, where negative, cropped) at both ends of every dim."""
    rank = data.dim()
    if mode == "constant":
        if isinstance(constant_value, torch.Tensor):
            constant_value = constant_value.item()
        return _pad_constant(data, pads, constant_value)
    for axis in range(rank):
        before = pads[axis]
        after = pads[rank + axis]
        if before or after:
            places = _pad_indices(data.shape[axis], before, after, mode, data.device)
            data = data.index_select(axis, places)
    return data


def depth_to_space(*, input: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Turn blocks of channels into blocks of places."""
    n, c, h, w = input.shape
    b = blocksize
    depth = c // b**2
    if mode == "DCR":
        moved = input.reshape(n, b, b, depth, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        moved = input.reshape(n, depth, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return moved.reshape(n, depth, h * b, w * b)


def space_to_depth(*, input: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Turn blocks of places into blocks of channels."""
    n, c, h, w = input.shape
    b = blocksize
    blocks = input.reshape(n, c, h // b, b, w // b, b)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return blocks.permute(order).reshape(n, c * b * b, h // b, w // b)


def trilu(*, input: Tensor, k: int = 0, upper: int = 1) -> Tensor:
    """The upper or lower triangle of the innermost matrices."""
    return torch.triu(input, k) if upper else torch.tril(input, k)


def center_crop_pad(
    *, input_data: Tensor, shape: tuple[int, ...], axes: tuple[int, ...] | None = None
) -> Tensor:
    """The tensor cropped or padded with zeros around its centre to a shape."""
    dims = range(input_data.dim()) if axes is None else axes
    for axis, wanted in zip(dims, shape, strict=True):
        size = input_data.shape[axis]
        if size > wanted:
            input_data = input_data.narrow(axis, (size - wanted) // 2, wanted)
        elif size < wanted:
            before = (wanted - size) // 2
            position = axis % input_data.dim()
            pads = [0] * (2 * input_data.dim())
            pads[position] = before
            pads[input_data.dim() + position] = wanted - size - before
            input_data = _pad_constant(input_data, tuple(pads), 0)
    return input_data


def reverse_sequence(
    *, input: Tensor, sequence_lens: Tensor, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    """The tensor with the first elements of every sequence in reverse order."""
    time = torch.arange(input.shape[time_axis], device=input.device)
    lengths = sequence_lens.to(torch.int64).unsqueeze(1)
    places = torch.where(time < lengths, lengths - 1 - time, time)
    places = places if batch_axis < time_axis else places.t()
    shape = [
        input.shape[axis] if axis in (batch_axis, time_axis) else 1 for axis in range(input.dim())
    ]
    return torch.gather(input, time_axis, places.reshape(shape).expand(input.shape))


def constant_of_shape(*, input: tuple[int, ...], value: float = 0.0, dtype: int = 1) -> Tensor:
    """A tensor of one repeated value."""
    return torch.full(input, value, dtype=torch_dtype(dtype))


def range_(*, start: float, limit: float, delta: float, dtype: int, stash_type: int = 1) -> Tensor:
    """Numbers from `start` to below `limit` in steps of `delta`."""
    count = max(0, math.ceil((limit - start) / delta))
    if not count:
        return torch.empty(0, dtype=torch_dtype(dtype))
    return torch.arange(count).to(torch_dtype(dtype)) * delta + start


def eye_like(*, input: Tensor, dtype: int, k: int = 0) -> Tensor:
    """Ones on a diagonal, zeros elsewhere, in the shape of the input."""
    ones = torch.ones(input.shape, dtype=torch.float32, device=input.device)
    return torch.triu(torch.tril(ones, k), k).to(torch_dtype(dtype))


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
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
    "ConstantOfShape": constant_of_shape,
    "Range": range_,
    "EyeLike": eye_like,
}
