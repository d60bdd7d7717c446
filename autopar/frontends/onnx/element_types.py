"""Canonical attributes of operators with an attribute for the type of their result's elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .calls import Call
from .canonical import same
from .values import Val


def _cast_like(call: Call) -> Val | None:
    call.op_type = "Cast"
    options = {
        name: value for name, value in call.arguments.items() if name in ("saturate", "round_mode")
    }
    call.arguments = {"input": call.first(), "saturate": 1}
    call.arguments.update(options, to=call.outputs[0].dtype)
    return same(call)


def _constant_of_shape(call: Call) -> Val | None:
    call.arguments = {
        "input": call.outputs[0].shape,
        "value": call.arguments.get("value", 0.0),
        "dtype": call.outputs[0].dtype,
    }
    return None


def _named(call: Call) -> Val | None:
    call.arguments["dtype"] = call.outputs[0].dtype
    return None


def _quantize(call: Call) -> Val | None:
    # Written out, since the zero point's dtype does not tell four bits from eight.
    call.arguments["output_dtype"] = call.outputs[0].dtype
    return None


TYPED: Mapping[str, Callable[[Call], Val | None]] = {
    "Cast": same,
    "CastLike": _cast_like,
    "ConstantOfShape": _constant_of_shape,
    "Range": _named,
    "EyeLike": _named,
    "QuantizeLinear": _quantize,
}
