"""The differences between a plan file and a model, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .ir import Graph, Tensor
from .plan_parts import InputSpec, ModelSpec, OperatorPlan, ParameterPlan
from .sharding.rules import preamble


def differences(
    graph: Graph,
    model: ModelSpec,
    parameters: Mapping[str, ParameterPlan],
    operators: Mapping[str, OperatorPlan],
) -> list[str]:
    """The differences of a model from the parts of a plan; empty if they match."""
    sentences = [
        *_of_inputs(graph, model),
        *_of_parameters(graph, parameters),
        *_of_operators(graph, operators),
        *_not_in_the_plan(graph, parameters, operators),
    ]
    if not sentences and model.fingerprint != graph.fingerprint():
        sentences.append("the model is joined differently than when it was planned")
    return sentences


def _of_inputs(graph: Graph, model: ModelSpec) -> Iterable[str]:
    """Sentences on inputs of another shape or type: the reason why most operators differ, too."""
    for name in graph.inputs:
        tensor = graph.tensors[name]
        planned = model.inputs.get(name)
        if planned is not None:
            yield from _unlike(f"input {name!r}", tensor, planned)


def _of_parameters(graph: Graph, parameters: Mapping[str, ParameterPlan]) -> Iterable[str]:
    present = {tensor.name: tensor for tensor in graph.parameters}
    for name, planned in parameters.items():
        tensor = present.get(name)
        if tensor is None:
            yield f"parameter {name!r} is not in the model"
        else:
            yield from _unlike(f"parameter {name!r}", tensor, planned)


def _unlike(what: str, tensor: Tensor, planned: InputSpec | ParameterPlan) -> Iterable[str]:
    if (tensor.shape, tensor.dtype) != (planned.shape, planned.dtype):
        yield (
            f"{what} is {tensor.dtype} {list(tensor.shape)}, planned as "
            f"{planned.dtype} {list(planned.shape)}"
        )


def _of_operators(graph: Graph, operators: Mapping[str, OperatorPlan]) -> Iterable[str]:
    present = {operator.name: operator for operator in graph.operators}
    for name, planned in operators.items():
        operator = present.get(name)
        if operator is None:
            yield f"operator {name!r} ({planned.kind}) is not in the model"
        elif graph.operator_fingerprint(operator) != planned.fingerprint:
            yield (
                f"operator {name!r} is {operator.kind} with other shapes or attributes than when "
                f"it was planned ({planned.kind})"
            )


def _not_in_the_plan(
    graph: Graph, parameters: Mapping[str, ParameterPlan], operators: Mapping[str, OperatorPlan]
) -> Iterable[str]:
    for tensor in graph.parameters:
        if tensor.name not in parameters:
            yield f"parameter {tensor.name!r} is not in the plan"
    # Operators that depend on no parameter are computed whole, and have no strategy in plans.
    cold = preamble(graph)
    for operator in graph.operators:
        if operator.name not in operators and operator.name not in cold:
            yield f"operator {operator.name!r} ({operator.kind}) is not in the plan"
