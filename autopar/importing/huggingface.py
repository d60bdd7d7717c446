"""The tensor-parallel plan of Hugging Face transformers: styles by module pattern, as restrictions of one mesh axis."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, unknown
from ..planning.limits import Limits
from ..printable import printable
from ..sharding.analysis import Analysis, Offer
from ..sharding.candidates import Option, Strategies
from ..sharding.layout import Kind
from ..sharding.mesh import Mesh
from ..sharding.rules import RULES
from .configuration import Configuration

SOURCE = "hf-tp-plan"
OUTPUT, INPUT, ROWS, COLUMNS = "output", "input", "rows", "columns"
STYLES: dict[str, tuple[str, int]] = {
    "colwise": (OUTPUT, 1), "colwise_gather_output": (OUTPUT, 1), "colwise_rep": (OUTPUT, 1), "packed_colwise": (OUTPUT, 2),
    "local_colwise": (OUTPUT, 1), "local_packed_colwise": (OUTPUT, 2), "rowwise": (INPUT, 1), "rowwise_split_input": (INPUT, 1),
    "rowwise_rep": (INPUT, 1), "local_rowwise": (INPUT, 1), "packed_rowwise": (INPUT, 2), "embedding_rowwise": (ROWS, 1),
    "embedding_colwise": (COLUMNS, 1),
}  # fmt: skip
"""The dim of a module's weight that a style splits, and the number of parts."""
WHOLE = ("replicate", "replicated", "replicated_with_grad_allreduce", "auto", "gather", "all_reduce", "sequence_parallel")
"""Styles that split no weight."""
# The output dim of a weight: [out, in] in torch's linear layers, [in, out] in products of ONNX and GPT-2.
_OUTPUT_DIM: Mapping[str, int] = {
    "aten.linear.default": 0, "onnx.MatMul": 1, "aten.matmul.default": 1, "aten.mm.default": 1, "aten.addmm.default": 1, "onnx.Gemm": 1,
}  # fmt: skip
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
Bools = NDArray[np.bool_]


def read_tensor_plan(data: Mapping[str, Any]) -> Configuration:
    """The plan in a parsed file; on how many devices, it does not say."""
    lost = []
    for pattern, style in data.items():
        if not isinstance(style, str) or (style not in STYLES and style not in WHOLE):
            raise UsageError(printable(f"{SOURCE}: {pattern}: " + unknown("style", style, (*STYLES, *WHOLE)), lines=False))
        if style == "sequence_parallel":
            lost.append(printable(f"{pattern}: values between the products are whole or split as is cheapest", lines=False))
    styles = {pattern: style for pattern, style in data.items() if style in STYLES}
    if not styles:
        raise UsageError(f"{SOURCE}: no module is split")
    return Configuration(source=SOURCE, data=1, styles=styles, lost=tuple(lost))


class Styles:
    """The restriction: weights are split on the innermost axis as the styles say, other weights are whole there."""

    def __init__(self, styles: Mapping[str, str], axis: str) -> None:
        self.styles, self.axis = styles, axis

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on this mesh; a pattern that means no weight of the model is an error."""
        axis = mesh.index(self.axis)
        weights = {tensor.name for tensor in analysis.graph.parameters}
        # A weight that several modules share has the name of the first: of the others only their operators tell.
        called = {op.name.rpartition("/")[0] for op in analysis.warm if weights.intersection(op.inputs)} - {""}
        modules = {name.rpartition(".")[0] for name in weights} | called
        unmatched = [pattern for pattern in self.styles if not any(means(pattern, module) for module in modules)]
        if unmatched:
            shown = printable(", ".join(unmatched[:5]), lines=False)
            some = ", ".join(sorted(modules)[:5])
            raise UsageError(f"{SOURCE}: no weight of the model is meant by {shown}; its modules are such as {some}")
        inputs = {op.name: op.inputs for op in analysis.warm}

        def strategies(name: str, offer: Offer, found: Strategies) -> Bools:
            held = [(i, weight) for i, weight in enumerate(inputs[name]) if weight in weights and len(offer.call.inputs[i].shape) > 1]
            if not held or len(held) == len(inputs[name]):
                return np.ones(len(found.choices), dtype=bool)
            place, weight = held[0]
            wanted = self.style_of(name.rpartition("/")[0]) or self.style_of(weight.rpartition(".")[0])
            allowed = np.array([_is(option, place, wanted, offer) for option in found.options])
            return np.asarray(allowed[found.choices[:, axis]])

        return Limits(strategies=strategies)

    def style_of(self, module: str) -> str | None:
        """The style of a module: its own name goes before patterns."""
        return next((style for pattern, style in sorted(self.styles.items(), key=_generality) if means(pattern, module)), None)


def _generality(pair: tuple[str, str]) -> int:
    return pair[0].count("*")


def means(pattern: str, module: str) -> bool:
    """Whether a pattern matches a module, with or without the name of its model; stars match numbers of layers.

    >>> means("layers.*.q", "layers.3.q"), means("model.layers.*.q", "layers.3.q"), means("layers.*.q", "model.layers.3.q")
    (True, True, True)
    """
    plain = _NUMBER.sub("*", module)
    pattern = _NUMBER.sub("*", pattern) if "*" in pattern else pattern
    return any(
        fnmatch.fnmatchcase(a, pattern) or a == pattern or a.endswith(f".{pattern}") or pattern.endswith(f".{a}") for a in (module, plain)
    )


def _is(option: Option, place: int, style: str | None, offer: Offer) -> bool:
    """Whether an option splits the weight at `place` as a style does; without a style, whether it leaves it whole."""
    placement = option.inputs[place]
    if style is None:
        return placement.kind is not Kind.SPLIT
    dim, parts = STYLES[style]
    kind = offer.call.operator.kind
    if dim in (ROWS, COLUMNS) or not RULES[kind].products:
        wanted = 0 if dim in (ROWS, OUTPUT) else 1
    elif kind not in _OUTPUT_DIM:
        raise UsageError(f"{SOURCE}: {offer.call.operator.name} of kind {kind} is no linear layer")
    else:
        wanted = _OUTPUT_DIM[kind] if dim == OUTPUT else 1 - _OUTPUT_DIM[kind]
    return placement.kind is Kind.SPLIT and placement.dim == wanted and (placement.parts == parts or parts == 1)
