"""Rules of normalisations and the softmax family: the normalised dims stay whole."""

from __future__ import annotations

from .registry import Call, register


def _layer_norm(call: Call) -> str:
    """The last dims are normalised; weight and bias lie along them."""
    shape = call.inputs[0].shape
    normalized = call.get("normalized_shape")
    axis = call.get("axis", default=-1)
    count = len(normalized) if isinstance(normalized, tuple) else len(shape) - int(axis) % len(shape) if isinstance(axis, int) else 1
    names = " ".join(f"!h{i}" for i in range(count))
    return f"* {names}" + "".join(f", {names}" for _ in call.inputs[1:]) + " -> " + ", ".join([f"* {names}", *_statistics(call, count)])


def _statistics(call: Call, count: int) -> list[str]:
    return ["* " + " ".join("1" for _ in range(count)) for _ in call.outputs[1:]]


def _softmax(call: Call) -> str:
    rank = len(call.inputs[0].shape)
    if rank == 0:
        return " -> "
    dims = (
        set(range(call.integer("axis", default=1) % rank, rank))
        if call.get("flatten")
        else {call.integer("dim", "axis", default=-1) % rank}
    )
    names = " ".join(f"!d{i}" if i in dims else f"d{i}" for i in range(rank))
    return f"{names} -> {names}"


def _batch_norm(call: Call) -> str:
    """With running statistics it is pointwise; with the batch's own statistics only channels can be split."""
    training = bool(call.get("training", "training_mode", default=False))
    rank = len(call.inputs[0].shape)
    mark = "!" if training else ""
    dims = " ".join([f"{mark}n", "c", *(f"{mark}x{i}" for i in range(rank - 2))])
    return dims + ", c" * (len(call.inputs) - 1) + " -> " + ", ".join([dims, *("c" for _ in call.outputs[1:])])


def _group_norm(call: Call) -> str:
    """Groups are normalised on their own, so the outer part of the channels can be split."""
    groups = call.integer("num_groups", "group")
    rank = len(call.inputs[0].shape)
    space = " ".join(f"!x{i}" for i in range(rank - 2))
    channel = f"(g={groups} !c)" if groups > 1 else "!c"
    return f"n {channel} {space}" + f", {channel}" * (len(call.inputs) - 1) + f" -> n {channel} {space}"


def _instance_norm(call: Call) -> str:
    space = " ".join(f"!x{i}" for i in range(len(call.inputs[0].shape) - 2))
    return f"n c {space}" + ", c" * (len(call.inputs) - 1) + f" -> n c {space}"


register("aten.layer_norm.default onnx.LayerNormalization", _layer_norm)
register("aten.rms_norm.default onnx.RMSNormalization onnx.SimplifiedLayerNormalization", _layer_norm)
register(
    """aten.softmax.int aten._softmax.default aten.log_softmax.int aten._log_softmax.default aten._safe_softmax.default
    onnx.Softmax onnx.LogSoftmax""",
    _softmax,
    saves="output",
)
register("aten.batch_norm.default onnx.BatchNormalization", _batch_norm)
register("aten.group_norm.default onnx.GroupNormalization", _group_norm)
register("onnx.InstanceNormalization", _instance_norm)
