"""Numbers of an exported program that only its assertions read.

Such an assertion becomes a `Check` of every call's data.

A model may compare counts as numbers, such as the image tokens in a prompt with the features that
replace them. The number is no tensor, so nothing of it can be split; but an assertion gives no
value to the model, and what it says of the inputs can be asked of each batch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes

from autopar.ir import Operator, needed_operators
from autopar.model import Check

READS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
ASSERTS = "aten._assert_scalar.default"
SIZE = "aten.sym_size.int"
_ARITHMETIC: Mapping[Any, str] = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.ge: ">=",
    operator.gt: ">",
    operator.le: "<=",
    operator.lt: "<",
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.truediv: "/",
    operator.neg: "-",
    operator.and_: "and",
    operator.or_: "or",
    torch.sym_not: "not",
    torch.sym_ite: "if",
    torch.sym_max: "max",
    torch.sym_min: "min",
    torch.sym_int: "int",
    torch.sym_float: "float",
    # Torch 2.11 writes `if` so, of a truth value and the numbers 1 and 0.
    getattr(symbolic_shapes, "cast_symbool_to_symint_guardless", torch.sym_int): "int",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a call takes from its data: `function` of `arguments`, some of them numbers.

    None: the value of the tensor `tensor`.
    """

    function: Callable[..., Any] | None
    arguments: tuple[Any, ...] = ()
    tensor: str = ""

    def value(self, tensors: Mapping[str, Any]) -> Any:
        """The number of these tensors."""
        if self.function is None:
            return tensors[self.tensor].item()
        return self.function(
            *(one.value(tensors) if isinstance(one, Number) else one for one in self.arguments)
        )

    def sources(self) -> frozenset[str]:
        """The tensors that it is read from."""
        inner = (one.sources() for one in self.arguments if isinstance(one, Number))
        return frozenset({self.tensor} if self.function is None else frozenset()).union(*inner)


def number_of(target: object, arguments: Sequence[Any]) -> Any:
    """The number that a call of an exported program makes of others; None where it makes none.

    It is a plain number if it is made of such.
    """
    read = str(target) in READS and len(arguments) == 1 and isinstance(arguments[0], str)
    if read:
        return Number(None, tensor=arguments[0])
    if not callable(target) or target not in _ARITHMETIC:
        return None
    if any(isinstance(one, Number) for one in arguments):
        return Number(target, tuple(arguments))
    plain = all(isinstance(one, (bool, int, float)) for one in arguments)
    return target(*arguments) if plain else None


def place_of(node: torch.fx.Node) -> str:
    """The file and the line of the model's code that made a node."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if frames:
        return f"{frames[-1][0].replace(chr(92), '/').rpartition('/')[2]}:{frames[-1][1]}"
    return node.name


def checks_of(
    assertions: Sequence[tuple[str, Number]], operators: Sequence[Operator], given: frozenset[str]
) -> tuple[Check, ...]:
    """Checks of the assertions, given as pairs of a place and a number; one check for each place.

    `given`: tensors that a call has whole.
    """
    checks = []
    for place in dict.fromkeys(place for place, _ in assertions):
        numbers = tuple(number for other, number in assertions if other == place)
        needed = needed_operators(
            operators, sorted(frozenset().union(*(number.sources() for number in numbers)))
        )
        made = {name for op in needed for name in op.outputs}
        read = {name for op in needed for name in op.inputs}.union(
            *(number.sources() for number in numbers)
        ) - made
        holds = tuple(number.value for number in numbers)
        checks.append(Check(place=place, operators=needed, holds=holds, checkable=read <= given))
    return tuple(checks)
