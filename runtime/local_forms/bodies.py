"""Pointwise operators with a body: one autograd node, which keeps its inputs alone.

GPUs run a body compiled, in a kernel for each direction. Elsewhere the backward pass computes what
lies inside again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from autopar.ir import Ref, Value
from autopar.ir.bodies import POINTWISE, Body, is_body, operands
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import Function
from autopar.runtime.operators.registry import register

PRODUCT = "aten.mul.Tensor"


def pointwise(body: Any) -> Tensor:
    """The value of a body, which holds its tensors where the operator's has references."""
    tensors: list[Tensor] = []
    expression = _taken_apart(body, tensors)
    if tensors[0].is_cuda and has_triton():
        run = compiled(expression)
    else:
        run = functools.partial(_Remade.apply, expression)
    made: Tensor = run(*tensors)
    return made


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """A body with references; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        known = next((n for n, tensor in enumerate(tensors) if tensor is value), len(tensors))
        tensors += [value] * (known == len(tensors))
        return Ref(known)
    if is_body(value):
        return value[0], tuple((name, _taken_apart(given, tensors)) for name, given in value[1])
    return value


@functools.cache
def function_of_body(expression: Body) -> Function:
    """The function of an expression's tensors, in the order of their references."""
    kind, given = expression
    function = function_of(kind)
    read = [name for name, value in given if isinstance(value, Ref) or is_body(value)]
    inner = {name: _reader(value) for name, value in given if name in read}
    numbers = {name: value for name, value in given if name not in read}
    told = arguments_of(function, numbers, [None], torch.device("cpu"))

    def run(*tensors: Tensor) -> Any:
        return function(**told, **{name: read(*tensors) for name, read in inner.items()})

    return run


def _reader(value: Value) -> Function:
    """Gives an operand of an expression from its tensors."""
    if is_body(value):
        return function_of_body(value)
    assert isinstance(value, Ref)
    index = value.index
    return lambda *tensors: tensors[index]


@functools.cache
def compiled(expression: Body) -> Function:
    """The function of an expression, compiled when it is first called."""
    return torch.compile(function_of_body(expression), dynamic=False)


class _Remade(torch.autograd.Function):
    """The value of an expression; gradients are those of the same expression, computed again."""

    @staticmethod
    def forward(ctx: Any, expression: Body, *tensors: Tensor) -> Tensor:
        ctx.expression = expression
        ctx.save_for_backward(*tensors)
        made: Tensor = function_of_body(expression)(*tensors)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Second derivatives go on from the tensors themselves.
        further = torch.is_grad_enabled()
        wanted = ctx.needs_input_grad[1:]
        tensors = ctx.saved_tensors
        if not further:
            tensors = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        with torch.enable_grad():
            ends, gradients = _ends(ctx.expression, tensors, gradient, further)
        leaves = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
        made = iter(torch.autograd.grad(ends, leaves, gradients, create_graph=further))
        return None, *(next(made) if want else None for want in wanted)


def _ends(
    expression: Body, tensors: Sequence[Tensor], gradient: Tensor, further: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The values that lead to the result, and their gradients; a last product is not made again."""
    factors = operands(expression)
    if expression[0] != PRODUCT or len(factors) != 2:
        return [function_of_body(expression)(*tensors)], [gradient]
    left, right = (_reader(factor)(*tensors) for factor in factors)
    sides = [(left, right), (right, left)]
    held = [(one, other if further else other.detach()) for one, other in sides]
    ends = [(one, gradient * other) for one, other in held if one.requires_grad]
    return [one for one, _ in ends], [grad.sum_to_size(one.shape) for one, grad in ends]


register(POINTWISE, function=pointwise)
