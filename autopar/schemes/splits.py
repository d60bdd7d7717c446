"""The split of every option of every operator, in the terms of schemes: rows, weights, experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from autopar.ir import Operator
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.classes import FactorClass
from autopar.sharding.layout import Kind
from autopar.sharding.model_flops import multiply_adds
from autopar.sharding.rules import RULES
from autopar.sharding.strategies import Option

from .meanings import Meanings, read_meanings


class Split(StrEnum):
    """The dim that an option splits on its axis; the last three split nothing."""

    BATCH = "batch"
    SEQUENCE = "sequence"
    SPACE = "space"
    INNER = "inner"
    HIDDEN = "hidden"
    EXPERT = "expert"
    RING = "ring"
    WHOLE = "whole"
    SHARE = "share"
    PARTIAL = "partial"


class Part(StrEnum):
    """An operator's part in a model.

    `PRODUCT`: a product of a value with a weight. `EXPERTS`: such a product with the weights of
    several experts. `CORE`: a product of two values, as in attention. `LOOKUP`: a look-up of rows
    in a table. `WEIGHT`: an operator on parameters alone. `FIXED`: a product that is not to be
    split otherwise than in rows, for reasons outside the model (`Profiles.fixing`).
    """

    PRODUCT = "product"
    EXPERTS = "experts"
    CORE = "core"
    LOOKUP = "lookup"
    WEIGHT = "weight"
    FIXED = "fixed"
    OTHER = "other"


ROW_WORDS = frozenset({"batch", "sequence", "height", "width"})
"""Meanings of factors over rows.

Such a factor is none of a weight, even where a view ties it to a weight's dim.
"""


ANALYSES = 32
"""The analyses of which profiles are remembered: as many as one model has micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """An operator as schemes see it: the split of each option, and what the operator multiplies.

    Operators that are alike share a profile. Profiles are compared as objects, so that they are
    cheap keys. `reduces`: whether an option leaves partial sums. `uneven`: whether it splits one of
    the first two inputs, as query heads beyond the number of key-value heads. `work`:
    multiply-adds.
    """

    part: Part
    splits: tuple[Split, ...]
    reduces: tuple[bool, ...]
    uneven: tuple[bool, ...]
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """The profiles of the operators in the search, by name.

    `roots`: the parameters that a weight is made of.
    """

    by_name: Mapping[str, Profile]
    roots: Mapping[str, tuple[str, ...]]

    def fixing(self, names: Collection[str]) -> Profiles:
        """The profiles, with those of the named products `Part.FIXED`."""
        fixed: dict[Profile, Profile] = {}
        by_name = dict(self.by_name)
        for name in names:
            profile = by_name.get(name)
            if profile is not None:
                by_name[name] = fixed.setdefault(profile, replace(profile, part=Part.FIXED))
        return replace(self, by_name=by_name)


@functools.lru_cache(maxsize=ANALYSES)
def profiles_of(analysis: Analysis) -> Profiles:
    """Read the parts and the splits of all operators."""
    meanings = read_meanings(analysis)
    roots: dict[str, tuple[str, ...]] = {
        tensor.name: (tensor.name,) for tensor in analysis.graph.parameters
    }
    known: dict[object, Profile] = {}
    profiles = {}
    for op in analysis.warm:
        offer = analysis.offers[op.name]
        held = tuple(name in meanings.weights for name in op.inputs)
        key = (offer, held, analysis.classes[op.name], meanings.factors[op.name])
        if key not in known:
            known[key] = _profile(op, offer, held, analysis.classes[op.name], meanings)
        profiles[op.name] = known[key]
        if known[key].part is Part.WEIGHT:
            made = tuple(dict.fromkeys(root for name in op.inputs for root in roots.get(name, ())))
            roots.update(dict.fromkeys(op.outputs, made))
    return Profiles(by_name=profiles, roots=roots)


def _profile(
    op: Operator,
    offer: Offer,
    held: tuple[bool, ...],
    classes: tuple[FactorClass, ...],
    meanings: Meanings,
) -> Profile:
    words = meanings.factors[op.name]
    weighed = {
        f
        for dims, weight in zip(offer.rule.inputs, held, strict=True)
        if weight
        for dim in dims
        for f in dim
    }
    splits = tuple(_split(offer, option, classes, words, weighed) for option in offer.options)
    reduces = tuple(
        option.factor >= 0 and any(p.kind is Kind.PARTIAL for p in option.outputs)
        for option in offer.options
    )
    return Profile(
        part=_part(offer, held, classes, splits),
        splits=splits,
        reduces=reduces,
        uneven=tuple(
            len({place.kind is Kind.SPLIT for place in option.inputs[:2]}) > 1
            for option in offer.options
        ),
        work=_work(op, offer),
    )


def _work(op: Operator, offer: Offer) -> float:
    """The multiply-adds of an operator, or else the product of all its factors."""
    return multiply_adds(op, offer) or float(
        math.prod(factor.size for factor in offer.rule.factors)
    )


def _part(
    offer: Offer,
    held: tuple[bool, ...],
    classes: tuple[FactorClass, ...],
    splits: tuple[Split, ...],
) -> Part:
    if held and all(held):
        return Part.WEIGHT
    if RULES[offer.call.operator.kind].products:
        # A vector, as of the sinks of an attention, is no weight that values are multiplied with.
        tensors = zip(held, offer.call.inputs, strict=True)
        if any(of_model and len(tensor.shape) > 1 for of_model, tensor in tensors):
            return Part.EXPERTS if Split.EXPERT in splits else Part.PRODUCT
        return Part.CORE if FactorClass.INNER in classes else Part.OTHER
    looks_up = any(factor.special == "masked" for factor in offer.rule.factors)
    return Part.LOOKUP if looks_up and any(held) else Part.OTHER


def _split(
    offer: Offer,
    option: Option,
    classes: tuple[FactorClass, ...],
    words: tuple[tuple[str, ...], ...],
    weighed: set[int],
) -> Split:
    if option.factor < 0:
        if any(placement.kind is Kind.PARTIAL for placement in option.outputs):
            return Split.PARTIAL
        return Split.SHARE if option.name == "B" else Split.WHOLE
    if option.communication in ("ring", "halo"):
        return Split.RING if option.communication == "ring" else Split.SPACE
    if offer.way_of_rows(option):
        return Split.EXPERT
    split = classes[option.factor]
    if split is FactorClass.EXPERT and option.parts == 1:
        return Split.EXPERT
    word = _meaning(words[option.factor], option.parts)
    if option.factor in weighed or word not in ROW_WORDS:
        if split is FactorClass.INNER:
            return Split.INNER
        if split is FactorClass.HIDDEN:
            return Split.HIDDEN
    if word in ("height", "width"):
        return Split.SPACE
    return Split.BATCH if word == "batch" else Split.SEQUENCE


def _meaning(words: tuple[str, ...], parts: int) -> str:
    """The word of the dim that is split: of a compound dim in `parts` parts, the second one."""
    if parts == 1:
        return words[0]
    return words[1] if len(words) > 1 else "sequence"
