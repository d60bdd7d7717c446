"""The products of a model that stay whole for a target where weights are split, by their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.integrations.convert.splittable import Owners, Splittable
from autopar.ir import Operator
from autopar.schemes.splits import Part, Profiles, Split, profiles_of
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Kind

WEIGHED = (Part.PRODUCT, Part.EXPERTS)
MULTIPLIED = (*WEIGHED, Part.CORE)


def whole_products(analysis: Analysis, known: Splittable) -> frozenset[str]:
    """The names of products, and of look-ups in tables, that stay whole.

    The target does not split these. Where it splits by module, nothing slices a value on its way
    between modules: products between which features or heads travel are split together, so one
    that is whole, or a value on their way that only slicing splits, keeps all of them whole.
    """
    profiles = profiles_of(analysis)
    whole = set(_not_taken(analysis, profiles, known))
    if not known.modules:
        return frozenset(whole)
    makers = _Makers(
        analysis=analysis,
        profiles=profiles,
        by_tensor={name: op for op in analysis.warm for name in op.outputs},
        not_taken=frozenset(whole),
        gathers=known.gathers,
    )
    groups = [
        (made | {op.name}, is_sliced)
        for op in analysis.warm
        if profiles.by_name[op.name].part in MULTIPLIED
        for made, is_sliced in [makers.of(op)]
        if made or is_sliced
    ]
    # A weight that several modules share is split by all of them.
    groups += [(names, False) for names in _sharing(analysis, profiles)]
    size = -1
    while size != len(whole):
        size = len(whole)
        for names, is_sliced in groups:
            if is_sliced or names & whole:
                whole |= names
    return frozenset(whole)


def _sharing(analysis: Analysis, profiles: Profiles) -> list[set[str]]:
    """The products and look-ups that read one parameter, where these are several."""
    parameters = {tensor.name for tensor in analysis.graph.parameters}
    readers: dict[str, set[str]] = {}
    for op in analysis.warm:
        if profiles.by_name[op.name].part in (*WEIGHED, Part.LOOKUP):
            for name in parameters & {*op.inputs}:
                readers.setdefault(name, set()).add(op.name)
    return [names for names in readers.values() if len(names) > 1]


def _not_taken(analysis: Analysis, profiles: Profiles, known: Splittable) -> Iterator[str]:
    parameters = {tensor.name for tensor in analysis.graph.parameters}
    owners = Owners.of(op.name for op in analysis.warm)
    for op in analysis.warm:
        part = profiles.by_name[op.name].part
        held = [name for name in op.inputs if name in parameters]
        taken = True
        if part in WEIGHED:
            taken = known.takes(op.name, op.kind, held, owners)
        elif part is Part.LOOKUP:
            taken = known.looks_up(op.kind)
        if not taken:
            yield op.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Makers:
    """The ways back from products to those whose features or heads they read.

    `by_tensor`: the operators that the search places. `not_taken`: those that no target splits.
    `gathers`: look-ups hand on whole rows.
    """

    analysis: Analysis
    profiles: Profiles
    by_tensor: dict[str, Operator]
    not_taken: frozenset[str]
    gathers: bool

    def of(self, product: Operator) -> tuple[set[str], bool]:
        """The products before one, and whether some value on the way there would be sliced."""
        made = set[str]()
        is_sliced = False
        seen = {product.name}
        ahead = list(self._split(product))
        if self._part(product) in WEIGHED:
            # Its own weight is split by the module.
            ahead = [name for name in ahead if name not in self.profiles.roots]
        while ahead:
            name = ahead.pop()
            maker = self.by_tensor.get(name)
            if maker is None or name in self.profiles.roots:
                is_sliced = True
            elif self._part(maker) in MULTIPLIED:
                made.add(maker.name)
            elif self._part(maker) is Part.LOOKUP:
                is_sliced |= self.gathers or maker.name in self.not_taken
            elif maker.name not in seen:
                seen.add(maker.name)
                ahead += self._split(maker)
        return made, is_sliced

    def _part(self, op: Operator) -> Part:
        return self.profiles.by_name[op.name].part

    def _split(self, op: Operator) -> Iterator[str]:
        """The inputs that are split where an operator splits heads or features."""
        splits = self.profiles.by_name[op.name].splits
        for option, split in zip(self.analysis.offers[op.name].options, splits, strict=True):
            if split is Split.INNER:
                for name, place in zip(op.inputs, option.inputs, strict=True):
                    if place.kind is Kind.SPLIT:
                        yield name
