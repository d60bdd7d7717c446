"""Rules of pointwise operators: every dim is a factor, and a dim of size 1 broadcasts."""

from __future__ import annotations

from .registry import Call, register


def pointwise(call: Call) -> str:
    """`*, *, ... -> *`: as many inputs and outputs as the call has, aligned on the right."""
    return ", ".join("*" for _ in call.inputs) + " -> " + ", ".join("*" for _ in call.outputs)


ROTATE = "autopar.rotate.default"

_UNARY = """relu gelu silu tanh sigmoid exp log log1p expm1 sqrt rsqrt reciprocal erf sin cos abs
    leaky_relu elu softplus hardswish hardsigmoid hardtanh relu6 mish selu celu log_sigmoid square
    clamp clamp_min clamp_max tan atan asin acos sinh cosh asinh acosh atanh logit exp2 log2 log10
    absolute arccos arccosh arcsin arcsinh arctan arctanh clip digamma erfc erfinv hardshrink i0
    lgamma mvlgamma nan_to_num sgn sinc softshrink threshold special_entr special_erfcx
    special_i0e special_i1 special_i1e special_log_ndtr special_ndtr special_ndtri"""
_STEPS = """sign floor ceil round trunc logical_not bitwise_not isnan isinf isfinite frac fix
    signbit isneginf isposinf isreal"""
_LINEAR = """neg.default alias.default contiguous.default clone.default to.dtype to.dtype_layout
    to.device to.other _to_copy.default type_as.default lift_fresh_copy.default detach_.default
    conj.default resolve_conj.default lift_fresh.default positive.default negative.default
    deg2rad.default rad2deg.default conj_physical.default _conj.default _conj_physical.default
    resolve_neg.default _neg_view.default"""
_COMPARISONS = "eq ne lt le gt ge not_equal greater greater_equal less less_equal"
_LOGIC = """__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor"""

register([f"aten.{name}.default" for name in _UNARY.split()], "* -> *")
# An element meets the one half the last dim further on.
register(ROTATE, "* !w, * !v, * !v -> * !w", linear=((0,),))
register([f"aten.{name}.default" for name in _STEPS.split()], "* -> *", differentiable=False)
register([f"aten.{name}" for name in _LINEAR.split()], pointwise, linear=((0,),), saves="")
# Dropout is linear, as the same elements are dropped on every rank that holds a share of them.
register("aten.dropout.default aten.feature_dropout.default", pointwise, linear=((0,),))
register("aten.detach.default", "* -> *", linear=((0,),), differentiable=False)
register(
    [f"aten.{c}.{o}" for c in _COMPARISONS.split() for o in ("Tensor", "Scalar")],
    pointwise,
    differentiable=False,
)
register(
    [f"aten.{c}.{o}" for c in _LOGIC.split() for o in ("Tensor", "Scalar")],
    pointwise,
    differentiable=False,
)
register(
    "aten.logical_and.default aten.logical_or.default aten.logical_xor.default",
    pointwise,
    differentiable=False,
)

register(
    "aten.add.Tensor aten.sub.Tensor aten.rsub.Tensor autopar.add",
    pointwise,
    linear=((0, 1),),
    affine=True,
    saves="",
)
register("aten.add.Scalar aten.sub.Scalar aten.rsub.Scalar", pointwise, affine=True, saves="")
register("aten.mul.Tensor", pointwise, linear=((0,), (1,)))
# A quotient is linear in the dividend alone.
register("aten.mul.Scalar aten.div.Tensor aten.div.Scalar", pointwise, linear=((0,),))
register("aten.floor_divide.default", pointwise, differentiable=False)
register(
    "aten.div.Tensor_mode aten.remainder.Scalar aten.remainder.Tensor aten.fmod.Scalar", pointwise
)
register("aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.pow.Scalar", pointwise)
register("aten.maximum.default aten.minimum.default aten.atan2.default", pointwise)
register("aten.clamp.Tensor aten.addcmul.default aten.addcdiv.default aten.lerp.Tensor", pointwise)
register("aten.lerp.Scalar", pointwise, affine=True)
# Both branches must be shares: with one of them whole, each rank would choose it in full.
register("aten.where.self", pointwise, linear=((1, 2),))
register(
    "aten.where.ScalarOther aten.where.ScalarSelf aten.masked_fill.Scalar aten.masked_fill.Tensor",
    pointwise,
)

_QUOTIENTS = "true_divide.Tensor true_divide.Scalar divide.Tensor divide.Scalar multiply.Scalar"
_OF_TWO = """copysign.Tensor copysign.Scalar hypot.default fmax.default fmin.default max.other
    min.other logaddexp.default logaddexp2.default xlogy.Tensor xlogy.Scalar_Other
    xlogy.Scalar_Self special_xlog1py.default float_power.Tensor_Tensor float_power.Tensor_Scalar
    float_power.Scalar arctan2.default ldexp.Tensor clamp_min.Tensor clamp_max.Tensor clip.Tensor
    divide.Tensor_mode div.Scalar_mode fmod.Tensor _prelu_kernel.default round.decimals
    where.Scalar fill.Scalar fill.Tensor zero.default threshold_backward.default
    polygamma.default"""
_OF_TWO_STEPS = """remainder.Scalar_Tensor gcd.default lcm.default heaviside.default
    isclose.default floor_divide.Scalar nextafter.default bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
    __lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar"""
register([f"aten.{name}" for name in _QUOTIENTS.split()], pointwise, linear=((0,),))
register([f"aten.{name}" for name in _OF_TWO.split()], pointwise)
register([f"aten.{name}" for name in _OF_TWO_STEPS.split()], pointwise, differentiable=False)
register("aten.subtract.Tensor", pointwise, linear=((0, 1),), affine=True, saves="")
register("aten.subtract.Scalar", pointwise, affine=True, saves="")
register("aten.multiply.Tensor", pointwise, linear=((0,), (1,)))
# Only the source matters: `copy` overwrites the values of the first tensor.
register("aten.copy.default", pointwise, linear=((1,),), saves="")
register("aten.frexp.Tensor", pointwise)


def _prelu(call: Call) -> str:
    """The slope is one number for all elements, or one for every channel (dim 1)."""
    rank = len(call.inputs[0].shape)
    names = [f"d{i}" for i in range(rank)]
    # torch counts the channels from the front, so the slopes are not aligned on the right as `*`
    # is.
    slopes = ""
    if call.inputs[1].shape:
        slopes = names[1] if rank > 1 and call.inputs[1].size > 1 else "1"
    return f"{' '.join(names)}, {slopes} -> {' '.join(names)}"


def _glu(call: Call) -> str:
    """One half of a dim gates the other: it is split within the halves."""
    rank = len(call.inputs[0].shape)
    dim = call.integer("dim", default=-1) % rank
    names = [f"d{i}" for i in range(rank)]
    return (
        " ".join(f"(2 {name})" if i == dim else name for i, name in enumerate(names))
        + " -> "
        + " ".join(names)
    )


register("aten.prelu.default", _prelu)
register("aten.glu.default", _glu)
