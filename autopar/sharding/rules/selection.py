"""Rules of sorting, resampling, scattering and other operators that need some dims, or everything,
whole.
"""

from __future__ import annotations

from .registry import Call, register
from .spelling import whole


def all_whole(call: Call) -> str:
    """Every device computes the whole operator; nothing is split."""
    spell = [
        " ".join(f"!w{j}_{i}" for i in range(len(t.shape)))
        for j, t in enumerate((*call.inputs, *call.outputs))
    ]
    count = len(call.inputs)
    return ", ".join(spell[:count]) + " -> " + ", ".join(spell[count:])


def _along(call: Call, along: int = -1) -> str:
    """The sorted dim stays whole; every other dim is split alike in all tensors."""
    rank = len(call.inputs[0].shape)
    if rank == 0:
        return " -> " + ", ".join("" for _ in call.outputs)
    # The order within a shard says nothing of places among all, so every rank sorts whole rows.
    value = call.get("dim", default=along)
    dim = int(value) % rank if isinstance(value, int) else rank - 1
    before = " ".join(f"!w{i}" if i == dim else f"d{i}" for i in range(rank))
    after = " ".join(f"!v{i}" if i == dim else f"d{i}" for i in range(rank))
    rest = "".join(
        ", " + " ".join(f"!i{j}_{i}" for i in range(len(t.shape)))
        for j, t in enumerate(call.inputs[1:])
    )
    return f"{before}{rest} -> " + ", ".join(after for _ in call.outputs)


register(
    "aten.topk.default aten.sort.default aten.sort.stable aten.argsort.default aten.argsort.stable",
    _along,
)
register("aten.logcumsumexp.default aten.cummax.default aten.cummin.default", _along)
register("aten.msort.default", lambda call: _along(call, 0))


def _grid_sample(call: Call) -> str:
    """Every place of the grid looks into the whole image of its channel, wherever its data say."""
    places = " ".join(f"y{i}" for i in range(len(call.inputs[0].shape) - 2))
    return f"n c {whole(call.inputs[0].shape[2:], 'x')}, n {places} !t -> n c {places}"


def _affine_grid(call: Call) -> str:
    """Every map makes a grid of its own, whose places are counted from its corner."""
    return f"n !i !j -> n {whole(call.outputs[0].shape[1:], 'y')}"


register(
    "aten.grid_sampler.default aten.grid_sampler_2d.default aten.grid_sampler_3d.default",
    _grid_sample,
)
register("aten.affine_grid_generator.default", _affine_grid, linear=((0,),))
register("aten.histc.default autopar.non_max_suppression", all_whole, differentiable=False)


def _regions(call: Call) -> str:
    """Every region is pooled by itself, and so is every channel.

    Regions index the batch and the space, which stay whole.
    """
    space = whole(call.inputs[0].shape[2:], "x")
    bins = whole(call.outputs[0].shape[2:], "y")
    return f"!n c {space}, r !t, r -> r c {bins}"


register("autopar.region_align", _regions)
