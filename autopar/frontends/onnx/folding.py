"""Evaluates operators on known values.

Common arithmetic of shapes is numpy's; onnx's reference evaluator does the rest.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper, numpy_helper

from autopar.errors import ModelError
from autopar.ir.graph import Value

from .model import domain_of, kind_of
from .values import clamped

Attributes = Mapping[str, Value]
Arrays = Sequence[np.ndarray]
_LAST_PLAIN_TYPE = 16  # after bfloat16 come the types of eight bits and less
RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
        "Dropout",
    }
)


def _axes(inputs: Arrays, attributes: Attributes) -> tuple[int, ...] | None:
    if len(inputs) > 1:
        return tuple(int(axis) for axis in inputs[1].ravel())
    axes = attributes.get("axes")
    return tuple(int(str(axis)) for axis in axes) if isinstance(axes, tuple) else None


def _unsqueeze(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    return np.expand_dims(inputs[0], _axes(inputs, attributes) or ())


def _squeeze(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    return np.squeeze(inputs[0], _axes(inputs, attributes))


def _integer(attributes: Attributes, name: str, default: int = 0) -> int:
    value = attributes.get(name, default)
    return value if isinstance(value, int) else default


def _gather(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    return np.asarray(
        np.take(inputs[0], inputs[1], axis=_integer(attributes, "axis"), mode="raise")
    )


def _concat(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    return np.concatenate(inputs, axis=_integer(attributes, "axis", 1))


def _cast(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    code = _integer(attributes, "to")
    if code > _LAST_PLAIN_TYPE or inputs[0].dtype.kind not in "biuf":
        raise KeyError("a cast that rounds or saturates in a way of its own")
    return inputs[0].astype(helper.tensor_dtype_to_np_dtype(code))


def _div(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    left, right = inputs
    if left.dtype.kind not in "iu":
        return np.divide(left, right)
    quotient = np.abs(left) // np.abs(right)
    return np.asarray(np.sign(left) * np.sign(right) * quotient).astype(left.dtype)


def _slice(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    if len(inputs) < 3:
        raise KeyError("an old Slice")
    starts = inputs[1].ravel()
    ends = inputs[2].ravel()
    axes = inputs[3].ravel() if len(inputs) > 3 else np.arange(len(starts))
    steps = inputs[4].ravel() if len(inputs) > 4 else np.ones(len(starts), np.int64)
    cut = [slice(None)] * inputs[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places = clamped(int(start), int(end), int(step), inputs[0].shape[axis])
        if places:
            cut[axis] = slice(places.start, places.stop if places.stop >= 0 else None, places.step)
        else:
            cut[axis] = slice(0)
    return inputs[0][tuple(cut)]


def _range(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    start, limit, delta = (item.reshape(()) for item in inputs)
    count = max(0, int(np.ceil((limit - start) / delta)))
    return np.asarray(start + np.arange(count).astype(start.dtype) * delta).astype(start.dtype)


def _where(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    return np.where(*inputs)


def _trilu(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    diagonal = int(inputs[1].reshape(())) if len(inputs) > 1 else 0
    if _integer(attributes, "upper", 1):
        return np.triu(inputs[0], diagonal)
    return np.tril(inputs[0], diagonal)


def _transpose(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    order = attributes.get("perm")
    return inputs[0].transpose(
        tuple(int(str(axis)) for axis in order) if isinstance(order, tuple) else None
    )


def _expand(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    shape = np.broadcast_shapes(inputs[0].shape, tuple(inputs[1].ravel().tolist()))
    return np.ascontiguousarray(np.broadcast_to(inputs[0], shape)).reshape(shape)


def _cumulative_sum(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    if _integer(attributes, "exclusive") or _integer(attributes, "reverse"):
        raise KeyError("a sum that leaves out its own element, or runs backwards")
    return inputs[0].cumsum(int(inputs[1].reshape(())), dtype=inputs[0].dtype)


def _gather_nd(inputs: Arrays, attributes: Attributes) -> np.ndarray:
    if _integer(attributes, "batch_dims"):
        raise KeyError("indices of their own for each member of a batch")
    return np.asarray(inputs[0][tuple(np.moveaxis(inputs[1], -1, 0))])


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[[Arrays, Attributes], np.ndarray]:
    return lambda inputs, attributes: np.asarray(function(*inputs))


def _reduced(function: Callable[..., np.ndarray]) -> Callable[[Arrays, Attributes], np.ndarray]:
    return lambda inputs, attributes: np.asarray(functools.reduce(function, inputs))


_EVALUATORS: Mapping[str, Callable[[Arrays, Attributes], np.ndarray]] = {
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _div,
    "Neg": _elementwise(np.negative),
    "Not": _elementwise(np.logical_not),
    "And": _elementwise(np.logical_and),
    "Or": _elementwise(np.logical_or),
    "Equal": _elementwise(np.equal),
    "Less": _elementwise(np.less),
    "Greater": _elementwise(np.greater),
    "LessOrEqual": _elementwise(np.less_equal),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Where": _where,
    "Identity": lambda inputs, attributes: inputs[0],
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Gather": _gather,
    "Concat": _concat,
    "Cast": _cast,
    "Slice": _slice,
    "Range": _range,
    "Abs": _elementwise(np.abs),
    "Log": _elementwise(np.log),
    "Min": _reduced(np.minimum),
    "Max": _reduced(np.maximum),
    "Trilu": _trilu,
    "Transpose": _transpose,
    "Expand": _expand,
    "CumSum": _cumulative_sum,
    "GatherND": _gather_nd,
}


def _filled(node: NodeProto, shape: np.ndarray) -> np.ndarray:
    fill = next(
        (numpy_helper.to_array(item.t).ravel() for item in node.attribute if item.name == "value"),
        np.zeros(1, np.float32),
    )
    return np.full(tuple(shape.tolist()), fill[0], dtype=fill.dtype)


def evaluate(
    node: NodeProto,
    inputs: Sequence[np.ndarray | None],
    attributes: Attributes,
    versions: Mapping[str, int],
) -> list[np.ndarray]:
    """The node's outputs for known inputs."""
    present = [item for item in inputs if item is not None]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if domain_of(node) == "" and node.op_type == "ConstantOfShape":
                return [_filled(node, present[0])]
            if (
                domain_of(node) == ""
                and node.op_type in _EVALUATORS
                and len(present) == len(inputs)
            ):
                result = _EVALUATORS[node.op_type](present, attributes)
                return [
                    result.astype(present[0].dtype, copy=False)
                    if node.op_type in ("Add", "Sub", "Mul", "Neg")
                    else result
                ]
    except KeyError:
        return evaluate_by_reference(node, inputs, versions)
    except (ValueError, IndexError, ZeroDivisionError, TypeError, OverflowError) as error:
        raise ModelError(
            f"node {node.name!r} ({kind_of(node)}) cannot be evaluated on its constants: {error}"
        ) from error
    return evaluate_by_reference(node, inputs, versions)


class CannotFold(ModelError):
    """An operator whose value onnx's reference evaluator cannot tell: it stays an operator."""


def evaluate_by_reference(
    node: NodeProto, inputs: Sequence[np.ndarray | None], versions: Mapping[str, int]
) -> list[np.ndarray]:
    """Evaluate an operator by onnx's reference evaluator, which takes long to import."""
    from onnx.reference import ReferenceEvaluator

    feeds = {
        name: array for name, array in zip(node.input, inputs, strict=False) if array is not None
    }
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    graph = helper.make_graph(
        [node],
        "constant",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in feeds.items()
        ],
        [ValueInfoProto(name=name) for name in node.output if name],
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
            results = session.run(None, feeds)
    except Exception as error:  # the reference evaluator raises whatever its numpy code meets
        raise CannotFold(
            f"node {node.name!r} ({kind_of(node)}) cannot be evaluated on its constants: {error}"
        ) from error
    return [np.asarray(item) for item in results]
