"""Runs a graph on one device, operator by operator, each by the function of its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from autopar.errors import AutoparError, RunError
from autopar.ir import Graph, Operator, Role
from autopar.runtime.operators.functions import arguments_of, function_of


class OperatorFails(RunError):
    """A function raises for the arguments that a graph gives it; the text names the operator."""


Results = tuple[torch.Tensor, ...]
Watch = Callable[[Operator, Results], Results | None]


def last_uses(graph: Graph) -> list[list[str]]:
    """The activations that nothing reads after an operator, for every operator."""
    last: dict[str, int] = {}
    for index, operator in enumerate(graph.operators):
        last.update(dict.fromkeys((*operator.inputs, *operator.outputs), index))
    stored = (Role.PARAMETER, Role.CONSTANT)
    keep = {name for name, tensor in graph.tensors.items() if tensor.role in stored}
    keep.update(graph.outputs, graph.updates.values(), (graph.loss,) if graph.loss else ())
    uses: list[list[str]] = [[] for _ in graph.operators]
    for name, index in last.items():
        if name not in keep:
            uses[index].append(name)
    return uses


def run_operators(
    graph: Graph,
    tensors: dict[str, torch.Tensor],
    done: Sequence[Sequence[str]],
    watch: Watch | None = None,
) -> None:
    """Compute the results of all operators into `tensors`, which holds inputs and stored tensors.

    `done`: the activations to drop after each operator, as of `last_uses`. `watch` is called with
    each operator and its results, and may give others to read in their place.
    """
    device = next((value.device for value in tensors.values()), torch.device("cpu"))
    for operator, after in zip(graph.operators, done, strict=True):
        function = function_of(operator.kind)
        given = [tensors[name] for name in operator.inputs]
        arguments = arguments_of(function, operator.attributes, given, device)
        # Operators without inputs make tensors from nothing, on the default device.
        with nullcontext() if given else device:
            result = _called(operator, function, arguments)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if watch is not None:
            results = watch(operator, results) or results
        tensors.update(zip(operator.outputs, results, strict=False))
        # After its last reader an activation would only take memory.
        for name in after:
            tensors.pop(name, None)


def _called(operator: Operator, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except AutoparError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        words = str(error).strip().split("\n")[0]
        raise OperatorFails(
            f"the operator {operator.name!r} ({operator.kind}) cannot be run: {words}"
        ) from error
