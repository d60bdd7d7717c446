"""Rules of operators that cut out, repeat, mirror and rearrange elements, beyond views and
reshapes.
"""

from __future__ import annotations

from .registry import Call, register
from .selection import all_whole
from .shape import changed_dims_whole, letters
from .spelling import whole


def _marked(names: list[str], dims: set[int]) -> str:
    return " ".join(f"!{name}" if i in dims else name for i, name in enumerate(names))


def _diagonal(call: Call) -> str:
    """Two dims become a last one; the others are split."""
    # Place i of the diagonal is at (i, i): a shard of one dim holds a part of it at an offset.
    rank = len(call.inputs[0].shape)
    dims = {call.integer("dim1", default=0) % rank, call.integer("dim2", default=1) % rank}
    if call.operator.kind == "aten.linalg_diagonal.default":
        dims = {call.integer("dim1", default=-2) % rank, call.integer("dim2", default=-1) % rank}
    names = letters(rank)
    return (
        f"{_marked(names, dims)} -> "
        f"{' '.join([*(n for i, n in enumerate(names) if i not in dims), '!k'])}"
    )


def _diag_embed(call: Call) -> str:
    """The last dim becomes two."""
    rank = len(call.outputs[0].shape)
    dims = {call.integer("dim1", default=-2) % rank, call.integer("dim2", default=-1) % rank}
    names = iter(letters(rank - 2))
    outs = [f"!k{i}" if i in dims else next(names) for i in range(rank)]
    return f"{' '.join([*letters(rank - 2), '!k'])} -> {' '.join(outs)}"


def _meshgrid(call: Call) -> str:
    """Every vector is a dim of all results; `xy` swaps the first two."""
    names = letters(len(call.inputs))
    order = names.copy()
    if call.get("indexing") == "xy" and len(names) > 1:
        order[:2] = order[1::-1]
    ins = [name if tensor.shape else "" for name, tensor in zip(names, call.inputs, strict=True)]
    return f"{', '.join(ins)} -> {', '.join(' '.join(order) for _ in call.outputs)}"


def _unfold(call: Call) -> str:
    """Windows along a dim: adjacent ones split, overlapping ones do not; positions in a window are
    a new last dim.
    """
    shape = call.inputs[0].shape
    if not shape:
        return all_whole(call)
    dim = call.integer("dimension") % len(shape)
    size = call.integer("size")
    step = call.integer("step")
    names = letters(len(shape))
    # Windows that overlap read elements of the next shard; a rest behind the last one shifts
    # shards.
    if size == step and shape[dim] % size == 0:
        before = [f"({name} !u={size})" if i == dim else name for i, name in enumerate(names)]
        return f"{' '.join(before)} -> {' '.join([*names, '!u'])}"
    outs = [f"!v{i}" if i == dim else name for i, name in enumerate(names)]
    return f"{_marked(names, {dim})} -> {' '.join([*outs, '!u'])}"


def _repeat_interleave(call: Call) -> str:
    """Every index comes several times in a row, so a split keeps its order; without a dim the
    tensor is read flat.
    """
    before = call.inputs[0].shape
    if call.get("dim") is None or not before:
        return all_whole(call)
    dim = call.integer("dim") % len(before)
    times = call.integer("repeats", default=1)
    names = letters(len(before))
    # An empty result has no factor that both sides share.
    if not before[dim] or times < 1:
        return changed_dims_whole(call)
    outs = [f"({name} !r={times})" if i == dim else name for i, name in enumerate(names)]
    return f"{' '.join(names)} -> {' '.join(outs)}"


def _repeat_by_tensor(call: Call) -> str:
    """Every index has a count of its own: where its copies lie depends on all counts before it."""
    if (
        call.operator.kind == "aten.repeat_interleave.Tensor"
        or call.get("dim") is None
        or not call.inputs[0].shape
    ):
        return all_whole(call)
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim") % rank
    names = letters(rank)
    counts = whole(call.inputs[1].shape, "c")
    outs = [f"!v{i}" if i == dim else name for i, name in enumerate(names)]
    return f"{_marked(names, {dim})}, {counts} -> {' '.join(outs)}"


def _rotated(call: Call) -> str:
    """`rot90`, `fliplr`, `flipud`: the dims that turn stay whole."""
    rank = len(call.inputs[0].shape)
    fixed = {"aten.fliplr.default": {1}, "aten.flipud.default": {0}}
    value = call.get("dims", default=(0, 1))
    turned = (
        {int(d) % rank for d in value if isinstance(d, int)} if isinstance(value, tuple) else {0, 1}
    )
    dims = fixed.get(call.operator.kind, turned)
    names = letters(rank)
    outs = [f"!v{i}" if i in dims else name for i, name in enumerate(names)]
    return f"{_marked(names, dims)} -> {' '.join(outs)}"


def _diff(call: Call) -> str:
    """Differences along a dim, which stays whole, with tensors joined on in front and behind."""
    return _joined(call, call.integer("dim", default=-1) % len(call.outputs[0].shape))


def _joined(call: Call, dim: int) -> str:
    """All dims but the one along which inputs are joined, which stays whole."""
    names = letters(len(call.outputs[0].shape))
    ins = [
        " ".join(f"!w{j}" if i == dim else name for i, name in enumerate(names))
        for j in range(len(call.inputs))
    ]
    outs = " ".join("!v" if i == dim else name for i, name in enumerate(names))
    return f"{', '.join(ins)} -> {outs}"


def _trapezoid(call: Call) -> str:
    """An integral along a dim, which stays whole, as each term reads two neighbours.

    The places are the same for all rows, or one for each element.
    """
    shape = call.inputs[0].shape
    dim = call.integer("dim", default=-1) % len(shape)
    names = letters(len(shape))
    ins = [_marked(names, {dim})]
    ins += [
        "!" + names[dim] if len(t.shape) == 1 else _marked(names, {dim}) for t in call.inputs[1:]
    ]
    outs = [name for i, name in enumerate(names) if i != dim]
    if len(call.outputs[0].shape) == len(shape):
        outs.insert(dim, "!v")
    return f"{', '.join(ins)} -> {' '.join(outs)}"


def _stacked(call: Call) -> str:
    """`hstack`, `vstack` and their like on tensors of at least two dims: the dim that they join
    stays whole.
    """
    rank = len(call.outputs[0].shape)
    dims = {"aten.vstack.default": 0, "aten.row_stack.default": 0, "aten.dstack.default": 2}
    if any(len(tensor.shape) != rank for tensor in call.inputs) or rank < 2:
        return all_whole(call)
    return _joined(call, dims.get(call.operator.kind, 1))


def _pixel_shuffle(call: Call) -> str:
    """Channels become places inside each place, or the reverse."""
    down = call.operator.kind == "aten.pixel_unshuffle.default"
    times = call.integer("downscale_factor" if down else "upscale_factor")
    star = " ".join(letters(len(call.inputs[0].shape) - 3))
    deep = f"{star} (c !r={times} !s={times}) y x"
    wide = f"{star} c (y !r={times}) (x !s={times})"
    return f"{wide} -> {deep}" if down else f"{deep} -> {wide}"


def _channel_shuffle(call: Call) -> str:
    """Groups of channels change places with the channels of a group, which can be split within
    every group.
    """
    groups = call.integer("groups")
    space = " ".join(f"x{i}" for i in range(len(call.inputs[0].shape) - 2))
    return f"n (!g={groups} c) {space} -> n (c !g={groups}) {space}"


def _windows(call: Call) -> str:
    """The windows of each channel of each image, or their sums; channels are the outer part of the
    columns.
    """
    # The space stays whole, as the windows of both spatial dims are one dim of the columns.
    apart = "im2col" in call.operator.kind
    image, columns = (t.shape for t in (call.inputs[0], call.outputs[0])[:: 1 if apart else -1])
    batch = "n " if len(image) == 4 else ""
    window = columns[-2] // max(image[-3], 1)
    ends = (f"{batch}c !y !x", f"{batch}(c !w={window}) !l")
    return " -> ".join(ends if apart else ends[::-1])


def _bits(call: Call) -> str:
    """The same memory as another type: the last dim stays whole where its size changes."""
    before = call.inputs[0].shape
    after = call.outputs[0].shape
    if before == after:
        return "* -> *"
    return (
        f"{' '.join([*letters(len(before) - 1), '!w'])} -> "
        f"{' '.join([*letters(len(before) - 1), '!v'])}"
    )


register("aten.diagonal.default aten.linalg_diagonal.default", _diagonal, linear=((0,),), view=True)
register("aten.diag_embed.default", _diag_embed, linear=((0,),), saves="")
register("aten.meshgrid.default aten.meshgrid.indexing", _meshgrid, view=True)
register("aten.unfold.default", _unfold, linear=((0,),), view=True)
register("aten.repeat_interleave.self_int", _repeat_interleave, linear=((0,),), saves="")
register("aten.repeat_interleave.self_Tensor", _repeat_by_tensor, linear=((0,),), saves="")
register("aten.repeat_interleave.Tensor", _repeat_by_tensor, differentiable=False)
register(
    "aten.rot90.default aten.fliplr.default aten.flipud.default", _rotated, linear=((0,),), saves=""
)
register("aten.diff.default", _diff, saves="")
register(
    [
        f"aten.{name}.{form}"
        for name in ("trapezoid", "trapz", "cumulative_trapezoid")
        for form in ("x", "dx")
    ],
    _trapezoid,
)
register(
    "aten.hstack.default aten.vstack.default aten.dstack.default aten.row_stack.default "
    "aten.column_stack.default",
    _stacked,
    saves="",
)
register(
    "aten.pixel_shuffle.default aten.pixel_unshuffle.default",
    _pixel_shuffle,
    linear=((0,),),
    saves="",
)
register("aten.channel_shuffle.default", _channel_shuffle, linear=((0,),), saves="")
register("aten.im2col.default", _windows, linear=((0,),), saves="")
register("aten.col2im.default", _windows, linear=((0,),), saves="")
register("aten.view.dtype", _bits, differentiable=False, view=True)
# The border copies or mirrors elements that lie in other shards.
register(
    """aten.reflection_pad1d.default aten.reflection_pad2d.default aten.reflection_pad3d.default
    aten.replication_pad1d.default aten.replication_pad2d.default aten.replication_pad3d.default
    aten._pad_circular.default""",
    changed_dims_whole,
    linear=((0,),),
    saves="",
)
register(
    """aten.diag.default aten.diagflat.default aten.trace.default aten.as_strided.default""",
    all_whole,
    linear=((0,),),
)
register(
    """aten.block_diag.default aten.cartesian_prod.default aten.combinations.default
    aten.as_strided_scatter.default aten.masked_select.default aten.take.default
    aten.put.default""",
    all_whole,
)
# The size of the result is in the data: equal shards of the input have results of unequal size.
register(
    """aten.nonzero.default aten.nonzero_static.default aten.nonzero_numpy.default
    aten.argwhere.default aten.bincount.default aten.unique_consecutive.default
    aten.unique_dim.default aten._unique.default aten._unique2.default
    aten.unique_dim_consecutive.default aten.histogram.bin_ct""",
    all_whole,
    differentiable=False,
)
