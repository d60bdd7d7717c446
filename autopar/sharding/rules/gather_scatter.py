"""Rules of operators that read or write at given places: indexed dims split by masking, other dims
alike.

A read along a split dim gives zeros for elements in other shards, so the shards' results add up; a
write skips elements in other shards. Both need indices into the whole dim, which every device has.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Ref

from .registry import Call, register
from .selection import all_whole
from .shape import letters

FILL_IN = "aten.masked_scatter.default"


def _dim(call: Call) -> int:
    return call.integer("dim") % max(len(call.inputs[0].shape), 1)


def _aligned(dim: int, *shapes: Sequence[int]) -> list[list[str]]:
    """Names of dims: `k` for the others' `dim`; elsewhere equal dims share a name, dims of unequal
    sizes are whole.
    """
    rank = len(shapes[0])
    equal = [len({shape[i] for shape in shapes}) == 1 for i in range(rank)]
    rest = [
        [f"d{i}" if equal[i] else f"!d{i}_{j}" for i in range(rank)] for j in range(len(shapes))
    ]
    for j, names in enumerate(rest):
        names[dim] = f"k{j}" if j else f"d{dim}"
    return rest


def _masked(call: Call, *factors: str) -> str:
    """Reading rows that are split: only floats can be partial."""
    return (
        f" | {', '.join(factors)}: sum; {', '.join(factors)}: masked"
        if factors and call.outputs[0].is_float
        else ""
    )


def _read(call: Call, name: str) -> str:
    """The factor of a dim that is read at places: whole where zeros cannot be added up."""
    return name if call.outputs[0].is_float else f"!{name}"


def _spell(*tensors: Sequence[str]) -> str:
    return ", ".join(" ".join(dims) for dims in tensors)


def _gather(call: Call) -> str:
    """`out[i, j] = self[i, index[i, j]]`; the index may cover fewer rows than there are."""
    shape = call.inputs[0].shape
    index = call.inputs[1].shape
    if not shape or len(index) != len(shape):  # the rank of an index without elements may be any
        return all_whole(call)
    # Dims of unequal sizes stay whole: element i of the index reads row i of the data, which equal
    # shards of both would hold on other ranks.
    dim = _dim(call)
    data, places = _aligned(dim, shape, index)
    data[dim] = _read(call, data[dim])
    return f"{_spell(data, places)} -> {_spell(places)}" + _masked(call, data[dim])


def _index_select(call: Call) -> str:
    """`out[:, k] = self[:, index[k]]`."""
    rank = len(call.inputs[0].shape)
    if rank == 0 or not call.inputs[1].shape:
        return all_whole(call)
    dim = _dim(call)
    names = letters(rank)
    read = _read(call, names[dim])
    first = [read if i == dim else name for i, name in enumerate(names)]
    return f"{_spell(first, ['k'])} -> {_spell([*names[:dim], 'k', *names[dim + 1 :]])}" + _masked(
        call, read
    )


def _take_along(call: Call) -> str:
    """It is `gather` with the other dims broadcast; without a dim both are read flat."""
    # Read flat, equal shards of both tensors do not hold the same places.
    shape = call.inputs[0].shape
    index = call.inputs[1].shape
    if not isinstance(call.get("dim"), int) or not shape:
        return all_whole(call)
    dim = _dim(call)
    names = letters(len(shape))
    read = _read(call, names[dim])
    first = [read if i == dim else name for i, name in enumerate(names)]
    second = ["k" if i == dim else name for i, name in enumerate(names)]
    assert len(index) == len(shape)
    return f"{_spell(first, second)} -> {_spell(second)}" + _masked(call, read)


def _places(call: Call) -> list[tuple[int, int]] | None:
    """(dim of self, index among the inputs) of every index tensor; None for a mask: the data set
    its result's size.
    """
    places = []
    indices = call.get("indices")
    for dim, value in enumerate(indices if isinstance(indices, tuple) else ()):
        if isinstance(value, Ref):
            if call.inputs[value.index].dtype in ("bool", "uint8"):
                return None
            places.append((dim, value.index))
    return places


def _indexed(
    call: Call, places: Sequence[tuple[int, int]], names: Sequence[str]
) -> tuple[list[list[str]], list[str]]:
    """Names of the index tensors' dims (broadcast among each other) and of the dims of
    `self[indices]`.
    """
    depth = max((len(call.inputs[at].shape) for _, at in places), default=0)
    places_names = [f"i{j}" for j in range(depth)]
    tensors = [places_names[depth - len(call.inputs[at].shape) :] for _, at in places]
    dims = [dim for dim, _ in places]
    rest = [name for i, name in enumerate(names) if i not in dims]
    # As in torch: where the indexed dims do not lie together, their result comes in front.
    together = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    front = dims[0] if dims and together else 0
    return tensors, [*rest[:front], *places_names, *rest[front:]]


def _index(call: Call) -> str:
    """`self[:, i, j]`: the index tensors' broadcast dims take the place of the dims that they
    index.
    """
    places = _places(call)
    if places is None:
        return all_whole(call)
    names = letters(len(call.inputs[0].shape))
    tensors, out = _indexed(call, places, names)
    read = [names[dim] for dim, _ in places]
    first = [_read(call, name) if name in read else name for name in names]
    text = f"{_spell(first, *tensors)} -> {_spell(out)}" + _masked(call, *read)
    # Rows of a table, named by one list of places, can also travel from the ranks that have them.
    rows = (
        len(places) == 1 and places[0][0] == 0 and len(tensors[0]) == 1 and call.outputs[0].is_float
    )
    return text + "; d0 + i0: dispatch" * rows


def _masked_fill_in(call: Call) -> str:
    """The elements of `source` in their order take the places that the mask names.

    Shards of the first dim hold consecutive places. The elements that belong there travel to them,
    as only the mask says how many places lie before.
    """
    into, mask, source = (tensor.shape for tensor in call.inputs)
    if not into or not source or mask[: 1 - len(into) or None] != into[:1]:
        return all_whole(call)
    rest = [f"!d{i}" for i in range(1, len(into))]
    inner = [f"!m{i}" for i in range(1, len(mask))]
    taken = ["!n", *(f"!s{i}" for i in range(1, len(source)))]
    held = _spell(["d0", *rest])
    return f"{held}, {_spell(['d0', *inner], taken)} -> {held} | d0 + n: dispatch"


def _index_put(call: Call) -> str:
    """`self[:, i, j] = values`; where values are added, the places may be split too and `self`
    comes once.
    """
    places = _places(call)
    values = call.inputs[-1].shape
    names = letters(len(call.inputs[0].shape))
    if places is None:
        return _masked_put(call)
    tensors, put = _indexed(call, places, names)
    loops = sorted({name for dims in tensors for name in dims})
    # Sums may come in any order and from any rank; of values that overwrite, the last one must win.
    added = bool(call.get("accumulate")) and call.outputs[0].is_float and bool(loops)
    mark = "" if added else "!"
    written = [names[dim] for dim, _ in places]
    spelled = [[mark + name for name in dims] for dims in tensors]
    # Values may have more dims than the place they go to, all of size 1, or fewer, which broadcast.
    spare = ["1"] * (len(values) - len(put))
    given = [*spare, *(mark + name if name in loops else name for name in put)][
        len(spare) + len(put) - len(values) :
    ]
    clauses = [f"{', '.join(loops)}: sum"] if added else []
    clauses += [f"{', '.join(written)}: masked"] if written else []
    start = "+" if added else ""
    line = f"{start}{_spell(names, *spelled, given)} -> {_spell(names)}"
    return f"{line} | {'; '.join(clauses)}" if clauses else line


def _masked_put(call: Call) -> str:
    """`self[mask] = number` works point by point; several values are assigned in order, which needs
    the whole mask.
    """
    indices = call.get("indices")
    rank = len(call.inputs[0].shape)
    mask = call.inputs[1]
    alone = (
        isinstance(indices, tuple)
        and len(indices) == 1
        and len(call.inputs) == 3
        and call.inputs[2].size == 1
        and mask.dtype == "bool"
    )
    if not alone:
        return all_whole(call)
    names = letters(rank)
    return (
        f"{_spell(names, names[: len(mask.shape)], ['1'] * len(call.inputs[2].shape))} -> "
        f"{_spell(names)}"
    )


def _scatter(call: Call) -> str:
    """`out[i, index[i, j]] = src[i, j]` (or plus it).

    Sums may be split over j too, and `self` then comes once.
    """
    shape = call.inputs[0].shape
    index = call.inputs[1].shape
    if not shape or not index:
        return all_whole(call)
    dim = _dim(call)
    sources = [tensor.shape for tensor in call.inputs[2:] if tensor.shape]
    first, *others = _aligned(dim, shape, index, *sources)
    # A source may be longer than the index along the dim; its shards then do not match.
    added = (
        call.operator.kind == "aten.scatter_add.default"
        and call.outputs[0].is_float
        and sources[0][dim] == index[dim]
    )
    for names in others:
        names[dim] = "k" if added else f"!{names[dim]}"
    numbers: list[list[str]] = [[] for tensor in call.inputs[2:] if not tensor.shape]
    head, clause = ("+", "; k: sum") if added else ("", "")
    return (
        f"{head}{_spell(first, *others, *numbers)} -> {_spell(first)} | {first[dim]}: "
        f"masked{clause}"
    )


def _index_write(call: Call) -> str:
    """`out[:, index[k]] = source[:, k]` (or plus it)."""
    rank = len(call.inputs[0].shape)
    if rank == 0 or any(not tensor.shape for tensor in call.inputs[1:2]):
        return all_whole(call)
    dim = _dim(call)
    names = letters(rank)
    # Two places may be the same row: what is copied twice depends on the order, a sum does not.
    added = call.operator.kind == "aten.index_add.default" and call.outputs[0].is_float
    loop = "k" if added else "!k"
    sources = [
        [*names[:dim], loop, *names[dim + 1 :]] if tensor.shape else []
        for tensor in call.inputs[2:]
    ]
    clause = f" | {names[dim]}: masked" + ("; k: sum" if added else "")
    return f"{'+' if added else ''}{_spell(names, [loop], *sources)} -> {_spell(names)}{clause}"


def _into_slice(call: Call) -> str:
    """`slice_scatter`, `select_scatter`: the dim that is written in part stays whole."""
    rank = len(call.inputs[0].shape)
    dim = _dim(call)
    names = letters(rank)
    first = [f"!{name}" if i == dim else name for i, name in enumerate(names)]
    source = [name for i, name in enumerate(names) if i != dim]
    if len(call.inputs[1].shape) == rank:
        source.insert(dim, "!k")
    return f"{_spell(first, source)} -> {_spell(first)}"


def _into_diagonal(call: Call) -> str:
    """`diagonal_scatter`: the two dims of the diagonal stay whole."""
    rank = len(call.inputs[0].shape)
    dims = {call.integer("dim1", default=0) % rank, call.integer("dim2", default=1) % rank}
    names = [f"!d{i}" if i in dims else f"d{i}" for i in range(rank)]
    return f"{_spell(names, [*(n for n in names if n[0] != '!'), '!k'])} -> {_spell(names)}"


def _one_hot(call: Call) -> str:
    """A new last dim of the classes; without their number it is read off all values."""
    names = letters(len(call.inputs[0].shape))
    return (
        all_whole(call)
        if call.integer("num_classes", default=-1) < 0
        else f"{_spell(names)} -> {_spell([*names, '!c'])}"
    )


def _searched(call: Call) -> str:
    """Each value is looked up on its own, in one sequence of bounds or in that of its row."""
    bounds, values = (
        ("boundaries", "self")
        if call.position("boundaries") is not None
        else ("sorted_sequence", "self")
    )
    names = letters(len(call.outputs[0].shape))
    spelled = []
    for index, tensor in enumerate(call.inputs):
        if index == call.position(values):
            spelled.append(names)
        elif index in (call.position(bounds), call.position("sorter")):
            spelled.append([*(names[:-1] if len(tensor.shape) > 1 else []), "!b"])
    return f"{_spell(*spelled)} -> {_spell(names)}"


def _contained(call: Call) -> str:
    """Each element is compared with all test elements."""
    names = letters(len(call.outputs[0].shape))
    spelled = [
        names if i == call.position("elements") else letters(len(t.shape))
        for i, t in enumerate(call.inputs)
    ]
    tests = [
        [f"!t{j}" for j in range(len(dims))] if i != call.position("elements") else dims
        for i, dims in enumerate(spelled)
    ]
    return f"{_spell(*tests)} -> {_spell(names)}"


register("aten.gather.default", _gather, linear=((0,),))
register("aten.index_select.default", _index_select, linear=((0,),), saves="")
register("aten.take_along_dim.default", _take_along, linear=((0,),))
register("aten.index.Tensor aten._unsafe_index.Tensor", _index, linear=((0,),), saves="")
# The values are the third input where one dim is indexed; with more, no partial sum passes.
register(
    "aten.index_put.default aten._unsafe_index_put.default aten._index_put_impl.default",
    _index_put,
    linear=((0, 2),),
    saves="",
)
register(FILL_IN, _masked_fill_in, saves="")
register("aten.scatter.src aten.scatter_add.default", _scatter, linear=((0, 2),), saves="")
register(
    "aten.scatter.value aten.scatter.reduce aten.scatter.value_reduce aten.scatter_reduce.two",
    _scatter,
)
register("aten.index_add.default aten.index_copy.default", _index_write, linear=((0, 2),), saves="")
register(
    "aten.index_fill.int_Scalar aten.index_fill.int_Tensor aten.index_reduce.default", _index_write
)
register(
    "aten.slice_scatter.default aten.select_scatter.default",
    _into_slice,
    linear=((0, 1),),
    saves="",
)
register("aten.diagonal_scatter.default", _into_diagonal, linear=((0, 1),), saves="")
register("aten.one_hot.default", _one_hot, differentiable=False)
register(
    "aten.bucketize.Tensor aten.bucketize.Scalar aten.searchsorted.Tensor aten.searchsorted.Scalar",
    _searched,
    differentiable=False,
)
register(
    "aten.isin.Tensor_Tensor aten.isin.Tensor_Scalar aten.isin.Scalar_Tensor",
    _contained,
    differentiable=False,
)
