"""Canonical attributes of the operators that slide a window: convolutions, pools and resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.errors import ModelError

from .calls import Call
from .values import Val


def _window(call: Call, kernel: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fills kernel_shape, strides and dilations, and returns the last two."""
    ones = (1,) * len(kernel)
    strides = call.numbers("strides") or ones
    dilations = call.numbers("dilations") or ones
    if not len(kernel) == len(strides) == len(dilations) == len(call.first().shape) - 2:
        raise ModelError(
            f"{call.where}: kernel {kernel}, strides {strides} and dilations {dilations} do not "
            f"fit {call.first().shape}"
        )
    call.arguments.update(kernel_shape=kernel, strides=strides, dilations=dilations)
    return strides, dilations


def _resolve_pads(call: Call, needed: list[int]) -> None:
    """Explicit pads in place of auto_pad.

    `needed` is the total padding of each spatial dim under SAME.
    """
    mode = call.arguments.get("auto_pad", "NOTSET")
    count = len(needed)
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        small = [n // 2 for n in needed]
        large = [n - n // 2 for n in needed]
        begin, end = (small, large) if mode == "SAME_UPPER" else (large, small)
        call.arguments["pads"] = (*begin, *end)
    elif mode == "VALID":
        call.arguments["pads"] = (0,) * (2 * count)
    else:
        call.arguments["pads"] = call.numbers("pads") or (0,) * (2 * count)
    call.arguments["auto_pad"] = "NOTSET"


def _same_padding(
    call: Call, kernel: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> list[int]:
    sizes = call.first().shape[2:]
    return [
        max(0, (math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n)
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]


def _convolution(call: Call) -> Val | None:
    kernel = call.numbers("kernel_shape") or call.tensor("W").shape[2:]
    strides, dilations = _window(call, kernel)
    _resolve_pads(call, _same_padding(call, kernel, strides, dilations))
    return None


def _pool(call: Call) -> Val | None:
    kernel = call.numbers("kernel_shape") or ()
    strides, dilations = _window(call, kernel)
    _resolve_pads(call, _same_padding(call, kernel, strides, dilations))
    call.arguments.setdefault("ceil_mode", 0)
    if call.op_type == "MaxPool" and (len(call.outputs) < 2 or not call.wanted[1]):
        call.arguments.pop("storage_order", None)
    return None


def _unpool(call: Call) -> Val | None:
    kernel = call.numbers("kernel_shape") or ()
    _window(call, kernel)
    call.arguments.pop("dilations")
    _resolve_pads(call, [0] * len(kernel))
    call.arguments.pop("auto_pad")
    call.arguments["output_shape"] = call.outputs[0].shape
    return None


def _transposed_convolution(call: Call) -> Val | None:
    kernel = call.numbers("kernel_shape") or call.tensor("W").shape[2:]
    strides, dilations = _window(call, kernel)
    extra = call.numbers("output_padding") or (0,) * len(kernel)
    call.arguments["output_padding"] = extra
    wanted = call.numbers("output_shape")
    mode = call.arguments.get("auto_pad", "NOTSET")
    call.arguments.pop("output_shape", None)
    sizes = call.first().shape[2:]
    if wanted is None:
        wanted = tuple(n * s for n, s in zip(sizes, strides, strict=True))
    elif mode in ("NOTSET", "VALID"):
        call.arguments["auto_pad"] = "SAME_LOWER"
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, s, e, k, d in zip(sizes, strides, extra, kernel, dilations, strict=True)
    ]
    _resolve_pads(call, [f - w for f, w in zip(full, wanted, strict=True)])
    return None


def _resize(call: Call) -> Val | None:
    source = call.first().shape
    target = call.outputs[0].shape
    if call.op_type == "Upsample" or call.version == 10:
        call.op_type = "Resize"
        call.arguments.update(
            coordinate_transformation_mode="asymmetric", nearest_mode="floor", cubic_coeff_a=-0.75
        )
        call.arguments.update(antialias=0, exclude_outside=0, extrapolation_value=0.0)
    axes = call.numbers("axes")
    axes = tuple(range(len(source))) if axes is None else tuple(axis % len(source) for axis in axes)
    scales = [1.0] * len(source)
    given = call.floats("scales")
    policy = call.arguments.pop("keep_aspect_ratio_policy", "stretch")
    if given:
        for axis, scale in zip(axes, given, strict=True):
            scales[axis] = scale
    else:
        sizes = dict(zip(axes, call.numbers("sizes") or (), strict=True))
        ratios = {axis: sizes[axis] / source[axis] for axis in axes}
        chosen = {"not_larger": min, "not_smaller": max}.get(str(policy))
        for axis in axes:
            scales[axis] = chosen(ratios.values()) if chosen else ratios[axis]
    roi = call.floats("roi")
    if roi:
        full = [0.0] * len(source) + [1.0] * len(source)
        for i, axis in enumerate(axes):
            full[axis] = roi[i]
            full[len(source) + axis] = roi[len(axes) + i]
        call.arguments["roi"] = tuple(full)
    else:
        call.arguments.pop("roi", None)
    call.arguments.pop("axes", None)
    call.arguments.update(scales=tuple(scales), sizes=target)
    return None


WINDOWS: Mapping[str, Callable[[Call], Val | None]] = {
    "Conv": _convolution,
    "DeformConv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "MaxUnpool": _unpool,
    "Resize": _resize,
    "Upsample": _resize,
}
