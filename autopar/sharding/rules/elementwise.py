"""Rules of operators that work point by point: every dim is a factor, a dim of size 1 broadcasts."""

from __future__ import annotations

from .registry import Call, register


def pointwise(call: Call) -> str:
    """`*, *, ... -> *`: as many inputs as the call has, aligned on the right."""
    return ", ".join("*" for _ in call.inputs) + " -> *"


_UNARY = """relu gelu silu tanh sigmoid exp log log1p expm1 sqrt rsqrt reciprocal erf sin cos abs leaky_relu elu softplus
    hardswish hardsigmoid hardtanh relu6 mish selu celu log_sigmoid square clamp clamp_min clamp_max tan atan asin acos
    sinh cosh asinh acosh atanh softsign logit exp2 log2 log10"""
_UNARY_ONNX = """Relu Gelu Tanh Sigmoid Exp Log Sqrt Reciprocal Erf Sin Cos Abs LeakyRelu Elu Softplus HardSwish HardSigmoid
    Selu Celu Mish Clip Softsign ThresholdedRelu Tan Atan Asin Acos Sinh Cosh Asinh Acosh Atanh Swish"""
_STEPS = """sign floor ceil round trunc logical_not bitwise_not isnan isinf isfinite frac"""
_STEPS_ONNX = "Sign Floor Ceil Round Not IsNaN IsInf BitwiseNot"
_LINEAR = """neg.default alias.default contiguous.default clone.default to.dtype to.dtype_layout to.device to.other _to_copy.default
    type_as.default lift_fresh_copy.default detach_.default conj.default resolve_conj.default"""
_COMPARISONS = "eq ne lt le gt ge"
_COMPARISONS_ONNX = "Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor BitwiseAnd BitwiseOr BitwiseXor"
_LOGIC = """__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor"""

register([f"aten.{name}.default" for name in _UNARY.split()], "* -> *")
register([f"onnx.{name}" for name in _UNARY_ONNX.split()], pointwise)
register([f"aten.{name}.default" for name in _STEPS.split()], "* -> *", differentiable=False)
register([f"onnx.{name}" for name in _STEPS_ONNX.split()], "* -> *", differentiable=False)
register([f"aten.{name}" for name in _LINEAR.split()], pointwise, linear=((0,),), saves="")
register("onnx.Neg onnx.Identity onnx.Cast onnx.CastLike", pointwise, linear=((0,),), saves="")
register("aten.dropout.default onnx.Dropout aten.feature_dropout.default", pointwise, linear=((0,),))
register("aten.detach.default", "* -> *", linear=((0,),), differentiable=False)
register([f"aten.{c}.{o}" for c in _COMPARISONS.split() for o in ("Tensor", "Scalar")], pointwise, differentiable=False)
register([f"aten.{c}.{o}" for c in _LOGIC.split() for o in ("Tensor", "Scalar")], pointwise, differentiable=False)
register("aten.logical_and.default aten.logical_or.default aten.logical_xor.default", pointwise, differentiable=False)
register([f"onnx.{name}" for name in _COMPARISONS_ONNX.split()], pointwise, differentiable=False)

register("aten.add.Tensor aten.sub.Tensor aten.rsub.Tensor onnx.Add onnx.Sub autopar.add", pointwise, linear=((0, 1),), saves="")
register("onnx.Sum", pointwise)
register("aten.add.Scalar aten.sub.Scalar aten.rsub.Scalar", pointwise, saves="")
register("aten.mul.Tensor onnx.Mul", pointwise, linear=((0,), (1,)))
register("aten.mul.Scalar aten.div.Tensor aten.div.Scalar onnx.Div", pointwise, linear=((0,),))
register("aten.div.Tensor_mode aten.floor_divide.default aten.remainder.Scalar aten.remainder.Tensor aten.fmod.Scalar onnx.Mod", pointwise)
register("aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.pow.Scalar onnx.Pow", pointwise)
register("aten.maximum.default aten.minimum.default aten.atan2.default onnx.Max onnx.Min onnx.Mean onnx.PRelu", pointwise)
register("aten.clamp.Tensor aten.addcmul.default aten.addcdiv.default aten.lerp.Scalar aten.lerp.Tensor", pointwise)
register("aten.where.self onnx.Where", pointwise, linear=((1, 2),))
register("aten.where.ScalarOther aten.where.ScalarSelf aten.masked_fill.Scalar aten.masked_fill.Tensor", pointwise)
