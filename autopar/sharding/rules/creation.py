"""Rules of operators that make tensors from nothing or from a shape; each device makes what it needs whole."""

from __future__ import annotations

from .registry import register
from .selection import all_whole

register(
    """aten.arange.default aten.arange.start aten.arange.start_step aten.zeros.default aten.ones.default aten.full.default aten.eye.default
    aten.scalar_tensor.default aten.new_zeros.default aten.new_ones.default aten.new_full.default aten.zeros_like.default
    aten.ones_like.default aten.full_like.default onnx.Range onnx.ConstantOfShape onnx.EyeLike onnx.Constant onnx.Shape onnx.Size""",
    all_whole,
    differentiable=False,
)
