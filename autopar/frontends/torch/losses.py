"""Splits a mean loss over counted rows into a sum and a count, so that its rows can be split."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Tensor, Value

_CLASS_LOSSES = frozenset(
    {"aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default"}
)
_MEAN = 1
_SUM = 2
_IGNORED = -100


def split_means(graph: Graph) -> Graph:
    """The graph with every unweighted mean of a class loss as sum / count.

    The count of the rows that are not ignored depends on the targets alone: every device computes
    it whole.
    """
    tensors = dict(graph.tensors)
    operators: list[Operator] = []
    for operator in graph.operators:
        is_mean = (
            operator.attributes.get("reduction", _MEAN) == _MEAN
            and operator.attributes.get("weight") is None
        )
        operators += (
            _split(operator, tensors) if operator.kind in _CLASS_LOSSES and is_mean else [operator]
        )
    return replace(graph, tensors=tensors, operators=tuple(operators))


def _split(operator: Operator, tensors: dict[str, Tensor]) -> list[Operator]:
    """Make the sum under the operator's name, the count of rows, and their quotient."""
    loss = tensors[operator.outputs[0]]
    made: list[Operator] = []

    def add(
        what: str,
        kind: str,
        shape: tuple[int, ...],
        dtype: str,
        inputs: tuple[str, ...],
        **attributes: Value,
    ) -> str:
        name = operator.name if not what else f"{operator.name}.{what}"
        output = loss.name if what == "mean" else f"{operator.name}.{what or 'sum'}:0"
        tensors[output] = Tensor(name=output, shape=shape, dtype=dtype)
        made.append(
            Operator(name=name, kind=kind, inputs=inputs, outputs=(output,), attributes=attributes)
        )
        return output

    total = add(
        "",
        operator.kind,
        (),
        loss.dtype,
        operator.inputs,
        **{**operator.attributes, "reduction": _SUM},
    )
    target_reference = operator.attributes["target"]
    assert isinstance(target_reference, Ref)
    target = tensors[operator.inputs[target_reference.index]]
    if target.is_float:
        scores = tensors[operator.inputs[0]].shape
        rows = scores[0] if len(scores) > 1 else 1
        for size in scores[2:]:
            rows *= size
        add("mean", "aten.div.Scalar", (), loss.dtype, (total,), self=Ref(0), other=rows)
        return made
    ignored = operator.attributes.get("ignore_index", _IGNORED)
    counted = add(
        "counted",
        "aten.ne.Scalar",
        target.shape,
        "bool",
        (target.name,),
        self=Ref(0),
        other=ignored,
    )
    count = add("count", "aten.sum.default", (), "int64", (counted,), self=Ref(0))
    add("mean", "aten.div.Tensor", (), loss.dtype, (total, count), self=Ref(0), other=Ref(1))
    return made
