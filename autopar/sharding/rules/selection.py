"""Rules of sorting, resampling, scattering and other operators that need some dims, or everything,
whole.
"""

from __future__ import annotations

from .registry import Call, register
from .spelling import by_name, whole


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
    value = call.get("dim", "axis", default=along)
    dim = int(value) % rank if isinstance(value, int) else rank - 1
    before = " ".join(f"!w{i}" if i == dim else f"d{i}" for i in range(rank))
    after = " ".join(f"!v{i}" if i == dim else f"d{i}" for i in range(rank))
    rest = "".join(
        ", " + " ".join(f"!i{j}_{i}" for i in range(len(t.shape)))
        for j, t in enumerate(call.inputs[1:])
    )
    return f"{before}{rest} -> " + ", ".join(after for _ in call.outputs)


register(
    "aten.topk.default aten.sort.default aten.sort.stable aten.argsort.default "
    "aten.argsort.stable onnx.TopK",
    _along,
)
register("aten.logcumsumexp.default aten.cummax.default aten.cummin.default", _along)
register("aten.msort.default", lambda call: _along(call, 0))


def _resize(call: Call) -> str:
    """Dims that are neither scaled nor cropped can be split."""
    before = call.inputs[0].shape
    after = call.outputs[0].shape
    scales = call.get("scales")
    roi = call.get("roi")
    cropped = call.get("coordinate_transformation_mode") == "tf_crop_and_resize" and isinstance(
        roi, tuple
    )
    rank = len(before)
    splittable = [
        before[i] == after[i]
        and (not isinstance(scales, tuple) or scales[i] == 1)
        and not (cropped and isinstance(roi, tuple) and (roi[i], roi[rank + i]) != (0, 1))
        for i in range(rank)
    ]
    left, right = (
        " ".join(f"d{i}" if splittable[i] else f"!{mark}{i}" for i in range(rank)) for mark in "xy"
    )
    return by_name(call, {"X": left}, [right])


def _grid_sample(call: Call) -> str:
    """Every place of the grid looks into the whole image of its channel, wherever its data say."""
    places = " ".join(f"y{i}" for i in range(len(call.inputs[0].shape) - 2))
    return f"n c {whole(call.inputs[0].shape[2:], 'x')}, n {places} !t -> n c {places}"


def _affine_grid(call: Call) -> str:
    """Every map makes a grid of its own, whose places are counted from its corner."""
    return f"n !i !j -> n {whole(call.outputs[0].shape[1:], 'y')}"


def _unpool(call: Call) -> str:
    """Each channel of each image is unpooled by itself."""
    before, after = (
        f"n c {whole(shape[2:], name)}"
        for shape, name in ((call.inputs[0].shape, "x"), (call.outputs[0].shape, "y"))
    )
    return by_name(call, {"X": before, "I": before}, [after])


register("onnx.Resize", _resize)
register(
    "onnx.GridSample aten.grid_sampler.default aten.grid_sampler_2d.default "
    "aten.grid_sampler_3d.default",
    _grid_sample,
)
register("onnx.AffineGrid aten.affine_grid_generator.default", _affine_grid, linear=((0,),))
register("onnx.MaxUnpool", _unpool)
register(
    "aten.histc.default onnx.NonZero onnx.Unique onnx.NonMaxSuppression",
    all_whole,
    differentiable=False,
)


def _rows(call: Call) -> str:
    """Each row is worked on by itself, over all of its features."""
    rank = len(call.inputs[0].shape)
    if rank < 2 or len(call.outputs[0].shape) != rank:
        return all_whole(call)
    rest = "".join(", " + whole(tensor.shape, f"w{i}_") for i, tensor in enumerate(call.inputs[1:]))
    lead = " ".join(f"d{i}" for i in range(rank - 1))
    return f"{lead} !f{rest} -> {lead} !t"


def _frames(call: Call) -> str:
    """The short-time Fourier transform of each signal by itself."""
    return by_name(call, {"signal": "b !l !p"}, ["b !f !g !q"])


register("ai.onnx.ml.ArrayFeatureExtractor", _rows)
register("ai.onnx.ml.TreeEnsemble onnx.TfIdfVectorizer", _rows, differentiable=False)
register("onnx.STFT", _frames, linear=((0,),))
# Their inputs are a rate, a count, and then any number of tensors with their gradients and states.
register(
    [f"ai.onnx.preview.training.{name}" for name in ("Adagrad", "Adam", "Momentum")],
    all_whole,
    differentiable=False,
)
