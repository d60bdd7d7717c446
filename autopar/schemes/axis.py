"""A known scheme on one mesh axis: for every part of a model, the allowed splits.

A scheme is a table: for each part, sets of splits in the order of preference. An operator may
choose from the first set of which it offers anything (given the choices on the other axes); if it
offers nothing of any set, it is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Tensor
from autopar.planning.model.restrictions import Limits
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.candidates import strategies_of
from autopar.sharding.classes import FactorClass
from autopar.sharding.layout import Kind, Layout, Placement
from autopar.sharding.mesh import Mesh
from autopar.sharding.strategies import Option, Strategies

from .splits import Part, Profile, Profiles, Split, profiles_of

Bools = NDArray[np.bool_]
Splits = frozenset[Split]
ENOUGH = 0.6
"""Share of the work that must be split in a scheme's way for the scheme to bear its name."""


_DIMS = {
    Split.INNER: "inner dims",
    Split.HIDDEN: "hidden dim",
    Split.EXPERT: "experts",
    Split.RING: "keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisScheme:
    """A scheme on one axis.

    `prefer`: for a part (`Part.OTHER` for the rest) sets of splits, the preferred first. `needs`:
    parts of which enough must offer one of these splits, or the model cannot have the scheme.
    `has`: parts that must be in the model. `columns`: weights are split where that leaves no
    partial sum. `whole_heads`: heads are split where keys and values are split, too. `storage` of
    parameters: "whole", "split" on any dim that divides (norms and biases are free), or as they are
    "used".
    """

    name: str
    words: str
    prefer: Mapping[Part, tuple[Splits, ...]]
    needs: Mapping[Part, Splits] = field(default_factory=dict)
    has: frozenset[Part] = frozenset()
    columns: bool = False
    whole_heads: bool = False
    storage: str = "used"

    def good(self, profile: Profile) -> list[Bools]:
        """The options of an operator that each set allows, in the order of preference."""
        sets = self.prefer.get(profile.part, self.prefer[Part.OTHER])
        allowed = ~self.barred(profile)
        return [allowed & [s in wanted for s in profile.splits] for wanted in sets]

    def barred(self, profile: Profile) -> Bools:
        """The options of an operator that the scheme never takes."""
        barred = np.zeros(len(profile.splits), dtype=bool)
        if self.columns and profile.part in (Part.PRODUCT, Part.EXPERTS):
            barred |= profile.reduces
        if self.whole_heads and profile.part is Part.CORE:
            barred |= profile.uneven
        return barred

    def stores(self, tensor: Tensor, place: Placement, used: Collection[Placement]) -> bool:
        """Whether the scheme may store a parameter at `place`.

        `used`: the placements that operators read.
        """
        split = place.kind is Kind.SPLIT
        if self.storage == "used":
            return not split or place in used
        if self.storage != "split":
            return not split
        # Norms and biases have few bytes: gathering them may cost more than it saves.
        return split or len(tensor.shape) < 2

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits where every axis of the mesh has this scheme."""
        return axis_limits((self,) * len(mesh.axes), analysis, profiles_of(analysis), mesh)


def offered(
    by_axis: Sequence[AxisScheme | None], analysis: Analysis, profiles: Profiles, mesh: Mesh
) -> dict[str, bool]:
    """Whether each operator of which the schemes need an option offers one on this mesh."""
    needs = {part: _needed(by_axis, part) for part in Part if any(_needed(by_axis, part))}
    known: dict[Profile, bool] = {}
    offers = {}
    for name, profile in profiles.by_name.items():
        if profile.part in needs:
            if profile not in known:
                known[profile] = _offers(analysis.offers[name], profile, by_axis, mesh)
            offers[name] = known[profile]
    return offers


def lacking(
    by_axis: Sequence[AxisScheme | None], analysis: Analysis, profiles: Profiles, mesh: Mesh
) -> str | None:
    """The reason against these schemes on a mesh, or None.

    `ENOUGH` of each needed part must divide.
    """
    if _needs_hidden(by_axis) and not _has_hidden(analysis):
        return (
            "it splits the hidden dim, which a normalisation (layer norm, RMS norm) over features "
            "tells apart, and the model has none"
        )
    offers = offered(by_axis, analysis, profiles, mesh)
    for part in Part:
        wanted = _needed(by_axis, part)
        names = [name for name in offers if profiles.by_name[name].part is part]
        if not names and any(scheme is not None and part in scheme.has for scheme in by_axis):
            return f"the model has no {'attention' if part is Part.CORE else part}"
        work = {name: profiles.by_name[name].work for name in names}
        if sum(work[name] for name in names if offers[name]) < ENOUGH * sum(work.values()):
            short = next(name for name in names if not offers[name])
            ways = {
                axis.name: _words(part, splits)
                for axis, splits in zip(mesh.axes, wanted, strict=True)
                if splits and axis.size > 1
            }
            size = math.prod(axis.size for axis in mesh.axes if axis.name in ways)
            return (
                f"{short!r} cannot be split along its {' and '.join(dict.fromkeys(ways.values()))} "
                f"over {size} devices ({', '.join(ways)})"
            )
    return None


def _needs_hidden(by_axis: Sequence[AxisScheme | None]) -> bool:
    """Whether products are to be split along the hidden dim and no other."""
    return frozenset({Split.HIDDEN}) in _needed(by_axis, Part.PRODUCT)


def _has_hidden(analysis: Analysis) -> bool:
    return any(FactorClass.HIDDEN in classes for classes in analysis.classes.values())


def _needed(by_axis: Sequence[AxisScheme | None], part: Part) -> list[Splits | None]:
    """The needed splits of a part, by axis."""
    return [scheme.needs.get(part) if scheme is not None else None for scheme in by_axis]


def _words(part: Part, splits: Splits) -> str:
    heads = {Split.INNER: "heads"} if part is Part.CORE else {}
    return " or ".join(
        sorted(heads.get(split) or _DIMS.get(split, split.value) for split in splits)
    )


def _offers(
    offer: Offer, profile: Profile, by_axis: Sequence[AxisScheme | None], mesh: Mesh
) -> bool:
    """Whether some strategy has a split on every axis that the axis's scheme needs and takes."""
    choices = strategies_of(offer.rule, offer.options, mesh.shape).choices
    good = np.ones(len(choices), dtype=bool)
    for axis, scheme in enumerate(by_axis):
        splits = scheme.needs.get(profile.part) if scheme is not None else None
        if scheme is not None and splits and mesh.shape[axis] > 1:
            taken = ~scheme.barred(profile) & [split in splits for split in profile.splits]
            good &= taken[choices[:, axis]]
    return bool(good.any())


def axis_limits(
    by_axis: Sequence[AxisScheme | None], analysis: Analysis, profiles: Profiles, mesh: Mesh
) -> Limits:
    """The limits of a scheme for each axis of the mesh (None: the axis is free)."""
    schemes = [(axis, scheme) for axis, scheme in enumerate(by_axis) if scheme is not None]
    used = _used(by_axis, analysis, profiles, mesh)
    good: dict[tuple[Profile, int], list[Bools]] = {}

    def strategies(name: str, offer: Offer, candidates: Strategies) -> Bools:
        profile = profiles.by_name[name]
        allowed = np.ones(len(candidates.choices), dtype=bool)
        for axis, scheme in schemes:
            if (profile, axis) not in good:
                good[profile, axis] = scheme.good(profile)
            # The first set counts of which the axes before have left a strategy.
            for options in good[profile, axis]:
                here = allowed & options[candidates.choices[:, axis]]
                if here.any():
                    allowed = here
                    break
        return allowed

    def storage(tensor: Tensor, layouts: tuple[Layout, ...]) -> Bools:
        wanted = np.ones(len(layouts), dtype=bool)
        for axis, scheme in schemes:
            stored = [
                scheme.stores(tensor, layout[axis], used[axis][tensor.name]) for layout in layouts
            ]
            here = wanted & np.array(stored)
            if here.any():
                wanted = here
        return wanted

    return Limits(strategies=strategies, storage=storage)


def _used(
    by_axis: Sequence[AxisScheme | None], analysis: Analysis, profiles: Profiles, mesh: Mesh
) -> list[dict[str, set[Placement]]]:
    """The placements, by axis, in which the operators may use every parameter."""
    parameters = {tensor.name for tensor in analysis.graph.parameters}
    uses: list[dict[str, set[Placement]]] = [{name: set() for name in parameters} for _ in by_axis]
    known: dict[tuple[int, Profile, Offer], list[Option]] = {}
    for op in analysis.warm:
        places = [(place, name) for place, name in enumerate(op.inputs) if name in parameters]
        if not places:
            continue
        profile = profiles.by_name[op.name]
        offer = analysis.offers[op.name]
        for axis, scheme in enumerate(by_axis):
            if scheme is None or scheme.storage != "used":
                continue
            key = (axis, profile, offer)
            if key not in known:
                known[key] = _allowed(scheme, profile, offer, mesh.shape[axis])
            for place, name in places:
                uses[axis][name].update(option.inputs[place] for option in known[key])
    return uses


def _allowed(scheme: AxisScheme, profile: Profile, offer: Offer, size: int) -> list[Option]:
    """The options that a scheme allows an operator on an axis of that size, on its own."""
    choices = strategies_of(offer.rule, offer.options, (size,)).choices[:, 0]
    for mask in scheme.good(profile):
        options = [offer.options[choice] for choice in choices if mask[choice]]
        if options:
            return options
    return [offer.options[choice] for choice in choices]
