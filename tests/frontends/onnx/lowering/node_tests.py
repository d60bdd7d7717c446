"""The node tests of the onnx package: a model, its inputs and the recorded outputs each, and the
reason where one is left out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from autopar.frontends.onnx.calls import OPTIONAL, REQUIRED
from autopar.frontends.onnx.values import signature

OLDEST_OPSET = 7
_RANDOM = frozenset(
    {
        "Bernoulli",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Multinomial",
    }
)
REASONS = ("control flow", "sequence", "optional", "string", "random numbers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTest:
    """One node test; `left_out` is the reason why it does not count, one of `REASONS`, or None."""

    name: str
    model: ModelProto
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    rtol: float
    atol: float
    left_out: str | None
    base: NodeProto

    @property
    def kind(self) -> str:
        """The operator under test as graphs spell it; an expanded test is under its operator's
        name.
        """
        return f"{self.base.domain or 'onnx'}.{self.base.op_type}"

    @property
    def expanded(self) -> bool:
        """Whether the model holds the operator's definition by other operators."""
        return "_expanded" in self.name

    def ready(self) -> tuple[ModelProto, tuple[np.ndarray, ...]]:
        """The model with the inputs that decide shapes turned into constants and its outputs'
        shapes written out, and the inputs left.
        """
        copy = ModelProto()
        copy.CopyFrom(self.model)
        for entry in copy.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = max(OLDEST_OPSET, entry.version)
        fixed = self._fixed(copy)
        kept = []
        feeds = []
        for value, data in zip(self.model.graph.input, self.inputs, strict=True):
            if value.name in fixed:
                copy.graph.initializer.append(numpy_helper.from_array(data, value.name))
            else:
                kept.append(
                    helper.make_tensor_value_info(
                        value.name, value.type.tensor_type.elem_type, data.shape
                    )
                )
                feeds.append(data)
        del copy.graph.input[:]
        copy.graph.input.extend(kept)
        for value, data in zip(copy.graph.output, self.outputs, strict=False):
            value.type.CopyFrom(
                helper.make_tensor_type_proto(value.type.tensor_type.elem_type, data.shape)
            )
        return copy, tuple(feeds)

    def _fixed(self, model: ModelProto) -> set[str]:
        """Names of the inputs that must be known when the model is imported."""
        if self.base.domain not in ("", "ai.onnx"):
            return set()
        version = next(
            entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")
        )
        formal = signature("", self.base.op_type, version).inputs
        names = {*REQUIRED.get(self.base.op_type, ()), *OPTIONAL.get(self.base.op_type, ())} - {
            "ratio",
            "training_mode",
        }
        return {name for name, role in zip(self.base.input, formal, strict=False) if role in names}


def _array(value: object) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _values(items: Sequence[object]) -> tuple[np.ndarray, ...]:
    return tuple(_array(item) for item in items if item is not None and not isinstance(item, list))


def _nodes(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g.node)


def _is_control(node: NodeProto, inputs: set[str]) -> bool:
    """Whether a node is run as often as an input says, or for each sequence of a batch."""
    return (
        node.op_type == "SequenceMap"
        or (node.op_type == "Loop" and not inputs.isdisjoint(node.input[:2]))
        or (node.op_type == "Scan" and not node.input[0])
    )


def _reason(case: Any, base: NodeProto) -> str | None:
    """Why a test does not count: only what its operators and the types of its values say."""
    graph = case.model.graph
    nodes = list(_nodes(graph.node))
    inputs = [value.name for value in graph.input]
    types = [value.type for value in (*graph.input, *graph.output)]
    kinds = {kind.WhichOneof("value") for kind in types}
    strings = any(kind.tensor_type.elem_type == TensorProto.STRING for kind in types)
    given = [item for item in base.attribute if item.name != "activations"]
    strings = strings or any(
        item.strings or item.t.data_type == TensorProto.STRING for item in given
    )
    dropout = case.data_sets[0][0][1:] if base.op_type == "Dropout" else ()
    training = len(dropout) == 2 and all(
        bool(_array(item)) for item in dropout
    )  # a ratio, and the mode
    rules = {
        "control flow": any(_is_control(node, {*inputs}) for node in nodes) or base.op_type == "If",
        "sequence": "sequence_type" in kinds
        or any("Sequence" in node.op_type for node in nodes if node.op_type != "ReverseSequence"),
        "optional": "optional_type" in kinds
        or any(node.op_type.startswith("Optional") for node in nodes),
        "string": strings,
        "random numbers": any(node.op_type in _RANDOM for node in nodes) or training,
    }
    return next((reason for reason in REASONS if rules[reason]), None)


def quick_pool(slow: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """onnx's pooling loops over every window in Python, a minute for three tests of many windows;
    without padding numpy does the same.
    """

    def pool(
        padded: np.ndarray,
        x_shape: Sequence[int],
        kernel: Sequence[int],
        strides: Sequence[int],
        out_shape: Sequence[int],
        pooling_type: str,
        *rest: Any,
        p: int = 1,
        **options: Any,
    ) -> np.ndarray:
        unit = all(step == 1 for step in strides or (1,)) and not any(
            np.any(np.asarray(item) > 1) for item in rest if item is not None
        )
        if (
            padded.size < 10_000
            or not unit
            or padded.shape != tuple(x_shape)
            or any(np.any(item) for item in options.values())
        ):
            return slow(
                padded, x_shape, kernel, strides, out_shape, pooling_type, *rest, p=p, **options
            )
        windows = np.lib.stride_tricks.sliding_window_view(
            padded, tuple(kernel), tuple(range(2, padded.ndim))
        )
        axes = tuple(range(padded.ndim, windows.ndim))
        if pooling_type == "LPPOOL":
            return ((np.abs(windows) ** p).sum(axes) ** (1.0 / p)).astype(padded.dtype)
        return (windows.max(axes) if pooling_type == "MAX" else windows.mean(axes)).astype(
            padded.dtype
        )

    return pool


@contextmanager
def _quick_collection() -> Iterator[None]:
    """Spares the collection of its slow parts, and leaves numpy's random state as it was."""
    from onnx.backend.test.case import base
    from onnx.reference.ops import op_pool_common

    state = np.random.get_state()
    snippet = base.process_snippet
    slow = op_pool_common.pool
    quick = quick_pool(slow)
    holders = [
        module for module in list(sys.modules.values()) if getattr(module, "pool", None) is slow
    ]
    for module in holders:
        module.pool = quick  # type: ignore[attr-defined]
    base.process_snippet = lambda *_: (
        "",
        "",
    )  # reads the source of every test, for onnx's documentation
    try:
        yield
    finally:
        base.process_snippet = snippet
        for module in holders:
            module.pool = slow  # type: ignore[attr-defined]
        np.random.set_state(state)


@cache
def node_tests() -> list[NodeTest]:
    """Every node test of the installed onnx package, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        with _quick_collection():
            cases = collect_testcases(None)
    bases: dict[str, NodeProto] = {}
    actual = []
    for case in cases:
        assert case.model is not None and case.data_sets is not None
        (given, expected), *more = case.data_sets
        assert not more, case.name
        root, mark, _ = case.name.partition("_expanded")
        base = bases[root] if mark else bases.setdefault(case.name, case.model.graph.node[0])
        values = {"inputs": _values(given), "outputs": _values(expected)}
        test = NodeTest(
            name=case.name,
            model=case.model,
            rtol=case.rtol,
            atol=case.atol,
            left_out=_reason(case, base),
            base=base,
            **values,
        )
        actual.append(test)
    return actual
