"""Rules of operators that read or write at the places in a tensor of indices: the indexed dims stay whole."""

from __future__ import annotations

from .registry import Call, register
from .shape import letters
from .spelling import by_name, whole


def _axis(call: Call, rank: int) -> int:
    return call.integer("dim", "axis") % max(rank, 1)


def gather_elements(call: Call) -> str:
    """Each index reads along one dim of the data; on the other dims both are split alike if their sizes are equal."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    read = "v" if call.inputs[0].is_float else "!v"
    axis = _axis(call, len(data))
    left, index = letters(len(data)), letters(len(data))
    for i, (size, count) in enumerate(zip(data, indices, strict=True)):
        if i == axis:
            left[i] = read
        elif size != count:
            left[i], index[i] = f"!v{i}", f"!i{i}"
    return f"{' '.join(left)}, {' '.join(index)} -> {' '.join(index)}" + (" | v: sum; v: masked" if read == "v" else "")


def scatter_elements(call: Call) -> str:
    """Each index writes along one dim of the data; on the other dims all are split alike if their sizes are equal."""
    data = call.inputs[0].shape
    axis = _axis(call, len(data))
    free = [i != axis and all(len(t.shape) == len(data) and t.shape[i] == data[i] for t in call.inputs[1:]) for i in range(len(data))]
    names = [name if free[i] else "v" if i == axis else f"!{name}" for i, name in enumerate(letters(len(data)))]
    written = [
        " ".join(names[i] if i < len(free) and free[i] else f"!i{position}_{i}" for i in range(len(tensor.shape)))
        for position, tensor in enumerate(call.inputs[1:])
    ]
    return ", ".join([" ".join(names), *written]) + " -> " + " ".join(names) + (" | v: masked" if data else "")


def _gather_nd(call: Call) -> str:
    """Index tuples over the dims behind the batch; the dims behind those are read whole slices at a time."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    batch = [f"b{i}" for i in range(call.integer("batch_dims"))]
    places = [f"i{i}" for i in range(len(indices) - 1 - len(batch))]
    rest = [f"r{i}" for i in range(len(data) - len(batch) - indices[-1])]
    indexed = [f"!v{i}" for i in range(indices[-1])]
    return f"{' '.join([*batch, *indexed, *rest])}, {' '.join([*batch, *places, '!t'])} -> {' '.join([*batch, *places, *rest])}"


def _scatter_nd(call: Call) -> str:
    """Index tuples over the first dims: the other dims are written whole slices at a time."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    places = [f"!i{i}" for i in range(len(indices) - 1)]
    rest = [f"r{i}" for i in range(len(data) - indices[-1])]
    kept = " ".join([*(f"!v{i}" for i in range(indices[-1])), *rest])
    return f"{kept}, {' '.join([*places, '!t'])}, {' '.join([*places, *rest])} -> {kept}"


def _one_hot(call: Call) -> str:
    """Every index becomes a row of its own along a new dim."""
    names = letters(len(call.inputs[0].shape))
    axis = call.integer("axis", default=-1) % (len(names) + 1)
    return by_name(call, {"indices": " ".join(names)}, [" ".join([*names[:axis], "!v", *names[axis:]])])


def _compress(call: Call) -> str:
    """The dim that is thinned out stays whole; without an axis that is every dim."""
    shape, out = call.inputs[0].shape, call.outputs[0].shape
    axis = call.get("axis")
    if not isinstance(axis, int):
        return by_name(call, {}, ["!v"])
    axis %= len(shape)
    names = letters(len(shape))
    before, after = ([f"!{mark}" if i == axis else name for i, name in enumerate(names)] for mark in ("k", "v"))
    return by_name(call, {"input": " ".join(before)}, [" ".join(after[: len(out)])])


def _tensor_scatter(call: Call) -> str:
    """Rows of a cache are written from an index of each sample on."""
    names = letters(len(call.inputs[0].shape))
    axis = call.integer("axis", default=-2) % len(names)
    cache, update = (" ".join(f"!{mark}" if i == axis else name for i, name in enumerate(names)) for mark in ("c", "u"))
    return by_name(call, {"past_cache": cache, "update": update, "write_indices": names[0]}, [cache])


def _reverse_sequence(call: Call) -> str:
    """The time stays whole; every sequence has a length of its own."""
    rank = len(call.inputs[0].shape)
    time, batch = call.integer("time_axis", default=0) % rank, call.integer("batch_axis", default=1) % rank
    names = letters(rank)
    dims = " ".join(f"!{name}" if i == time else name for i, name in enumerate(names))
    return by_name(call, {"input": dims, "sequence_lens": names[batch]}, [dims])


def _regions(call: Call) -> str:
    """Regions of an image, each on its own: they index the batch and the space, channels are pooled apart."""
    out = call.outputs[0].shape
    return by_name(
        call, {"X": f"!n c {whole(call.inputs[0].shape[2:], 'x')}", "rois": "r !t", "batch_indices": "r"}, [f"r c {whole(out[2:], 'y')}"]
    )


register("onnx.GatherElements", gather_elements, linear=((0,),))
register("onnx.ScatterElements", scatter_elements)
register("onnx.GatherND", _gather_nd, linear=((0,),))
register("onnx.ScatterND", _scatter_nd)
register("onnx.OneHot", _one_hot, linear=((1,),))
register("onnx.Compress", _compress)
register("onnx.TensorScatter", _tensor_scatter, linear=((0, 1),))
register("onnx.ReverseSequence", _reverse_sequence, linear=((0,),))
register("onnx.RoiAlign onnx.MaxRoiPool", _regions)
