"""Strategies in words: what a split factor means to a reader, and the schemes that people know by name.

Meanings start at the model's inputs (dim 0 is the batch, then the sequence, or channels, height and width) and follow the
rules' factors through the graph; the outer part of a split feature dim is called heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import Role, Tensor
from ..sharding.analysis import Analysis, Offer
from ..sharding.candidates import Option
from ..sharding.layout import Kind, parse_layout
from ..sharding.rules import RULES

if TYPE_CHECKING:
    from .account import Account, Move, OperatorAccount

Dims = tuple[tuple[str, ...], ...]
COLUMN, ROW, EXPERT, WHOLE, PARTIAL = "column-parallel", "row-parallel", "expert-parallel", "replicated", "partial sum passed on"
EXPERT_WORDS = frozenset({"dispatch", "masked"})
SPATIAL = "spatial-parallel (halo exchange)"
ZERO = "ZeRO-3 storage"
COLLECTIVES = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "send": "send",
}  # fmt: skip
CONTEXT = "context-parallel (ring attention)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meanings:
    """`factors`: for every operator a word for each factor of its rule; `weights`: tensors made of parameters alone."""

    factors: Mapping[str, tuple[str, ...]]
    weights: frozenset[str]


def read_meanings(analysis: Analysis) -> Meanings:
    """Follow the meaning of every dim from the inputs through the rules."""
    graph = analysis.graph
    dims: dict[str, Dims] = {name: _input_dims(graph.tensors[name]) for name in graph.inputs}
    weights = {tensor.name for tensor in graph.parameters}
    constants = {tensor.name for tensor in graph.tensors.values() if tensor.role is Role.CONSTANT}
    factors: dict[str, tuple[str, ...]] = {}
    for op in graph.operators:
        if op.name in analysis.cold:
            _same_shape(op.inputs, op.outputs, graph.tensors, dims)
            continue
        if all(name in weights or name in constants for name in op.inputs):
            weights.update(op.outputs)
        offer = analysis.offers[op.name]
        found = _factor_meanings(offer, op.inputs, dims)
        for name, spelled in zip(op.outputs, offer.rule.outputs, strict=True):
            if name not in weights:
                dims[name] = tuple(tuple(word for factor in dim for word in found[factor]) for dim in spelled)
        factors[op.name] = tuple(words[0] for words in found)
    return Meanings(factors=factors, weights=frozenset(weights))


def _input_dims(tensor: Tensor) -> Dims:
    names: tuple[str, ...] = ("batch", "channels", "height", "width")
    if not tensor.is_float or len(tensor.shape) < 3:
        names = ("batch", "features" if tensor.is_float else "sequence")
    elif len(tensor.shape) == 3:
        names = ("batch", "sequence", "features")
    return tuple((names[min(i, len(names) - 1)],) for i in range(len(tensor.shape)))


def _same_shape(inputs: tuple[str, ...], outputs: tuple[str, ...], tensors: Mapping[str, Tensor], dims: dict[str, Dims]) -> None:
    """Operators without a rule (on the inputs alone) keep the meanings where the shape stays."""
    for name in outputs:
        for source in inputs:
            if source in dims and tensors[source].shape == tensors[name].shape:
                dims[name] = dims[source]


def _factor_meanings(offer: Offer, inputs: tuple[str, ...], dims: Mapping[str, Dims]) -> list[tuple[str, ...]]:
    """The words of each factor: from the inputs that have a meaning, else from what the operator is."""
    rest = "channels" if "conv" in offer.call.operator.kind.lower() else "features"
    found: list[tuple[str, ...]] = [() for _ in offer.rule.factors]
    for name, spelled in zip(inputs, offer.rule.inputs, strict=True):
        for dim, words in zip(spelled, dims.get(name, ()), strict=False):
            for factor, part in zip(dim, _spread(words, len(dim), rest), strict=True):
                found[factor] = found[factor] or part
    for index, split in enumerate(offer.rule.factors):
        for partner in split.partners:
            found[index] = found[index] or found[partner]
    named = [("vocabulary",) if factor.special == "masked" else (rest,) for factor in offer.rule.factors]
    return [words or other for words, other in zip(found, named, strict=True)]


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


def option_words(name: str, offer: Offer, option: Option, inputs: tuple[str, ...], meanings: Meanings) -> str:
    """What an operator does on one axis."""
    if option.factor < 0:
        return PARTIAL if any(p.kind is Kind.PARTIAL for p in option.outputs) else WHOLE
    if option.communication == "halo":
        return SPATIAL
    word = meanings.factors[name][option.factor]
    entry = RULES[offer.call.operator.kind]
    held = [tensor in meanings.weights for tensor in inputs]
    split = [placement.kind is Kind.SPLIT for placement in option.inputs]
    if EXPERT_WORDS & {option.communication, offer.rule.factors[option.factor].special} and entry.products:
        return EXPERT
    if entry.products and any(held) and not all(held):
        by_weight = any(s for s, h in zip(split, held, strict=True) if h)
        by_value = any(s for s, h in zip(split, held, strict=True) if not h)
        kept = any(p.kind is Kind.SPLIT for p in option.outputs)
        if by_weight:
            return (EXPERT if by_value else COLUMN) if kept else ROW
    if option.communication == "ring":
        return CONTEXT
    if offer.rule.factors[option.factor].special == "masked" or option.communication == "vocabulary":
        return "vocabulary-parallel"
    return word if option.communication is None else f"{word} ({option.communication})"


def strategy_words(account: OperatorAccount, whole: Account) -> tuple[str, ...]:
    """What an operator does on each mesh axis."""
    offer = whole.analysis.offers[account.operator.name]
    inputs = account.operator.inputs
    return tuple(option_words(account.operator.name, offer, option, inputs, whole.meanings) for option in account.decision.options)


def phrase(account: OperatorAccount, whole: Account, followers: Sequence[OperatorAccount] = ()) -> str:
    """The strategy of an operator as a sentence would say it; the reductions of its `followers` (its bias) count as its own."""
    members = [account, *followers]
    over: dict[str, list[int]] = {}
    for axis, word in enumerate(strategy_words(account, whole)):
        over.setdefault(word, []).append(axis)
    parts = [_part(word, axes, members, whole) for word, axes in over.items() if word != WHOLE] or [WHOLE]
    stored = sorted({axis for move in account.before for axis in gathered(move, whole)})
    if stored:
        parts.append(f"{ZERO} over {', '.join(whole.axes[axis] for axis in stored)}")
    return "; ".join(parts)


def _part(word: str, axes: list[int], members: Sequence[OperatorAccount], whole: Account) -> str:
    moves = [move for account in members for move in account.after]
    kinds = {c.kind for move in moves for c, _ in move.collectives if c.phase == "forward" and c.axis in axes}
    tail = f" ({', '.join(COLLECTIVES[kind] for kind in sorted(kinds))})" if kinds else ""
    return f"{word} over {', '.join(whole.axes[axis] for axis in axes)}{tail}"


def gathered(move: Move, whole: Account) -> list[int]:
    """Axes on which a parameter is stored split and gathered before use."""
    if move.tensor not in whole.plan.parameters:
        return []
    ends = enumerate(zip(move.chain[0], move.chain[-1], strict=True))
    return [axis for axis, (stored, used) in ends if stored.kind is Kind.SPLIT and used.kind in (Kind.REPLICATED, Kind.BROADCAST)]


def scheme_words(whole: Account) -> dict[str, str]:
    """For each mesh axis the scheme that people would call it by, from the operators that multiply by a weight."""
    words = {account.operator.name: strategy_words(account, whole) for account in whole.operators}
    products = [account.operator.name for account in whole.operators if is_product(account, whole)]
    tensors = whole.analysis.graph.tensors
    moves = {(move.tensor, axis) for account in whole.operators for move in account.before for axis in gathered(move, whole)}
    total = sum(tensor.bytes for tensor in whole.analysis.graph.parameters)
    names = {}
    for axis, name in enumerate(whole.axes):
        names[name] = _scheme(Counter(words[op][axis] for op in products or words), Counter(found[axis] for found in words.values()))
        if 2 * sum(tensors[tensor].bytes for tensor, on in moves if on == axis) > total:
            names[name] += f", {ZERO}"
    return names


def idle_axes(whole: Account) -> list[str]:
    """Axes of several devices on which nothing is split, so that these devices repeat each other's work."""
    used = {axis for account in whole.operators for axis, option in enumerate(account.decision.options) if option.factor >= 0}
    layouts = [parse_layout(parameter.storage) for parameter in whole.plan.parameters.values()]
    used |= {axis for layout in layouts for axis, placement in enumerate(layout) if placement.kind is Kind.SPLIT}
    return [axis.name for index, axis in enumerate(whole.plan.mesh) if axis.size > 1 and index not in used]


def is_product(account: OperatorAccount, whole: Account) -> bool:
    """Whether the operator multiplies by a weight."""
    held = [name in whole.meanings.weights for name in account.operator.inputs]
    return bool(RULES[account.operator.kind].products) and any(held) and not all(held)


def _scheme(counts: Counter[str], others: Counter[str]) -> str:
    """One name for what the weighted products do on an axis; `others` counts all operators."""
    names = {"batch": "data parallel", "sequence": "sequence parallel", EXPERT: "expert parallel"}
    names |= {COLUMN: "tensor parallel", ROW: "tensor parallel"} | dict.fromkeys((SPATIAL, "height", "width"), "spatial parallel")
    found: Counter[str] = Counter()
    for word, count in counts.items():
        found[names.get(word, "not split" if word in (WHOLE, PARTIAL) else f"{word} split")] += count
    if not found:
        return "not split"
    best = sorted(found, key=lambda name: (-found[name], name))
    total = sum(found.values())
    most = found[best[0]]
    if best[0] == "tensor parallel" and others["sequence"]:
        best[0] = "tensor parallel (sequence split between)"
    if best[0] == "sequence parallel" and others[CONTEXT]:
        best[0] = "context parallel (ring attention)"
    return best[0] if most >= 0.7 * total or len(best) == 1 else f"mixed: {', '.join(best)}"
