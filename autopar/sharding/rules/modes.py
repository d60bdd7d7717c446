"""Operators in evaluation: the model as planned for training, with dropout off and with the
collected statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir import Graph, Operator, Value

_DROPOUT = (
    "aten.dropout.default aten.feature_dropout.default aten.native_dropout.default "
    "aten.alpha_dropout.default"
)
_LAYERS = (
    "aten.lstm.input aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input aten.lstm.data "
    "aten.gru.data aten.rnn_tanh.data"
)
_NORM = "aten.batch_norm.default"
_WITH_STATISTICS = "aten._native_batch_norm_legit_functional.default"
_NORMS = f"{_NORM} aten.native_batch_norm.default {_WITH_STATISTICS}"

EVALUATION: Mapping[str, tuple[str, Value]] = {
    **dict.fromkeys(
        f"{_DROPOUT} aten.feature_alpha_dropout.default {_LAYERS} aten.rnn_relu.data".split(),
        ("train", False),
    ),
    **dict.fromkeys(
        f"{_NORMS} aten.rrelu.default aten.rrelu_with_noise.default".split(), ("training", False)
    ),
    "aten.scaled_dot_product_attention.default": ("dropout_p", 0.0),
    "aten.instance_norm.default": ("use_input_stats", False),
}
"""Operator kind → the attribute that tells training from evaluation, and its value in evaluation.
"""


def evaluated(graph: Graph) -> Graph:
    """The graph in evaluation; `PlanError` if it changes a buffer that is no statistic."""
    operators = []
    statistics: dict[str, str] = {}
    gone: set[str] = set()
    for before in graph.operators:
        # A norm that is called twice has read the statistics that its first call has made.
        inputs = tuple(statistics.get(name, name) for name in before.inputs)
        after = _evaluated(replace(before, inputs=inputs) if inputs != before.inputs else before)
        operators.append(after)
        if len(after.outputs) < len(before.outputs):
            gone |= set(before.outputs[len(after.outputs) :])
            statistics |= dict(zip(before.outputs[-2:], inputs[-2:], strict=False))
    makers = graph.producers()
    # In evaluation statistics alone go without an update. A plan must not drop another change, such
    # as that of a cache, since results may depend on it.
    strange = [
        name
        for name, fresh in graph.updates.items()
        if not _is_statistic(graph.operators[makers[fresh][0]], name, fresh)
    ]
    if strange:
        raise PlanError(
            f"what the model does to its buffer {strange[0]!r} in evaluation is not known; plan it "
            "with mode='infer'"
        )
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(graph, operators=tuple(operators), tensors=tensors, updates={})


def _evaluated(operator: Operator) -> Operator:
    name, value = EVALUATION.get(operator.kind, ("", None))
    if not name or name not in operator.attributes:
        return operator
    if name == "use_input_stats" and operator.attributes.get("running_mean") is None:
        return operator  # nothing was collected: a norm of each sample is the same in evaluation
    if not operator.attributes.get(name):
        return operator
    attributes = {**operator.attributes, name: value}
    if operator.kind == _WITH_STATISTICS:  # its other outputs are for training
        return replace(
            operator,
            kind=_NORM,
            attributes={**attributes, "cudnn_enabled": False},
            outputs=operator.outputs[:1],
        )
    return replace(operator, attributes=attributes)


def _is_statistic(maker: Operator, name: str, fresh: str) -> bool:
    """Whether a new value of a buffer is that of a norm, or counts its batches."""
    return EVALUATION.get(maker.kind, ("",))[0] in ("training", "use_input_stats") or name.endswith(
        "num_batches_tracked"
    )
