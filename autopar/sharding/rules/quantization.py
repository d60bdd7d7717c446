"""Rules of linear quantisation: scales and zero points are one number, one per index of a dim, or
one per block.
"""

from __future__ import annotations

from .registry import Call, register
from .shape import letters
from .spelling import ones

# Its scale is from the least and the largest of all elements.


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
