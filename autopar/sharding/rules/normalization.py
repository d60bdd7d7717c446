"""Rules of normalisations and the softmax family: the normalised dims stay whole."""

from __future__ import annotations

from .registry import Call, register
from .selection import all_whole


def _layer_norm(call: Call) -> str:
    """The last dims are normalised; weight and bias lie along them."""
    normalized = call.get("normalized_shape")
    count = len(normalized) if isinstance(normalized, tuple) else 1
    names = " ".join(f"!h{i}" for i in range(count))
    scales = "".join(
        f", {' '.join(names.split()[count - len(tensor.shape) :])}" for tensor in call.inputs[1:]
    )
    return f"* {names}{scales} -> " + ", ".join([f"* {names}", *_statistics(call, count)])


def _statistics(call: Call, count: int) -> list[str]:
    return ["* " + " ".join("1" for _ in range(count)) for _ in call.outputs[1:]]


DIVISIBLE = frozenset({"aten.softmax.int", "aten.log_softmax.int"})
"""Softmaxes whose dim can be split."""


def _softmax(call: Call) -> str:
    """Along the dim a shard needs the maxima and the sums of all shards."""
    rank = len(call.inputs[0].shape)
    if rank == 0:
        return " -> "
    dim = call.integer("dim", default=-1) % rank
    if call.operator.kind in DIVISIBLE:
        names = " ".join(f"d{i}" for i in range(rank))
        return f"{names} -> {names} | d{dim}: normalize"
    names = " ".join(f"!d{i}" if i == dim else f"d{i}" for i in range(rank))
    return f"{names} -> {names}"


def _batch_norm(call: Call) -> str:
    """Batch norm. With running statistics it is pointwise; batch statistics are taken over all
    ranks.
    """
    if (
        len(call.inputs[0].shape) < 2
    ):  # no channels, which torch permits where there are no elements
        return all_whole(call)
    # Over ranks as in torch's SyncBatchNorm: each rank's own statistics would train another model.
    training = bool(call.get("training", default=False))
    over = ["n", *(f"x{i}" for i in range(len(call.inputs[0].shape) - 2))]
    dims = " ".join([over[0], "c", *over[1:]])
    sides = (
        dims
        + ", c" * (len(call.inputs) - 1)
        + " -> "
        + ", ".join([dims, *("c" for _ in call.outputs[1:])])
    )
    return f"{sides} | {', '.join(over)}: statistics" if training else sides


def _group_norm(call: Call) -> str:
    """Groups are independent: the channels' outer part can be split; over a split space ranks sum
    statistics.
    """
    # A group's mean is over its channels, so only whole groups can lie apart.
    groups = call.integer("num_groups")
    names = [f"x{i}" for i in range(len(call.inputs[0].shape) - 2)]
    space = " ".join(names)
    channel = f"(g={groups} !c)" if groups > 1 else "!c"
    scales = "".join(
        ", g"
        if groups > 1 and t.shape == (groups,) != call.inputs[0].shape[1:2]
        else f", {channel}"
        for t in call.inputs[1:]
    )
    return f"n {channel} {space}{scales} -> n {channel} {space} | {_over(names)}"


def _over(names: list[str]) -> str:
    return f"{', '.join(names)}: statistics" if names else ""


register("aten.layer_norm.default", _layer_norm)
register("aten.rms_norm.default", _layer_norm)
register("aten.native_layer_norm.default aten._fused_rms_norm.default", _layer_norm)
register(
    """aten.softmax.int aten._softmax.default aten.log_softmax.int aten._log_softmax.default
    aten._safe_softmax.default aten.special_softmax.default aten.special_log_softmax.default""",
    _softmax,
    saves="output",
)
register("aten.batch_norm.default", _batch_norm)
register("aten.group_norm.default", _group_norm)
