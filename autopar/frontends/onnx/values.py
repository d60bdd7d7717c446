"""The importer's knowledge of one value of an ONNX graph, and the signature of one operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, TypeProto, helper, numpy_helper

from autopar.errors import ModelError
from autopar.file_limits import FOLDED_ELEMENTS
from autopar.ir.graph import Role, Value

FOLD_LIMIT = FOLDED_ELEMENTS  # larger values stay operators, so that folding never blows up
_DTYPES: Mapping[int, str] = {
    TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    TensorProto.FLOAT8E5M2: "float8_e5m2",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.INT16: "int16",
    TensorProto.INT8: "int8",
    TensorProto.UINT64: "uint64",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT8: "uint8",
    TensorProto.BOOL: "bool",
    TensorProto.COMPLEX64: "complex64",
    TensorProto.COMPLEX128: "complex128",
    TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    # By number: older versions of onnx lack the names. Types narrower than a byte take a byte, as
    # in the runtime.
    21: "uint8",
    22: "int8",
    23: "float8_e4m3fn",
    24: "float8_e8m0fnu",
    25: "uint8",
    26: "int8",
}


def dtype_name(code: int, where: str) -> str:
    """The graph's name of an ONNX dtype."""
    if code not in _DTYPES:
        if code in TensorProto.DataType.values():
            known = TensorProto.DataType.Name(code)
        else:
            known = f"number {code}"
        raise ModelError(f"{where} has the element type {known}, which cannot be planned")
    return _DTYPES[code]


def is_float_code(code: int) -> bool:
    """Whether an ONNX dtype can carry a gradient."""
    return _DTYPES.get(code, "").startswith(("float", "bfloat"))


@dataclass(slots=True, eq=False)
class Val:
    """One tensor of the model.

    `array` is its value where folded, `payload` the stored tensor that was not decoded yet.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    role: Role = Role.ACTIVATION
    foldable: bool = False
    array: np.ndarray | None = None
    payload: TensorProto | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def known(self) -> np.ndarray | None:
        """The value if it may be folded."""
        return self.decode() if self.foldable else None

    def decode(self, read: Callable[[TensorProto], np.ndarray] | None = None) -> np.ndarray | None:
        """The value if the file holds it; `read` fetches external data."""
        if self.array is None and self.payload is not None:
            if self.payload.data_location != TensorProto.EXTERNAL:
                self.array = _to_array(self.payload, self.shape)
            elif read is not None:
                self.array = read(self.payload)
        return self.array


def _to_array(tensor: TensorProto, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.asarray(numpy_helper.to_array(tensor)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the stored tensor {tensor.name!r} does not hold {shape} elements of its type: {error}"
        ) from error


def constant(name: str, array: np.ndarray) -> Val:
    """A folded value."""
    code = helper.np_dtype_to_tensor_dtype(array.dtype)
    return Val(name, code, array.shape, Role.CONSTANT, True, array)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """An operator's formal names, from its schema."""

    schema: onnx.defs.OpSchema
    inputs: tuple[str, ...]
    variadic: bool
    outputs: tuple[str, ...]
    optional_outputs: frozenset[int] = field(default_factory=frozenset)
    defaults: dict[str, Value] = field(default_factory=dict)


@cache
def signature(domain: str, op_type: str, version: int) -> Signature:
    """The formal inputs, outputs and attribute defaults of an operator at an opset version."""
    schema = onnx.defs.get_schema(op_type, version, domain)
    option = onnx.defs.OpSchema.FormalParameterOption
    defaults = {
        name: attribute_value(item.default_value)
        for name, item in schema.attributes.items()
        if item.default_value.name
    }
    return Signature(
        schema=schema,
        inputs=tuple(item.name for item in schema.inputs),
        variadic=bool(schema.inputs) and schema.inputs[-1].option == option.Variadic,
        outputs=tuple(item.name for item in schema.outputs),
        optional_outputs=frozenset(
            i for i, item in enumerate(schema.outputs) if item.option == option.Optional
        ),
        defaults=defaults,
    )


def attribute_value(attribute: AttributeProto) -> Value:
    """An attribute as a plain value: tensors become numbers or nested tuples."""
    kind = attribute.type
    if kind == AttributeProto.INT:
        return int(attribute.i)
    if kind == AttributeProto.FLOAT:
        return _short_float(attribute.f)
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.INTS:
        return tuple(int(item) for item in attribute.ints)
    if kind == AttributeProto.FLOATS:
        return tuple(_short_float(item) for item in attribute.floats)
    if kind == AttributeProto.STRINGS:
        return tuple(item.decode("utf-8", "replace") for item in attribute.strings)
    if kind == AttributeProto.TENSOR:
        if attribute.t.data_type == TensorProto.STRING:
            raise ModelError(
                f"the attribute {attribute.name!r} holds strings, which are not supported"
            )
        array = numpy_helper.to_array(attribute.t)
        return plain(array.reshape(()) if array.size == 1 else array)
    raise ModelError(
        f"the attribute {attribute.name!r} is a {AttributeProto.AttributeType.Name(kind)}, which "
        "is not supported"
    )


_LARGEST = float(np.finfo(np.float32).max)


def _short_float(number: float) -> float:
    """The shortest decimal that rounds to the same float32, unless it leaves the range.

    It gives 0.1, not 0.10000000149.
    """
    short = float(str(np.float32(number)))
    return number if abs(short) > _LARGEST and math.isfinite(short) else short


def clamped(start: int, end: int, step: int, size: int) -> range:
    """The places along a dim of `size` that a Slice takes.

    A start that lies outside is moved to the nearest end.

    >>> clamped(-5, -6, -1, 4), clamped(2, 9, 1, 4)
    (range(0, -1, -1), range(2, 4))
    """
    start, end = (place + size if place < 0 else place for place in (start, end))
    if step < 0:
        return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step)
    return range(min(max(start, 0), size), min(max(end, 0), size), step)


def plain(array: np.ndarray) -> Value:
    """An array as a number or nested tuples of numbers.

    >>> plain(np.array([[1, 2], [3, 4]]))
    ((1, 2), (3, 4))
    """
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)
    if array.ndim == 0:
        return _short_float(array.item()) if array.dtype == np.float32 else array.item()
    return tuple(plain(item) for item in np.asarray(array))


@cache
def type_proto(code: int, shape: tuple[int, ...]) -> TypeProto:
    """The ONNX type of a tensor of known shape."""
    return helper.make_tensor_type_proto(code, shape)
