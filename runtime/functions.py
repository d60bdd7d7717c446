"""From an operator's kind to the function that computes it, and from its attributes to that function's arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autopar.errors import UnsupportedOperators
from autopar.ir import Operator, Ref, Value
from autopar.sharding.rules.experts import EXPERTS

Function = Callable[..., Any]


def mean_square(x: Tensor, count: int) -> Tensor:
    """The sum of squares over the global number of elements: a share of the mean square where `x` is a shard."""
    return (x * x).sum() / count


def add(**addends: Tensor) -> Tensor:
    """The sum of all arguments."""
    return functools.reduce(torch.add, addends.values())


def view(self: Tensor, size: Sequence[int]) -> Tensor:
    """A view, or a copy where a redistribution left other strides than the model had."""
    return self.reshape(tuple(size))


def copy(self: Tensor, src: Tensor) -> Tensor:
    """What `self` is once `src` is written over it; torch's own operator has no gradient."""
    return src.to(self.dtype).expand_as(self).clone(memory_format=torch.contiguous_format)


def contiguous(self: Tensor) -> Tensor:
    """The same values in the default layout of memory."""
    return self.contiguous()


_OWN: dict[str, Function] = {
    "autopar.add": add,
    "autopar.mean_square": mean_square,
    "aten.view.default": view,
    "aten._unsafe_view.default": view,
    "aten.contiguous.default": contiguous,
    "aten.copy.default": copy,
}


@contextlib.contextmanager
def known_as(kind: str, function: Function) -> Iterator[None]:
    """For a while, `function` is what the operator kind `kind` computes."""
    before = _OWN.get(kind)
    _OWN[kind] = function
    try:
        yield
    finally:
        del _OWN[kind]
        if before is not None:
            _OWN[kind] = before


def is_onnx(kind: str) -> bool:
    """Whether an operator kind is one of ONNX, of the default domain or of another.

    >>> is_onnx("onnx.Add"), is_onnx("ai.onnx.ml.Binarizer"), is_onnx("aten.add.Tensor")
    (True, True, False)
    """
    return kind.startswith(("onnx.", "ai.onnx."))


def function_of(kind: str) -> Function:
    """The function of an operator kind, called with keyword arguments.

    >>> function_of("aten.linear.default")
    <OpOverload(op='aten.linear', overload='default')>
    """
    if kind in _OWN:
        return _OWN[kind]
    if kind == EXPERTS:
        layer: Function = import_module("autopar.runtime.experts").experts
        return layer
    if is_onnx(kind):
        table: Mapping[str, Function] = import_module("autopar.runtime.onnx_ops").ONNX_FUNCTIONS
        if kind not in table:
            raise UnsupportedOperators({kind: 1}, known=table)
        return table[kind]
    namespace, _, rest = kind.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        function: Function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise UnsupportedOperators({kind: 1}) from error
    return function


def on_device(function: Function, device: torch.device) -> Function:
    """A function that makes tensors from nothing, bound to a device."""

    @functools.wraps(function)
    def make(**arguments: Any) -> Any:
        with device:
            return function(**arguments)

    return make


def named(function: Function) -> Function:
    """A function with a name, which a `torch.fx` graph needs; a partial one has none."""
    if not isinstance(function, functools.partial):
        return function

    @functools.wraps(function.func)
    def call(**arguments: Any) -> Any:
        return function(**arguments)

    return call


def arguments_of(function: Function, attributes: Mapping[str, Value], inputs: Sequence[Any], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a call: every `Ref` becomes its input, dtypes become torch's, makers get the device.

    >>> arguments_of(function_of("aten.sum.default"), {"self": Ref(0), "dtype": "float64"}, ["x"], torch.device("cpu"))
    {'self': 'x', 'dtype': torch.float64}
    """
    out = {name: _resolve(value, inputs) for name, value in attributes.items()}
    if not isinstance(function, torch._ops.OpOverload):
        return out
    for argument in function._schema.arguments:
        kind = str(argument.real_type)
        if kind in ("ScalarType", "Optional[ScalarType]") and isinstance(out.get(argument.name), str):
            out[argument.name] = getattr(torch, out[argument.name])
        elif kind in ("Device", "Optional[Device]") and (kind == "Device" or not inputs):
            out[argument.name] = device
    return out


def _resolve(value: Value, inputs: Sequence[Any]) -> Any:
    if isinstance(value, Ref):
        return inputs[value.index]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_resolve(item, inputs) for item in value)
    return value


def returns_sequence(function: Function, operator: Operator) -> bool:
    """Whether the function gives a tuple or list of tensors rather than one tensor."""
    if isinstance(function, torch._ops.OpOverload):
        returned = function._schema.returns
        return len(returned) > 1 or str(returned[0].type) == "List[Tensor]"
    return len(operator.outputs) > 1


def only(value: Any) -> Any:
    """The single result of a function that may have wrapped it in a tuple."""
    return value[0] if isinstance(value, tuple | list) else value
