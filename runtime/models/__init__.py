"""Models on one device.

An ONNX graph or an operator comes in, an `nn.Module` or inputs to call it with go out.
"""

from .example_inputs import example_values
from .onnx_module import OnnxModule

__all__ = ["OnnxModule", "example_values"]
