"""Meanings of the factors of a model's operators for a reader: batch, sequence, heads, features.

Meanings start at the model's inputs (the dim that micro-batches cut is the batch, else dim 0; the
others are the sequence, or channels, height and width) and follow the rules' factors through the
graph. The outer part of a split feature dim is called heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.ir import Role, Tensor
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Kind, Placement
from autopar.sharding.notation import Rule
from autopar.sharding.rules import known_rule
from autopar.sharding.time_split import micro_batch_options

Dims = tuple[tuple[str, ...], ...]
_BATCH = ("batch",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meanings:
    """The words of all factors.

    `factors`: for every operator the words of each factor of its rule, outermost first. `weights`:
    tensors made of parameters alone.
    """

    factors: Mapping[str, tuple[tuple[str, ...], ...]]
    weights: frozenset[str]


def read_meanings(analysis: Analysis) -> Meanings:
    """Follow the meaning of every dim from the inputs through the rules."""
    graph = analysis.graph
    cut = _cut(analysis)
    dims: dict[str, Dims] = {
        name: _with_batch(_input_dims(graph.tensors[name]), cut.get(name)) for name in graph.inputs
    }
    weights = {tensor.name for tensor in graph.parameters}
    constants = {tensor.name for tensor in graph.tensors.values() if tensor.role is Role.CONSTANT}
    factors: dict[str, tuple[tuple[str, ...], ...]] = {}
    for op in graph.operators:
        warm = op.name not in analysis.cold
        rule = analysis.offers[op.name].rule if warm else known_rule(graph, op)
        if rule is None:
            _of_inputs(op.inputs, op.outputs, graph.tensors, dims)
            continue
        if warm and all(name in weights or name in constants for name in op.inputs):
            weights.update(op.outputs)
        of_factors = _factor_meanings(op.kind, rule, op.inputs, dims)
        if warm:
            of_factors = _all_named(op.kind, rule, of_factors)
            factors[op.name] = tuple(of_factors)
        for name, spelled in zip(op.outputs, rule.outputs, strict=True):
            if name not in weights:
                told = tuple(_joined(dim, rule, of_factors) for dim in spelled)
                dims[name] = told if warm else _with_batch(told, cut.get(name))
    return Meanings(factors=factors, weights=frozenset(weights))


def _cut(analysis: Analysis) -> Mapping[str, Placement]:
    """The placements of tensors on micro-batches, where there are any."""
    try:
        return micro_batch_options(analysis).placements
    except UsageError:
        return {}


def _with_batch(told: Dims, place: Placement | None) -> Dims:
    """The words of a tensor's dims with the batch where micro-batches cut it."""
    if place is None or place.kind is not Kind.SPLIT or place.parts > 1:
        return told
    words = list(told)
    # Steps that come before the samples are a sequence all the same.
    if _BATCH in words:
        words[words.index(_BATCH)] = words[place.dim]
    words[place.dim] = _BATCH
    return tuple(words)


def _joined(dim: tuple[int, ...], rule: Rule, meanings: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The words of a compound dim.

    Factors of size 1, such as the batch of one sample, are left out.
    """
    told = [factor for factor in dim if rule.factors[factor].size > 1] or dim
    return tuple(word for factor in told for word in meanings[factor])


def _input_dims(tensor: Tensor) -> Dims:
    names: tuple[str, ...] = ("batch", "channels", "height", "width")
    if not tensor.is_float or len(tensor.shape) < 3:
        names = ("batch", "features" if tensor.is_float else "sequence")
    elif len(tensor.shape) == 3:
        names = ("batch", "sequence", "features")
    return tuple((names[min(i, len(names) - 1)],) for i in range(len(tensor.shape)))


def _of_inputs(
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    tensors: Mapping[str, Tensor],
    dims: dict[str, Dims],
) -> None:
    """Operators without a rule (on the inputs alone) keep the meanings of dims that stay.

    Pictures that are flattened, or a part of a sequence, have the batch in front as before.
    """
    for name in outputs:
        shape = tensors[name].shape
        for source in inputs:
            before = tensors[source].shape
            if source not in dims or name in dims or before[:1] != shape[:1]:
                continue
            told = dims[source]
            if len(before) != len(shape):
                stays = sum(
                    1 for _ in itertools.takewhile(_equal, zip(before, shape, strict=False))
                )
                told = (*told[:stays], *[("features",)] * (len(shape) - stays))
            dims[name] = told


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _factor_meanings(
    kind: str, rule: Rule, inputs: tuple[str, ...], dims: Mapping[str, Dims]
) -> list[tuple[str, ...]]:
    """The words of each factor, from inputs with a meaning."""
    rest = _rest(kind)
    meanings: list[tuple[str, ...]] = [() for _ in rule.factors]
    for name, spelled in zip(inputs, rule.inputs, strict=True):
        for dim, words in zip(spelled, dims.get(name, ()), strict=False):
            for factor, part in zip(dim, _spread(words, len(dim), rest), strict=True):
                meanings[factor] = meanings[factor] or part
    for index, split in enumerate(rule.factors):
        for partner in split.partners:
            meanings[index] = meanings[index] or meanings[partner]
    return meanings


def _all_named(kind: str, rule: Rule, meanings: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The words of each factor: where no input has any, those of the operator's kind."""
    rest = _rest(kind)
    named = [("vocabulary",) if factor.special == "masked" else (rest,) for factor in rule.factors]
    if "embedding_bag" in kind:
        # Bags are dims of the result alone: which indices are in one is data.
        named[rule.outputs[0][0][0]] = _BATCH
    return [words or other for words, other in zip(meanings, named, strict=True)]


def _rest(kind: str) -> str:
    return "channels" if "conv" in kind.lower() else "features"


def _spread(words: tuple[str, ...], count: int, rest: str) -> list[tuple[str, ...]]:
    """The words of a dim over the `count` factors that it is read as.

    >>> _spread(("features",), 2, "features"), _spread(("batch", "sequence"), 1, "features")
    ([('heads',), ('features',)], [('batch', 'sequence')])
    """
    if count < 2 or not words:
        return [words] * count
    if len(words) == count:
        return [(word,) for word in words]
    first = "heads" if words == ("features",) else words[0]
    return [(first,), *[(words[-1] if len(words) > 1 else rest,)] * (count - 1)]
