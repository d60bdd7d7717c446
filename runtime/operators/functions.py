"""From an operator's kind to its function, and from its attributes to that function's arguments."""

from __future__ import annotations

import contextlib
import functools
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import autopar.torch_operators  # noqa: F401  (defines operators of ours)
from autopar.errors import UnsupportedOperators
from autopar.ir import Operator, Ref, Value

from .local_call import Function
from .registry import form_of, standing_in

_DTYPES = ("ScalarType", "Optional[ScalarType]")


@contextlib.contextmanager
def known_as(kind: str, function: Function) -> Iterator[None]:
    """Inside, `function` computes the operator kind `kind`."""
    with standing_in(kind, replace(form_of(kind), function=function)):
        yield


def function_of(kind: str) -> Function:
    """The function of an operator kind, called with keyword arguments.

    >>> function_of("aten.linear.default")
    <OpOverload(op='aten.linear', overload='default')>
    """
    own = form_of(kind).function
    if own is not None:
        return own
    namespace, _, rest = kind.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        function: Function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise UnsupportedOperators({kind: 1}) from error
    return function


_KEYWORDS = {f"{word}_": word for word in keyword.kwlist}
"""Words of Python itself, such as the argument `from` of random numbers, as a graph has them."""


def named(function: Function) -> Function:
    """A function with a name, which a `torch.fx` graph needs; a partial one has none."""
    if not isinstance(function, functools.partial):
        return function

    @functools.wraps(function.func)
    def call(**arguments: Any) -> Any:
        return function(**{_KEYWORDS.get(name, name): a for name, a in arguments.items()})

    return call


def writable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `named` function by names that the code of a graph can have.

    >>> writable({"from": 0.5, "to": 2.0})
    {'from_': 0.5, 'to': 2.0}
    """
    names = {word: name for name, word in _KEYWORDS.items()}
    return {names.get(name, name): value for name, value in arguments.items()}


def arguments_of(
    function: Function, attributes: Mapping[str, Value], inputs: Sequence[Any], device: torch.device
) -> dict[str, Any]:
    """Keyword arguments of a call: every `Ref` becomes its input, dtypes become torch's.

    Functions that make tensors from nothing get the device.

    >>> attributes = {"self": Ref(0), "dtype": "float64"}
    >>> arguments_of(function_of("aten.sum.default"), attributes, ["x"], torch.device("cpu"))
    {'self': 'x', 'dtype': torch.float64}
    """
    arguments = {name: _resolve(value, inputs) for name, value in attributes.items()}
    if not isinstance(function, torch._ops.OpOverload):
        # A function of our own takes the device if its attributes name one, which is then None.
        if "device" in arguments and arguments["device"] is None:
            arguments["device"] = device
        return arguments
    for argument in function._schema.arguments:
        name = argument.name
        kind = str(argument.real_type)
        if kind in _DTYPES and isinstance(arguments.get(name), str):
            arguments[name] = getattr(torch, arguments[name])
        elif kind == "Device" or (kind == "Optional[Device]" and not inputs):
            arguments[name] = device
    return arguments


def _resolve(value: Value, inputs: Sequence[Any]) -> Any:
    if isinstance(value, Ref):
        return inputs[value.index]
    # Named tuples are values of their own, such as cuts, and hold no references.
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_resolve(item, inputs) for item in value)
    return value


def returns_sequence(function: Function, operator: Operator) -> bool:
    """Whether the function gives a tuple or list of tensors rather than one tensor."""
    if isinstance(function, torch._ops.OpOverload):
        returned = function._schema.returns
        return len(returned) > 1 or str(returned[0].type) == "List[Tensor]"
    return len(operator.outputs) > 1
