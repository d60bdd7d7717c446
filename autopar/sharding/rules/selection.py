"""Rules of sorting, resampling, scattering and other operators that need some dims, or everything, whole."""

from __future__ import annotations

from .registry import Call, register
from .shape import changed_dims_whole


def all_whole(call: Call) -> str:
    """Nothing is split: every device computes all of it."""
    spell = [" ".join(f"!w{j}_{i}" for i in range(len(t.shape))) for j, t in enumerate((*call.inputs, *call.outputs))]
    count = len(call.inputs)
    return ", ".join(spell[:count]) + " -> " + ", ".join(spell[count:])


def _along(call: Call) -> str:
    """The dim that is ordered stays whole; every other is split alike in all tensors."""
    rank = len(call.inputs[0].shape)
    if rank == 0:
        return " -> " + ", ".join("" for _ in call.outputs)
    value = call.get("dim", "axis", default=-1)
    dim = int(value) % rank if isinstance(value, int) else rank - 1
    before = " ".join(f"!w{i}" if i == dim else f"d{i}" for i in range(rank))
    after = " ".join(f"!v{i}" if i == dim else f"d{i}" for i in range(rank))
    rest = "".join(", " + " ".join(f"!i{j}_{i}" for i in range(len(t.shape))) for j, t in enumerate(call.inputs[1:]))
    return f"{before}{rest} -> " + ", ".join(after for _ in call.outputs)


register("aten.topk.default aten.sort.default aten.sort.stable aten.argsort.default onnx.TopK", _along)
def _resample(call: Call) -> str:
    """Each channel of each image on its own; the space stays whole even where it keeps its size."""
    space = len(call.inputs[0].shape) - 2
    before, after = (" ".join(f"!{name}{i}" for i in range(space)) for name in "xy")
    return f"n c {before} -> n c {after}"


register(
    """aten.upsample_nearest1d.vec aten.upsample_nearest2d.vec aten.upsample_nearest3d.vec aten.upsample_bilinear2d.vec
    aten.upsample_bicubic2d.vec""",
    _resample,
)
register("onnx.Resize", changed_dims_whole)
register("aten.repeat_interleave.self_int", lambda call: all_whole(call) if call.get("dim") is None else changed_dims_whole(call))
register(
    """aten.index_put.default aten.index_add.default aten.scatter.src aten.scatter_add.default aten.gather.default aten.index_select.default
    onnx.GatherND onnx.GatherElements onnx.ScatterND onnx.ScatterElements""",
    all_whole,
)
register(
    "aten.empty_like.default aten.histc.default aten.one_hot.default aten.bucketize.Tensor onnx.OneHot onnx.NonZero",
    all_whole,
    differentiable=False,
)
register("transformers.grouped_mm_fallback.default", "!t !k, !e !k !n, !e -> !t !n", products=("e",))
