"""The `DistributedConfig` of Hugging Face transformers, or the dict of styles in it (`tp_plan`).

Styles by module pattern become restrictions of one mesh axis.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError, unknown
from autopar.integrations.convert.splittable import OUTPUT_DIM
from autopar.planning.model.restrictions import Limits
from autopar.printable import printable
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import Kind
from autopar.sharding.mesh import Mesh
from autopar.sharding.rules import RULES
from autopar.sharding.strategies import Option, Strategies

from .configuration import Configuration
from .python import parsed

SOURCE = "transformers"
CLASS = "DistributedConfig"
COPIES = "dp_replicate_size"
WHOLE_BETWEEN = "keep_full_weight"
"""The style of FSDP's units whose parameters stay whole between the passes."""
OUTPUT = "output"
INPUT = "input"
ROWS = "rows"
COLUMNS = "columns"
STYLES: dict[str, tuple[str, int]] = {
    "colwise": (OUTPUT, 1),
    "colwise_gather_output": (OUTPUT, 1),
    "colwise_rep": (OUTPUT, 1),
    "packed_colwise": (OUTPUT, 2),
    "local_colwise": (OUTPUT, 1),
    "local_packed_colwise": (OUTPUT, 2),
    "rowwise": (INPUT, 1),
    "rowwise_split_input": (INPUT, 1),
    "rowwise_rep": (INPUT, 1),
    "local_rowwise": (INPUT, 1),
    "packed_rowwise": (INPUT, 2),
    "embedding_rowwise": (ROWS, 1),
    "embedding_colwise": (COLUMNS, 1),
}
"""The dim of a module's weight that a style splits, and the number of parts."""
WHOLE = (
    "replicate",
    "replicated",
    "replicated_with_grad_allreduce",
    "auto",
    "gather",
    "all_reduce",
    "sequence_parallel",
)
"""Styles that split no weight."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
Bools = NDArray[np.bool_]


def read_distributed_config(path: Path, text: str, given: Mapping[str, str]) -> Configuration:
    """The configuration of the only call of `DistributedConfig` in a file of Python."""
    calls = [
        node
        for node in ast.walk(parsed(path, text))
        if isinstance(node, ast.Call) and _last_name(node.func) == CLASS
    ]
    if len(calls) != 1:
        raise UsageError(f"{path}: {len(calls)} calls of {CLASS} in it, not one")
    fields: dict[str, Any] = {}
    for keyword in calls[0].keywords:
        try:
            fields[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            name = printable(str(keyword.arg), lines=False)
            raise UsageError(f"{path}, line {keyword.lineno}: {name} is no plain value") from error
    return _configuration(path, fields)


def _last_name(function: ast.expr) -> str:
    """The name of a function, without the modules before it."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _configuration(path: Path, fields: Mapping[str, Any]) -> Configuration:
    degrees = {name: fields.get(name) or 1 for name in ("tp_size", "fsdp_size", COPIES)}
    for name, size in degrees.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(f"{path}: {name} is {printable(repr(size), lines=False)}, no degree")
    styles = fields.get("tp_plan") or {}
    units = fields.get("fsdp_plan") or {}
    if not isinstance(styles, dict) or not isinstance(units, dict):
        raise UsageError(f"{path}: tp_plan and fsdp_plan are no dicts of styles")
    tensor, shards, copies = degrees.values()
    stays = bool(units) and all(style == WHOLE_BETWEEN for style in units.values())
    zero = None
    if shards > 1:
        zero = 2 if stays else 3
    sharded = Configuration(
        source=SOURCE,
        # Without shards, copies are those of the training's own data parallelism.
        data=shards * copies if shards > 1 else None,
        shards=shards if shards > 1 else None,
        zero=zero,
        tensor=tensor,
    )
    if not styles:
        said = "tp_plan is the model's own: weights are split as Megatron does"
        return replace(sharded, lost=(said,) if tensor > 1 else ())
    split = read_tensor_plan(styles)
    return replace(sharded, styles=split.styles, lost=split.lost)


def read_tensor_plan(data: Mapping[str, Any]) -> Configuration:
    """The styles in a parsed file, which does not say for how many devices it is."""
    lost = []
    for pattern, style in data.items():
        if not isinstance(style, str) or (style not in STYLES and style not in WHOLE):
            raise UsageError(
                printable(
                    f"{SOURCE}: {pattern}: " + unknown("style", style, (*STYLES, *WHOLE)),
                    lines=False,
                )
            )
        if style == "sequence_parallel":
            lost.append(
                printable(
                    f"{pattern}: values between the products are whole or split as is cheapest",
                    lines=False,
                )
            )
    styles = {pattern: style for pattern, style in data.items() if style in STYLES}
    if not styles:
        raise UsageError(f"{SOURCE}: no module is split")
    # transformers splits over all devices that it is started on, so nothing is left for the batch.
    return Configuration(source=SOURCE, data=1, styles=styles, lost=tuple(lost))


class Styles:
    """The restriction of weights on the innermost axis: split as the styles say, or whole."""

    def __init__(self, styles: Mapping[str, str], axis: str) -> None:
        self.styles = styles
        self.axis = axis

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on this mesh; a pattern that means no weight of the model is an error."""
        axis = mesh.index(self.axis)
        weights = {tensor.name for tensor in analysis.graph.parameters}
        self._require_matches(analysis, weights)
        inputs = {op.name: op.inputs for op in analysis.warm}

        def strategies(name: str, offer: Offer, candidates: Strategies) -> Bools:
            held = [
                (place, weight)
                for place, weight in enumerate(inputs[name])
                if weight in weights and len(offer.call.inputs[place].shape) > 1
            ]
            if not held or len(held) == len(inputs[name]):
                return np.ones(len(candidates.choices), dtype=bool)
            place, weight = held[0]
            style = self.style_of(_above(name, "/")) or self.style_of(_above(weight, "."))
            allowed = np.array([_is(option, place, style, offer) for option in candidates.options])
            return np.asarray(allowed[candidates.choices[:, axis]])

        return Limits(strategies=strategies)

    def _require_matches(self, analysis: Analysis, weights: set[str]) -> None:
        """Raise a `UsageError` that names the patterns without a module that has weights."""
        # A weight that several modules share has the name of the first: only operators tell the
        # names of the others.
        called = {_above(op.name, "/") for op in analysis.warm if weights.intersection(op.inputs)}
        modules = {_above(name, ".") for name in weights} | called - {""}
        unmatched = [
            pattern
            for pattern in self.styles
            if not any(means(pattern, module) for module in modules)
        ]
        if unmatched:
            shown = printable(", ".join(unmatched[:5]), lines=False)
            some = ", ".join(sorted(modules)[:5])
            raise UsageError(
                f"{SOURCE}: no weight of the model is meant by {shown}; its modules are such as "
                f"{some}"
            )

    def style_of(self, module: str) -> str | None:
        """The style of a module: its own name goes before patterns."""
        return next(
            (
                style
                for pattern, style in sorted(self.styles.items(), key=_generality)
                if means(pattern, module)
            ),
            None,
        )


def _above(name: str, separator: str) -> str:
    """The module that a name lies in."""
    return name.rpartition(separator)[0]


def _generality(pair: tuple[str, str]) -> int:
    return pair[0].count("*")


def means(pattern: str, module: str) -> bool:
    """Whether a pattern matches a module, with or without the name of its model.

    Stars match numbers of layers.

    >>> means("layers.*.q", "layers.3.q"), means("model.layers.*.q", "layers.3.q")
    (True, True)
    >>> means("layers.*.q", "model.layers.3.q")
    True
    """
    if "*" in pattern:
        pattern = _NUMBER.sub("*", pattern)
    return any(
        name == pattern
        or name.endswith(f".{pattern}")
        or pattern.endswith(f".{name}")
        or fnmatch.fnmatchcase(name, pattern)
        for name in (module, _NUMBER.sub("*", module))
    )


def _is(option: Option, place: int, style: str | None, offer: Offer) -> bool:
    """Whether an option splits the weight at `place` as a style does.

    Without a style the weight must be left whole.
    """
    placement = option.inputs[place]
    if style is None:
        return placement.kind is not Kind.SPLIT
    dim, parts = STYLES[style]
    operator = offer.call.operator
    output = 0
    if RULES[operator.kind].products and dim in (OUTPUT, INPUT):
        if operator.kind not in OUTPUT_DIM:
            raise UsageError(
                f"{SOURCE}: {operator.name} of kind {operator.kind} is no linear layer"
            )
        output = OUTPUT_DIM[operator.kind]
    wanted = output if dim in (ROWS, OUTPUT) else 1 - output
    if placement.kind is not Kind.SPLIT or placement.dim != wanted:
        return False
    return parts in (1, placement.parts)
