"""The name of a plan's scheme: of each mesh axis by the split of most work, and of the whole plan.

The products of weights vote, each with its multiply-adds. The split that `ENOUGH` of them have on
an axis names it:

    batch       data; zero1, zero2 or zero3 where most parameters are stored split and used whole
    sequence    ulysses where attention splits heads, context where it splits the sequence,
                else sequence
    inner       megatron-sp where the rows between the products are split, else megatron
    hidden      hidden (the dim that joins the layers)
    columns     inner and hidden, along the outputs alone
    experts     expert where everything else splits the batch, else expert+ what the rest does
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import PlanError, UsageError, unknown
from autopar.plan import Plan
from autopar.plan_parts import AxisSpec
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import Kind, parse_layout
from autopar.sharding.schedule import zero_stage
from autopar.sharding.strategies import Option

from .axis import ENOUGH
from .known import scheme_named
from .recipes import recipe_of
from .splits import Part, Profiles, Split, profiles_of
from .wording import PRODUCT, UNUSED, Factor, sentence_of

MIXED = "mixed"
ALONE = "one device"
GRIDS = {
    ("zero", "columns"): "2d",
    ("data", "zero", "columns"): "2.5d",
    ("rows", "hidden", "weights"): "3d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A plan's name: as a whole, by mesh axis, in a sentence.

    `factors`: parts of a product, a pipeline first.
    """

    name: str
    axes: Mapping[str, str]
    factors: tuple[Factor, ...]
    sentence: str

    @property
    def scheme(self) -> str | None:
        """The name if `--scheme` takes it; a mixed plan has none."""
        try:
            scheme_named(self.name)
        except UsageError:
            return None
        return self.name

    @property
    def recipe(self) -> str:
        """The name that people use; empty if stages differ, and of a single device."""
        return recipe_of(self.factors) if self.factors and " | " not in self.name else ""

    @property
    def called(self) -> str:
        """The printed name, which says so if it is no known scheme."""
        return self.name if self.scheme else f"no known scheme ({self.name})"

    def has(self, scheme: str) -> bool:
        """Whether the plan is of this scheme, or has it as a factor.

        >>> sharded = Factor(scheme="data", size=2, zero=3)
        >>> Named(name="", axes={}, sentence="", factors=(sharded,)).has("zero3")
        True
        """
        return any(
            scheme in (factor.scheme, factor.alone)
            or (factor.zero and scheme == f"zero{factor.zero}")
            for factor in self.factors
        )


def scheme_of(plan: Plan, analysis: Analysis) -> Named:
    """Name a plan of the analysed model."""
    profiles = profiles_of(analysis)
    factors_of_parts = [
        _factors(plan, analysis, profiles, names, mesh) for names, mesh in _parts(plan, analysis)
    ]
    axes = factors_of_parts[0][0]
    inside = [factors for _, factors in factors_of_parts]
    stages = stages_of(plan)
    pipeline: tuple[Factor, ...] = ()
    if stages > 1:
        pipeline = (Factor(scheme=f"pipeline-{plan.schedule.pipeline}", size=stages),)
    if len({tuple(map(str, factors)) for factors in inside}) > 1:
        parts = dict.fromkeys(PRODUCT.join(map(str, factors)) or ALONE for factors in inside)
        name = " | ".join(parts)
        if pipeline:
            name = f"{pipeline[0]}{PRODUCT}({name})"
        return Named(
            name=name,
            axes=axes,
            factors=(*pipeline, *(f for factors in inside for f in factors)),
            sentence=name,
        )
    factors = (*pipeline, *inside[0])
    return Named(
        name=_name(factors),
        axes=axes,
        factors=factors,
        sentence=sentence_of(factors, plan.schedule),
    )


def stages_of(plan: Plan) -> int:
    """The number of pipeline stages; of interleaved ones the plan lists the chunks."""
    return max(len(plan.stages) // plan.schedule.interleave, 1)


def _parts(plan: Plan, analysis: Analysis) -> list[tuple[list[str], tuple[AxisSpec, ...]]]:
    """The operators of the plan, by name, with the mesh that they run on.

    They are those of each stage where the stages' meshes differ.
    """
    names = [op.name for op in analysis.warm]
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    if len(set(meshes)) == 1:
        return [(names, meshes[0])]
    everything = [op.name for op in analysis.graph.operators]
    starts = [everything.index(stage.first) for stage in plan.stages] + [len(everything)]
    warm = set(names)
    held = [
        [name for name in everything[first:last] if name in warm]
        for first, last in itertools.pairwise(starts)
    ]
    return list(zip(held, meshes, strict=True))


def _factors(
    plan: Plan, analysis: Analysis, profiles: Profiles, names: list[str], mesh: tuple[AxisSpec, ...]
) -> tuple[dict[str, str], tuple[Factor, ...]]:
    """The axes of a mesh by name, and the factors of the product that they make."""
    view = _View(plan, analysis, profiles, names)
    by_axis = {
        axis.name: Factor(scheme=view.scheme(i), size=axis.size, zero=view.zero(i))
        for i, axis in enumerate(mesh)
        if axis.size > 1
    }
    merged: dict[tuple[str, int], int] = {}
    for factor in by_axis.values():
        key = (factor.scheme, factor.zero)
        merged[key] = merged.get(key, 1) * factor.size
    factors = tuple(
        Factor(scheme=scheme, size=size, zero=zero) for (scheme, zero), size in merged.items()
    )
    return {name: factor.alone for name, factor in by_axis.items()}, _as_grid(factors)


def _as_grid(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """One factor for the axes that together are a grid."""
    # In 2d and 2.5d the axis of the rows stores parameters split, in 3d in any way.
    for rows in ("zero", "rows"):
        kinds = tuple(sorted(_kind(factor, rows) for factor in factors))
        for wanted, name in GRIDS.items():
            if kinds == tuple(sorted(wanted)):
                return (Factor(scheme=name, size=math.prod(factor.size for factor in factors)),)
    return factors


def _kind(factor: Factor, rows: str) -> str:
    if factor.scheme == "data":
        return rows if rows == "rows" or factor.zero else "data"
    return "weights" if factor.scheme in ("megatron", "megatron-sp", "inner") else factor.scheme


def _number(numbers: Mapping[str, int], operator: str, option: str) -> int:
    """The index of the option that a plan names; `PlanError` if a file names an unknown one."""
    if option not in numbers:
        raise PlanError(
            f"the plan's strategy of {operator!r}: " + unknown("factor", option, numbers)
        )
    return numbers[option]


class _View:
    """A plan's strategies as splits."""

    def __init__(
        self, plan: Plan, analysis: Analysis, profiles: Profiles, names: Iterable[str]
    ) -> None:
        self.plan = plan
        self.analysis = analysis
        self.profiles = profiles
        self.names = [name for name in names if name in plan.operators]
        self.options: dict[str, tuple[int, ...]] = {}
        index: dict[Offer, dict[str, int]] = {}
        for name in self.names:
            offer = analysis.offers[name]
            numbers = index.setdefault(
                offer, {option.name: i for i, option in enumerate(offer.options)}
            )
            self.options[name] = tuple(
                _number(numbers, name, option) for option in plan.operators[name].strategy
            )

    def option(self, name: str, axis: int) -> Option:
        """The option that an operator takes on an axis."""
        return self.analysis.offers[name].options[self.options[name][axis]]

    def option_split(self, name: str, axis: int) -> Split:
        """Return the kind of dim that an operator splits on an axis."""
        return self.profiles.by_name[name].splits[self.options[name][axis]]

    def shares(self, axis: int, *parts: Part) -> dict[Split, float]:
        """Shares of the work of these parts by split; empty if the model has no such parts."""
        shares = dict.fromkeys(Split, 0.0)
        for name in self.names:
            profile = self.profiles.by_name[name]
            if profile.part in parts:
                shares[self.option_split(name, axis)] += profile.work
        total = sum(shares.values())
        return {split: work / total for split, work in shares.items()} if total else {}

    def scheme(self, axis: int) -> str:
        """The name of an axis."""
        experts = self.shares(axis, Part.EXPERTS)
        if experts.get(Split.EXPERT, 0.0) >= ENOUGH:
            rest = self._of_products(axis, self.shares(axis, Part.PRODUCT))
            return "expert" if rest == "data" else f"expert+{rest}"
        shares = self.shares(axis, Part.PRODUCT, Part.EXPERTS)
        if not shares:
            shares = self.shares(axis, Part.CORE, Part.OTHER, Part.LOOKUP)
        return self._of_products(axis, shares)

    def _of_products(self, axis: int, shares: dict[Split, float]) -> str:
        if not shares:
            return UNUSED
        if shares[Split.BATCH] >= ENOUGH:
            return "data"
        if shares[Split.SEQUENCE] >= ENOUGH:
            return self._of_sequences(axis)
        weights = shares[Split.INNER] + shares[Split.HIDDEN]
        if weights >= ENOUGH:
            return self._of_weights(axis, shares)
        if shares[Split.SPACE] >= ENOUGH:
            return "spatial"
        if shares[Split.WHOLE] + shares[Split.SHARE] + shares[Split.PARTIAL] >= ENOUGH:
            return UNUSED
        rows = shares[Split.BATCH] + shares[Split.SEQUENCE]
        return "rows" if rows >= ENOUGH else MIXED

    def _of_sequences(self, axis: int) -> str:
        """The name of an axis along which products split the sequence, by what attention does."""
        core = self.shares(axis, Part.CORE) or dict.fromkeys(Split, 0.0)
        if core[Split.INNER] >= ENOUGH:
            return "ulysses"
        if core[Split.RING] + core[Split.SEQUENCE] >= ENOUGH:
            return "context"
        return "sequence"

    def _of_weights(self, axis: int, shares: dict[Split, float]) -> str:
        if shares[Split.HIDDEN] >= ENOUGH:
            return "hidden"
        if shares[Split.INNER] >= ENOUGH and self._reduced(axis):
            return "megatron-sp" if self._rows_between(axis) else "megatron"
        if self._reduced(axis):
            return "tensor"
        products = [name for name in self.names if self.profiles.by_name[name].part is Part.PRODUCT]
        # A single product has no pair of which the second could leave a partial sum.
        return "columns" if len(products) > 1 else "megatron"

    def _reduced(self, axis: int) -> bool:
        """Whether some product leaves a partial sum."""
        products = (
            name
            for name in self.names
            if self.profiles.by_name[name].part in (Part.PRODUCT, Part.EXPERTS)
        )
        return any(
            self.profiles.by_name[name].reduces[self.options[name][axis]] for name in products
        )

    def _rows_between(self, axis: int) -> bool:
        """Whether most operators without an inner dim (norms, residuals) split their rows."""
        votes: Counter[bool] = Counter()
        for name in self.names:
            profile = self.profiles.by_name[name]
            rows = {Split.BATCH, Split.SEQUENCE}
            if profile.part is not Part.OTHER or Split.INNER in profile.splits:
                continue
            if rows.intersection(profile.splits):
                votes[profile.splits[self.options[name][axis]] in rows] += 1
        return votes[True] > votes[False]

    def zero(self, axis: int) -> int:
        """The ZeRO stage of most parameters on an axis.

        0 if their stored layout is the used one.
        """
        stored = {
            name: parse_layout(parameter.storage)
            for name, parameter in self.plan.parameters.items()
        }
        gathered: set[str] = set()
        used: set[str] = set()
        for op in self.analysis.warm:
            if op.name not in self.options or self.profiles.by_name[op.name].part is Part.WEIGHT:
                continue
            # Experts that are split are no parameters that could be gathered.
            if self.option_split(op.name, axis) is Split.EXPERT:
                continue
            for name, placement in zip(op.inputs, self.option(op.name, axis).inputs, strict=True):
                for root in self.profiles.roots.get(name, ()):
                    if axis >= len(stored[root]):
                        # A tied parameter is stored as an earlier stage has it, whose mesh may have
                        # fewer axes.
                        continue
                    used.add(root)
                    if stored[root][axis].kind is Kind.SPLIT and placement.kind is not Kind.SPLIT:
                        gathered.add(root)
        sizes = {name: self.analysis.graph.tensors[name].bytes for name in used}
        if 2 * sum(sizes[name] for name in gathered) <= sum(sizes.values()):
            return 0
        return zero_of(self.plan, train=self.analysis.train)


def zero_of(plan: Plan, *, train: bool) -> int:
    """The ZeRO stage that a plan's schedule gives to parameters stored split and used whole."""
    # An inference has one pass a step, for which it gathers them: as ZeRO 3 does.
    return zero_stage(plan.schedule.gathered, plan.schedule.accumulated) if train else 3


def _name(factors: tuple[Factor, ...]) -> str:
    if not factors:
        return ALONE
    if len(factors) == 1:
        return factors[0].alone
    return PRODUCT.join(map(str, factors))
