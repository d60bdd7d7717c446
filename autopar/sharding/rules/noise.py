"""Rules of random numbers, drawn whole and cut: every layout gives what one device gives."""

from __future__ import annotations

from .elementwise import pointwise
from .registry import Call, register
from .selection import all_whole


def _native_dropout(call: Call) -> str:
    """Pointwise; without `train` torch trains and scales the gradient its own way, so nothing is
    split.
    """
    return all_whole(call) if call.get("train") is None else pointwise(call)


register(
    """aten.rand.default aten.randn.default aten.randint.default aten.randint.low
    aten.randperm.default aten.normal.float_float aten.bernoulli.default aten.bernoulli.Tensor
    aten.multinomial.default aten.poisson.default aten.normal.Tensor_float
    aten.normal.float_Tensor aten.normal.Tensor_Tensor aten.binomial.default""",
    all_whole,
    differentiable=False,
)
register(
    "aten.rand_like.default aten.randn_like.default aten.randint_like.default "
    "aten.randint_like.low_dtype",
    "* -> *",
    differentiable=False,
)
# Their input gives a shape and no values.
register(
    """aten.bernoulli.p aten.uniform.default aten.exponential.default
    aten.normal_functional.default aten.geometric.default aten.log_normal.default
    aten.cauchy.default aten.random.default aten.random.from aten.random.to""",
    pointwise,
    differentiable=False,
)
register("aten.native_dropout.default", _native_dropout, saves="output")
register(
    "aten.alpha_dropout.default aten.feature_alpha_dropout.default aten.rrelu.default", all_whole
)
