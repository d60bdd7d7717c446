"""Rules of operators that move elements: only the whole dims of a compound, or its outer part, can
be split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.ir import Value

from .registry import Call, register


def reshape_rule(before: Sequence[int], after: Sequence[int]) -> str:
    """The rule of a reshape: both shapes are cut at every boundary that they can share; dims
    without one stay whole.

    >>> reshape_rule((2, 16, 12), (2, 16, 3, 4))
    'a b (c d) -> a b c d'
    >>> reshape_rule((6, 4), (4, 6))
    '!u0 !u1 -> !v0 !v1'
    """
    # Without elements the cumulative sizes are all 0, and say nothing about boundaries.
    if math.prod(before) == 0:
        return _whole(before) + " -> " + _whole(after, "v")
    groups = [_cuts(before), _cuts(after)]
    shared = sorted(set(groups[0]) & set(groups[1]))
    bounds: list[int] = []
    for low, high in zip([1, *shared], shared, strict=False):
        inside = sorted({c for cut in groups for c in cut if low <= c <= high})
        # Boundaries that divide one another nest, so what lies between two of them is a factor of
        # both shapes. Elsewhere a negative bound closes a piece without factors.
        if all(b % a == 0 for a, b in itertools.pairwise(inside)):
            bounds += [c for c in inside if c not in bounds]
        else:
            bounds.append(-high)
    names = {
        bound: "abcdefghijklmnopqrstuvwxyz"[i] for i, bound in enumerate(b for b in bounds if b > 0)
    }
    return _spell(before, names, "u") + " -> " + _spell(after, names, "v")


def _cuts(shape: Sequence[int]) -> list[int]:
    out = []
    product = 1
    for size in shape:
        product *= size
        if size > 1:
            out.append(product)
    return out


def _spell(shape: Sequence[int], names: dict[int, str], own: str) -> str:
    """Dims as the factors whose bounds (cumulative sizes from the front) lie inside them, else as a
    whole factor.
    """
    out = []
    product = 1
    for index, size in enumerate(shape):
        low = product
        product = product * size
        inside = [names[bound] for bound in sorted(names) if low < bound <= product]
        # Both ends of the dim must be boundaries: else its elements are not those of the factors.
        known = product in names and (low == 1 or low in names or not inside)
        if size == 1:
            out.append("1")
        elif not (inside and known):
            out.append(f"!{own}{index}")
        elif len(inside) == 1:
            out.append(inside[0])
        else:
            out.append(f"({' '.join(inside)})")
    return " ".join(out)


def _whole(shape: Sequence[int], name: str = "w") -> str:
    return " ".join(f"!{name}{i}" for i in range(len(shape)))


def _reshape(call: Call) -> str:
    """A second input (`view_as`) has the output's shape and is split like it."""
    before, arrow, after = reshape_rule(call.inputs[0].shape, call.outputs[0].shape).partition(
        " -> "
    )
    return ", ".join([before, *(after for _ in call.inputs[1:])]) + arrow + after


def letters(rank: int) -> list[str]:
    """Factor names of a tensor's dims."""
    return [f"d{i}" for i in range(rank)]


def _permute(call: Call) -> str:
    """The factors of the input's dims in the order of the output's."""
    rank = len(call.inputs[0].shape)
    names = letters(rank)
    kind = call.operator.kind
    if kind in ("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default"):
        order = list(range(rank))
        i, j = (call.integer(f"dim{k}", f"axis{k}") % max(rank, 1) for k in (0, 1))
        if rank:
            order[i], order[j] = order[j], order[i]
    elif kind in (
        "aten.t.default",
        "aten.mT.default",
        "aten.adjoint.default",
        "aten.mH.default",
        "aten.matrix_H.default",
    ):
        order = [*range(max(rank - 2, 0)), *reversed(range(max(rank - 2, 0), rank))]
    elif kind.startswith(("aten.movedim", "aten.moveaxis")):
        pairs = dict(
            zip(
                listed(call.get("destination"), rank), listed(call.get("source"), rank), strict=True
            )
        )
        rest = iter(i for i in range(rank) if i not in pairs.values())
        order = [pairs[i] if i in pairs else next(rest) for i in range(rank)]
    else:
        value = call.get("dims")
        order = (
            [int(v) % rank for v in value if isinstance(v, int)]
            if isinstance(value, tuple)
            else list(reversed(range(rank)))
        )
    return " ".join(names) + " -> " + " ".join(names[i] for i in order)


def listed(value: Value, rank: int) -> list[int]:
    """Dims counted from the front, in the order given."""
    return [
        int(v) % max(rank, 1)
        for v in (value if isinstance(value, tuple) else (value,))
        if isinstance(v, int)
    ]


def _expand(call: Call) -> str:
    """Dims of size 1 (or absent) broadcast: the split output factor is one that the input lacks."""
    return "*, * -> *" if len(call.inputs) == 2 else "* -> *"


def changed_dims_whole(call: Call) -> str:
    """Slice, pad, flip, roll and their like: the dims whose extent or order changes stay whole."""
    before = call.inputs[0].shape
    after = call.outputs[0].shape
    # A shard of a flipped or rolled dim would hold other elements than the same shard of the input.
    touched = set(_touched(call, len(before)))
    names = [
        ("!" if before[i] != after[i] or i in touched else "") + f"d{i}" for i in range(len(before))
    ]
    outs = [name if before[i] == after[i] else f"!e{i}" for i, name in enumerate(names)]
    rest = "".join(f", {_whole(t.shape)}" for t in call.inputs[1:])
    return " ".join(names) + rest + " -> " + " ".join(outs)


def _touched(call: Call, rank: int) -> tuple[int, ...]:
    """Dims that keep their size but not their order, or not their place."""
    if call.operator.kind in ("aten.flip.default", "aten.roll.default"):
        return call.dims(rank, "dims")
    # Which elements of a triangle stay depends on the place in the whole matrix.
    if call.operator.kind in ("aten.tril.default", "aten.triu.default"):
        return tuple(range(rank - 2, rank))
    if "pad" in call.operator.kind:
        # torch lists the sides of the last dim first.
        pads = call.get("pad", "padding", default=())
        sides = pads if isinstance(pads, tuple) else ()
        return tuple(rank - 1 - i // 2 for i, side in enumerate(sides) if side)
    return ()


def _select(call: Call) -> str:
    """One index of a dim: the dim stays whole, since one shard alone holds that index."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim") % rank
    names = letters(rank)
    return (
        " ".join("!" + n if i == dim else n for i, n in enumerate(names))
        + " -> "
        + " ".join(n for i, n in enumerate(names) if i != dim)
    )


def _split(call: Call) -> str:
    """Equal chunks: the dim is `(parts n)`, and `n` can be split within every part; unequal ones
    stay whole.
    """
    shape = call.inputs[0].shape
    dim = call.integer("dim") % len(shape)
    names = letters(len(shape))
    sizes = [out.shape[dim] for out in call.outputs]
    # Shards of unequal chunks would begin at other places in each of them.
    equal = len(set(sizes)) == 1 and sum(sizes) == shape[dim]
    if len(sizes) == 1 and equal:
        return " ".join(names) + " -> " + " ".join(names)
    left = _with(names, dim, f"({len(sizes)} n)" if equal else "!w")
    outs = [_with(names, dim, "n" if equal else f"!w{j}") for j in range(len(sizes))]
    return left + " -> " + ", ".join(outs)


def _with(names: list[str], dim: int, name: str) -> str:
    """The terms of a tensor's dims, with `name` in place of that of `dim`."""
    return " ".join([*names[:dim], name, *names[dim + 1 :]])


def _concat(call: Call) -> str:
    """The reverse of a split."""
    tensors = call.inputs
    rank = len(call.outputs[0].shape)
    dim = call.integer("dim") % rank
    names = letters(rank)
    sizes = [t.shape[dim] if len(t.shape) == rank else 0 for t in tensors]
    equal = len(set(sizes)) == 1 and len(sizes) > 1
    ins = [_with(names, dim, "n" if equal else f"!w{j}") for j in range(len(sizes))]
    # torch still joins an empty vector to anything.
    ins = [
        dims if len(t.shape) == rank else f"!w{j}"
        for j, (dims, t) in enumerate(zip(ins, tensors, strict=True))
    ]
    return ", ".join(ins) + " -> " + _with(names, dim, f"({len(sizes)} n)" if equal else "!w")


def _broadcast_together(call: Call) -> str:
    """Each tensor is broadcast to the shape of all."""
    full = call.outputs[0].shape
    names = letters(len(full))
    inputs = []
    for tensor in call.inputs:
        missing = len(full) - len(tensor.shape)
        pairs = zip(names[missing:], tensor.shape, full[missing:], strict=True)
        inputs.append(" ".join("1" if size == 1 != whole else name for name, size, whole in pairs))
    return f"{', '.join(inputs)} -> {', '.join([' '.join(names)] * len(inputs))}"


def _stack(call: Call) -> str:
    """The new dim stays whole, since each of its indices is another tensor."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim") % (rank + 1)
    names = letters(rank)
    return (
        ", ".join(" ".join(names) for _ in call.inputs)
        + " -> "
        + " ".join([*names[:dim], "!w", *names[dim:]])
    )


def _unbind(call: Call) -> str:
    """The reverse of a stack: the dim that is taken apart stays whole."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim") % rank
    names = letters(rank)
    out = " ".join(n for i, n in enumerate(names) if i != dim)
    return (
        " ".join("!" + n if i == dim else n for i, n in enumerate(names))
        + " -> "
        + ", ".join(out for _ in call.outputs)
    )


def _repeat(call: Call) -> str:
    """A dim that is repeated is split within each repetition; new dims are whole."""
    before = call.inputs[0].shape
    after = call.outputs[0].shape
    lead = len(after) - len(before)
    names = letters(len(before))
    times = [
        large // small if small else 0 for small, large in zip(before, after[lead:], strict=True)
    ]
    # A dim repeated no times is empty in the output; a shard of the input says nothing about it.
    ins = [name if count else f"!{name}" for name, count in zip(names, times, strict=True)]
    outs = []
    for i, (name, count) in enumerate(zip(names, times, strict=True)):
        if count == 1:
            outs.append(name)
        else:
            outs.append(f"({count} {name})" if count else f"!w{i}")
    return " ".join(ins) + " -> " + " ".join([*(f"!e{i}" for i in range(lead)), *outs])


register(
    """aten.view.default aten.reshape.default aten._unsafe_view.default aten.unsqueeze.default
    aten.squeeze.dims aten.flatten.using_ints aten.unflatten.int aten.view_as.default
    aten.reshape_as.default aten.ravel.default aten.atleast_1d.default aten.atleast_2d.default
    aten.atleast_3d.default""",
    _reshape,
    linear=((0,),),
    view=True,
)
register(
    """aten.transpose.int aten.permute.default aten.t.default aten.mT.default aten.numpy_T.default
    aten.adjoint.default aten.mH.default aten.matrix_H.default aten.swapaxes.default
    aten.swapdims.default aten.movedim.int aten.movedim.intlist aten.moveaxis.int
    aten.moveaxis.intlist""",
    _permute,
    linear=((0,),),
    view=True,
)
register(
    "aten.expand.default aten.expand_as.default aten.broadcast_to.default",
    _expand,
    linear=((0,),),
    view=True,
)
register(
    """aten.slice.Tensor aten.constant_pad_nd.default aten.pad.default aten.flip.default
    aten.roll.default aten.narrow.default aten.tril.default aten.triu.default""",
    changed_dims_whole,
    saves="",
)
register("aten.select.int", _select, linear=((0,),), view=True)
register(
    """aten.split.Tensor aten.chunk.default aten.split_with_sizes.default aten.split.sizes
    aten.unsafe_split.Tensor aten.unsafe_chunk.default aten.unsafe_split_with_sizes.default
    aten.tensor_split.sections""",
    _split,
    linear=((0,),),
    view=True,
)
register(
    "aten.cat.default aten.concat.default aten.concatenate.default", _concat, affine=True, saves=""
)
register("aten.stack.default", _stack, affine=True, saves="")
register("aten.broadcast_tensors.default", _broadcast_together, saves="")
register("aten.unbind.int", _unbind, linear=((0,),), view=True)
register("aten.repeat.default aten.tile.default", _repeat)
