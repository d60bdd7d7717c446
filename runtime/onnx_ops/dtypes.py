"""ONNX's numbers for element types, as torch dtypes.

Elements of two and four bits are held in bytes, the four-bit float in eight bits: torch has no
arithmetic on them, and no value is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# The numbers are those of TensorProto.DataType in onnx.proto; 8, strings, has no dtype.
_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    21: torch.uint8,
    22: torch.int8,
    23: torch.float8_e4m3fn,
    24: torch.float8_e8m0fnu,
    25: torch.uint8,
    26: torch.int8,
}
FLOAT4 = 23
FLOAT8_SCALE = 24
# The range of the integers that are narrower than the dtype they are held in.
NARROW_INTEGERS: Mapping[int, tuple[int, int]] = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}


def torch_dtype(code: int) -> torch.dtype:
    """The torch dtype that holds an ONNX element type."""
    if code not in _DTYPES:
        raise ValueError(f"the ONNX element type {code} has no torch dtype")
    return _DTYPES[code]


def wide(x: torch.Tensor, stash_type: int = 1) -> torch.dtype:
    """The dtype to compute in: the operator's stash type, never narrower than the input."""
    return torch.promote_types(x.dtype, torch_dtype(stash_type))


def float_limits(dtype: torch.dtype) -> tuple[float, float]:
    """The lowest and highest value of a dtype."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(info.min), float(info.max)
