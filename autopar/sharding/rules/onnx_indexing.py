"""Rules of operators that read or write at the places in a tensor of indices: the indexed dims stay
whole.
"""

from __future__ import annotations

from .registry import Call, register
from .shape import letters
from .spelling import by_name, whole


def _axis(call: Call, rank: int) -> int:
    return call.integer("dim", "axis") % max(rank, 1)


def gather_elements(call: Call) -> str:
    """Each index reads along one dim of the data; on the other dims both are split alike if their
    sizes are equal.
    """
    data = call.inputs[0].shape
    indices = call.inputs[1].shape
    read = "v" if call.inputs[0].is_float else "!v"
    axis = _axis(call, len(data))
    left = letters(len(data))
    index = letters(len(data))
    for i, (size, count) in enumerate(zip(data, indices, strict=True)):
        if i == axis:
            left[i] = read
        # The index covers the first of the data's rows: equal shards of both would not lie
        # together.
        elif size != count:
            left[i] = f"!v{i}"
            index[i] = f"!i{i}"
    return f"{' '.join(left)}, {' '.join(index)} -> {' '.join(index)}" + (
        " | v: sum; v: masked" if read == "v" else ""
    )


def scatter_elements(call: Call) -> str:
    """Each index writes along one dim of the data; on the other dims all are split alike if their
    sizes are equal.
    """
    data = call.inputs[0].shape
    axis = _axis(call, len(data))
    free = [
        i != axis
        and all(len(t.shape) == len(data) and t.shape[i] == data[i] for t in call.inputs[1:])
        for i in range(len(data))
    ]
    names = []
    for i, name in enumerate(letters(len(data))):
        if i == axis:
            # A rank skips what is written to places in other shards, so it needs all indices.
            names.append("v")
        else:
            names.append(name if free[i] else f"!{name}")
    written = [
        " ".join(
            names[i] if i < len(free) and free[i] else f"!i{position}_{i}"
            for i in range(len(tensor.shape))
        )
        for position, tensor in enumerate(call.inputs[1:])
    ]
    return (
        ", ".join([" ".join(names), *written])
        + " -> "
        + " ".join(names)
        + (" | v: masked" if data else "")
    )


def _gather_nd(call: Call) -> str:
    """Index tuples lead into the dims behind the batch; behind these, whole slices are read.

    The indexed dims stay whole: a tuple of several indices has no single dim to mask.
    """
    data = call.inputs[0].shape
    indices = call.inputs[1].shape
    batch = [f"b{i}" for i in range(call.integer("batch_dims"))]
    places = [f"i{i}" for i in range(len(indices) - 1 - len(batch))]
    rest = [f"r{i}" for i in range(len(data) - len(batch) - indices[-1])]
    indexed = [f"!v{i}" for i in range(indices[-1])]
    return (
        f"{' '.join([*batch, *indexed, *rest])}, {' '.join([*batch, *places, '!t'])} -> "
        f"{' '.join([*batch, *places, *rest])}"
    )


def _scatter_nd(call: Call) -> str:
    """Index tuples lead into the first dims, which stay whole; behind these, whole slices are
    written.
    """
    # The tuples stay whole as well: of two that write to one place, the last one counts.
    data = call.inputs[0].shape
    indices = call.inputs[1].shape
    places = [f"!i{i}" for i in range(len(indices) - 1)]
    rest = [f"r{i}" for i in range(len(data) - indices[-1])]
    data_dims = " ".join([*(f"!v{i}" for i in range(indices[-1])), *rest])
    return f"{data_dims}, {' '.join([*places, '!t'])}, {' '.join([*places, *rest])} -> {data_dims}"


def _one_hot(call: Call) -> str:
    """Every index becomes a row of its own along a new dim."""
    names = letters(len(call.inputs[0].shape))
    axis = call.integer("axis", default=-1) % (len(names) + 1)
    return by_name(
        call, {"indices": " ".join(names)}, [" ".join([*names[:axis], "!v", *names[axis:]])]
    )


def _compress(call: Call) -> str:
    """The dim that is thinned out stays whole; without an axis that is every dim."""
    shape = call.inputs[0].shape
    out = call.outputs[0].shape
    axis = call.get("axis")
    # How many indices pass the condition is known only from all of it.
    if not isinstance(axis, int):
        return by_name(call, {}, ["!v"])
    axis %= len(shape)
    names = letters(len(shape))
    before, after = (
        [f"!{mark}" if i == axis else name for i, name in enumerate(names)] for mark in ("k", "v")
    )
    return by_name(call, {"input": " ".join(before)}, [" ".join(after[: len(out)])])


def _tensor_scatter(call: Call) -> str:
    """Rows of a cache are written from an index of each sample on."""
    names = letters(len(call.inputs[0].shape))
    axis = call.integer("axis", default=-2) % len(names)
    cache, update = (
        " ".join(f"!{mark}" if i == axis else name for i, name in enumerate(names))
        for mark in ("c", "u")
    )
    return by_name(
        call, {"past_cache": cache, "update": update, "write_indices": names[0]}, [cache]
    )


def _reverse_sequence(call: Call) -> str:
    """The time stays whole; every sequence has a length of its own."""
    rank = len(call.inputs[0].shape)
    time = call.integer("time_axis", default=0) % rank
    batch = call.integer("batch_axis", default=1) % rank
    names = letters(rank)
    dims = " ".join(f"!{name}" if i == time else name for i, name in enumerate(names))
    return by_name(call, {"input": dims, "sequence_lens": names[batch]}, [dims])


def _regions(call: Call) -> str:
    """Every region is pooled by itself, and so is every channel.

    Regions index the batch and the space, which stay whole.
    """
    out = call.outputs[0].shape
    return by_name(
        call,
        {"X": f"!n c {whole(call.inputs[0].shape[2:], 'x')}", "rois": "r !t", "batch_indices": "r"},
        [f"r c {whole(out[2:], 'y')}"],
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
