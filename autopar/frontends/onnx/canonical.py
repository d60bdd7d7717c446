"""Spells every ONNX operator one way.

Operators then have the names of the newest opset, positive axes and resolved sizes, and constants
are folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.errors import ModelError

from .calls import REQUIRED, Call
from .values import Val, clamped


def _positive(axes: tuple[int, ...], rank: int, where: str) -> tuple[int, ...]:
    if any(not -rank <= axis < rank for axis in axes):
        raise ModelError(f"{where}: axes {axes} lie outside {rank} dims")
    return tuple(sorted({axis % rank for axis in axes}))


def _positive_axis(call: Call, rank: int | None = None) -> None:
    axis = call.integer("axis")
    rank = len(call.first().shape) if rank is None else rank
    if rank and "axis" in call.arguments:
        if not -rank <= axis <= rank:
            raise ModelError(f"{call.where}: axis {axis} lies outside {rank} dims")
        call.arguments["axis"] = axis % rank if axis < 0 else axis


def same(call: Call) -> Val | None:
    """The input itself, where the operator changes nothing."""
    source = call.first()
    if source.shape == call.outputs[0].shape and source.dtype == call.outputs[0].dtype:
        return source
    return None


def _identity(call: Call) -> Val | None:
    return call.first()


def _reshape(call: Call) -> Val | None:
    shape = call.outputs[0].shape
    call.arguments["shape"] = shape
    call.arguments["allowzero"] = int(0 in shape)
    if math.prod(shape) != call.first().size:
        raise ModelError(f"{call.where}: {call.first().shape} cannot be reshaped to {shape}")
    return same(call)


def _expand(call: Call) -> Val | None:
    call.arguments["shape"] = call.outputs[0].shape
    return same(call)


def _squeeze(call: Call) -> Val | None:
    shape = call.first().shape
    axes = call.numbers("axes")
    axes = tuple(i for i, size in enumerate(shape) if size == 1) if axes is None else axes
    call.arguments["axes"] = _positive(axes, len(shape), call.where)
    return None


def _unsqueeze(call: Call) -> Val | None:
    call.arguments["axes"] = _positive(
        call.numbers("axes") or (), len(call.outputs[0].shape), call.where
    )
    return None


def _reduce(call: Call) -> Val | None:
    rank = len(call.first().shape)
    axes = call.numbers("axes")
    if not axes:
        axes = () if call.arguments.get("noop_with_empty_axes") else tuple(range(rank))
    call.arguments["axes"] = _positive(axes, rank, call.where)
    call.arguments.pop("noop_with_empty_axes", None)
    return None


def _slice(call: Call) -> Val | None:
    source = call.first()
    starts = call.numbers("starts") or ()
    ends = call.numbers("ends") or ()
    axes = call.numbers("axes")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = call.numbers("steps") or (1,) * len(starts)
    rows = []
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ModelError(
            f"{call.where}: starts {starts}, ends {ends}, axes {axes} and steps {steps} do not fit "
            "together"
        )
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        (axis,) = _positive((axis,), len(source.shape), call.where)
        size = source.shape[axis]
        places = clamped(start, end, step, size)
        if places != range(size):
            rows.append((axis, places.start, places.stop if places.stop >= 0 else -size - 1, step))
    rows.sort()
    for position, name in enumerate(("axes", "starts", "ends", "steps")):
        call.arguments[name] = tuple(row[position] for row in rows)
    return None if rows else source


def _split(call: Call) -> Val | None:
    _positive_axis(call)
    axis = call.integer("axis")
    sizes = tuple(output.shape[axis] for output in call.outputs)
    if sum(sizes) != call.first().shape[axis]:
        raise ModelError(f"{call.where}: sizes {sizes} do not add up to {call.first().shape[axis]}")
    call.arguments["split"] = sizes
    call.arguments.pop("num_outputs", None)
    return same(call) if len(call.outputs) == 1 else None


def _softmax(call: Call) -> Val | None:
    _positive_axis(call)
    if call.version < 13 and call.integer("axis") != len(call.first().shape) - 1:
        call.arguments["flatten"] = 1
    return None


def _transpose(call: Call) -> Val | None:
    rank = len(call.first().shape)
    perm = call.numbers("perm") or tuple(reversed(range(rank)))
    if sorted(perm) != list(range(rank)):
        raise ModelError(f"{call.where}: {perm} is not a permutation of {rank} dims")
    call.arguments["perm"] = perm
    return call.first() if perm == tuple(range(rank)) else None


def _pad(call: Call) -> Val | None:
    rank = len(call.first().shape)
    pads = call.numbers("pads") or ()
    axes = call.numbers("axes")
    axes = tuple(range(rank)) if axes is None else tuple(axis % rank for axis in axes)
    if len(pads) != 2 * len(axes):
        raise ModelError(f"{call.where}: {len(pads)} pads for {len(axes)} axes")
    full = [0] * (2 * rank)
    for i, axis in enumerate(axes):
        full[axis] = pads[i]
        full[rank + axis] = pads[len(axes) + i]
    call.arguments.pop("axes", None)
    call.arguments["pads"] = tuple(full)
    value = call.arguments.pop("value", None)
    call.arguments.setdefault("constant_value", 0 if value is None else value)
    return None


def _dropout(call: Call) -> Val | None:
    training = call.arguments.get("training_mode", 0)
    call.arguments.setdefault("ratio", 0.5)
    used = len(call.outputs) > 1 and call.wanted[1]
    return None if used or isinstance(training, Val) or training else call.first()


def _one_input(call: Call) -> Val | None:
    tensors = next(iter(call.arguments.values()))
    if isinstance(tensors, tuple) and len(tensors) == 1 and isinstance(tensors[0], Val):
        return tensors[0]
    return None


def _concat(call: Call) -> Val | None:
    _positive_axis(call)
    return _one_input(call)


def _one_hot(call: Call) -> Val | None:
    _positive_axis(call, len(call.outputs[0].shape))
    return None


def _batch_normalization(call: Call) -> Val | None:
    for name in ("spatial", "is_test", "consumed_inputs"):
        call.arguments.pop(name, None)
    call.arguments.setdefault("training_mode", 0)
    return None


def _scatter(call: Call) -> Val | None:
    call.op_type = "ScatterElements"
    call.arguments.setdefault("reduction", "none")
    _positive_axis(call)
    return None


def _attention(call: Call) -> Val | None:
    mask = call.arguments.get("attn_mask")
    query = call.tensor("Q")
    key = call.tensor("K")
    past = call.arguments.get("past_key")
    if isinstance(mask, Val):
        length = key.shape[-2] + (past.shape[2] if isinstance(past, Val) else 0)
        heads = query.shape[1] if len(query.shape) == 4 else call.integer("q_num_heads", 1)
        scores = (query.shape[0], heads, query.shape[-2], length)
        padded = (1,) * (4 - len(mask.shape)) + mask.shape
        if (
            len(padded) != 4
            or any(m not in (1, s) for m, s in zip(padded[:3], scores[:3], strict=True))
            or padded[3] > length
        ):
            raise ModelError(
                f"{call.where}: the mask {mask.shape} does not fit the scores {scores}"
            )
    if len(call.outputs) < 4 or not call.wanted[3]:
        call.arguments.pop("qk_matmul_output_mode", None)
    return None


def _top_k(call: Call) -> Val | None:
    if "k" in call.arguments:  # before opset 10
        call.arguments["K"] = call.arguments.pop("k")
    _positive_axis(call)
    return None


def _region_align(call: Call) -> Val | None:
    if call.version < 16:
        call.arguments["coordinate_transformation_mode"] = "output_half_pixel"
    return None


def _axis(call: Call) -> Val | None:
    _positive_axis(call)
    return None


_WITH_AXIS = (
    "ArgMax",
    "ArgMin",
    "CumSum",
    "CumProd",
    "Flatten",
    "Gather",
    "GatherElements",
    "ScatterElements",
    "LayerNormalization",
    "RMSNormalization",
    "LpNormalization",
    "Compress",
)
CANONICAL: Mapping[str, Callable[[Call], Val | None]] = {
    "Identity": _identity,
    "Reshape": _reshape,
    "Expand": _expand,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Split": _split,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Hardmax": _softmax,
    "Transpose": _transpose,
    "Pad": _pad,
    "Dropout": _dropout,
    "Sum": _one_input,
    "Max": _one_input,
    "Min": _one_input,
    "Mean": _one_input,
    "Concat": _concat,
    "OneHot": _one_hot,
    "BatchNormalization": _batch_normalization,
    "Scatter": _scatter,
    "Attention": _attention,
    "TopK": _top_k,
    "RoiAlign": _region_align,
    **{name: _reduce for name in REQUIRED if name.startswith("Reduce")},
    **dict.fromkeys(_WITH_AXIS, _axis),
}
