"""Rules of linear quantisation: scales and zero points are one number, one per index of a dim, or
one per block.
"""

from __future__ import annotations

import math

from .contraction import matmul_dims
from .convolution import convolution_dims
from .registry import Call, register
from .selection import all_whole
from .shape import letters
from .spelling import by_name, ones, tensor_named


def _linear(call: Call) -> str:
    """(De)quantisation is pointwise; along `axis` every index, or every block of indices, may have
    its own scale.
    """
    shape = call.inputs[0].shape
    scale = call.inputs[1].shape
    names = letters(len(shape))
    if math.prod(scale) == 1 and len(scale) <= 1:
        return (
            ", ".join([" ".join(names), *(ones(t.shape) for t in call.inputs[1:])])
            + " -> "
            + " ".join(names)
        )
    axis = call.integer("axis", default=1) % len(shape)
    block = call.integer("block_size")
    along = names.copy()
    apart = names.copy()
    if len(scale) == 1:
        apart = [names[axis]]
    elif block and shape[axis] == block * scale[axis]:
        along[axis] = f"({names[axis]} !s={block})"
    # The last block is shorter, so equal shards would not hold whole blocks.
    elif block:
        along[axis] = "!s"
        apart[axis] = "!t"
    return (
        ", ".join([" ".join(along), *(" ".join(apart) for _ in call.inputs[1:])])
        + " -> "
        + " ".join(along)
    )


def _zero_point(shape: tuple[int, ...] | None, vector: str, matrix: str) -> str:
    """The dims of a zero point or a scale of a matrix: one number, a vector, or a matrix with a dim
    of size 1.
    """
    if shape is None or math.prod(shape) == 1:
        return ones(shape or ())
    return vector if len(shape) == 1 else matrix


def _matmul_integer(call: Call) -> str:
    """A product of integers; zero points go with the rows of the first matrix and the columns of
    the second.
    """
    left, right, out = matmul_dims(*(len(t.shape) for t in (*call.inputs[:2], call.outputs[0])))
    # The zero points are subtracted before the product, so it stays linear in the shifted matrices,
    # and integers add up without rounding.
    zero_points = {
        "a_zero_point": _zero_point(tensor_named(call, "a_zero_point"), "m", "* m 1"),
        "b_zero_point": _zero_point(tensor_named(call, "b_zero_point"), "n", "* 1 n"),
    }
    return by_name(call, {"A": left, "B": right, **zero_points}, [out]) + " | k: sum"


def _quantized_matmul(call: Call) -> str:
    """A quantised matrix product: it rounds, so partial sums are useless and the contracted dim
    stays whole.
    """
    shapes = [tensor_named(call, name) or () for name in ("a", "b")]
    left, right, out = matmul_dims(len(shapes[0]), len(shapes[1]), len(call.outputs[0].shape))
    dims = {"a": left.replace("k", "!k"), "b": right.replace("k", "!k")}
    for side, vector, matrix in (("a", "m", "* m 1"), ("b", "n", "* 1 n"), ("y", "m", "* m 1")):
        for name in (f"{side}_scale", f"{side}_zero_point"):
            shape = tensor_named(call, name)
            if (
                shape is not None
                and len(shape) == 1
                and shape[0] > 1
                and side != "b"
                and name != "a_zero_point"
            ):
                return all_whole(call)
            dims[name] = _zero_point(shape, vector, matrix)
    return by_name(call, dims, [out])


def _integer_convolution(call: Call) -> str:
    """A convolution with a zero point, and a scale where it is quantised, for every output channel
    or for all.
    """
    x = tensor_named(call, "x") or ()
    w = tensor_named(call, "w") or ()
    # A quantised result is rounded once, at the end: partial sums of it would be rounded each.
    left, right, channel, out = convolution_dims(x, w, call.integer("group", default=1))
    rounded = call.position("y_scale") is not None
    dims = {"x": left.replace(" c ", " !c ") if rounded else left, "w": right, "B": channel}
    for name in ("x_scale", "x_zero_point", "w_scale", "w_zero_point", "y_scale", "y_zero_point"):
        shape = tensor_named(call, name)
        dims[name] = ones(shape) if shape is not None and math.prod(shape) == 1 else channel
    return by_name(call, dims, [out]) + (
        "" if rounded or call.integer("group", default=1) > 1 else " | c: sum"
    )


register("onnx.QuantizeLinear", _linear, differentiable=False)
register("onnx.DequantizeLinear", _linear, linear=((1,),))
# Its scale is from the least and the largest of all elements.
register("onnx.DynamicQuantizeLinear", all_whole, differentiable=False)
register("onnx.MatMulInteger", _matmul_integer, products=("",), differentiable=False)
register("onnx.QLinearMatMul", _quantized_matmul, products=("",), differentiable=False)
register(
    "onnx.ConvInteger onnx.QLinearConv", _integer_convolution, products=("x",), differentiable=False
)


def _fake(call: Call) -> str:
    """Rounding to steps, pointwise; along `axis` with a scale and a zero point of its own for every
    index.
    """
    names = letters(len(call.inputs[0].shape))
    axis = call.get("axis")
    along = names[axis % len(names)] if isinstance(axis, int) else ""
    rest = "".join(
        f", {along if t.size > 1 or isinstance(axis, int) else ones(t.shape)}"
        for t in call.inputs[1:]
    )
    return f"{' '.join(names)}{rest} -> " + ", ".join(" ".join(names) for _ in call.outputs)


register(
    """aten.fake_quantize_per_tensor_affine.default
    aten.fake_quantize_per_tensor_affine.tensor_qparams
    aten.fake_quantize_per_channel_affine.default
    aten.fake_quantize_per_tensor_affine_cachemask.default
    aten.fake_quantize_per_channel_affine_cachemask.default
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    aten._fake_quantize_learnable_per_tensor_affine.default
    aten._fake_quantize_learnable_per_channel_affine.default""",
    _fake,
)
register(
    """quantized_decomposed.quantize_per_tensor.default
    quantized_decomposed.quantize_per_tensor.tensor
    quantized_decomposed.quantize_per_channel.default
    quantized_decomposed.dequantize_per_tensor.default
    quantized_decomposed.dequantize_per_tensor.tensor
    quantized_decomposed.dequantize_per_channel.default""",
    _fake,
    differentiable=False,
)
register(
    "aten._weight_int8pack_mm.default", "m !k, n !k, n -> m n", products=("",), differentiable=False
)
