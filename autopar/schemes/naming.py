"""The known scheme of a plan: a name for every mesh axis, from the split of most of the work, and for the whole plan.

The products of weights vote, each with its multiply-adds. The split that `ENOUGH` of them have on an axis names it:

    batch       data; zero1, zero2 or zero3 where most parameters are stored split and used whole
    sequence    ulysses where attention splits heads, context where it splits the sequence, else sequence
    inner       megatron-sp where the rows between the products are split, else megatron
    hidden      hidden (the dim that joins the layers); columns: inner and hidden, along the outputs alone
    experts     expert where everything else splits the batch, else expert+ what the rest does
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import PlanError, UsageError, unknown
from ..plan import Plan
from ..plan_parts import AxisSpec
from ..sharding.analysis import Analysis
from ..sharding.candidates import Option
from ..sharding.layout import Kind, parse_layout
from ..sharding.schedule import zero_stage
from .axis import ENOUGH
from .known import PRODUCT, scheme_named
from .splits import Part, Profiles, Split, profiles_of
from .wording import UNUSED, Factor, sentence_of

MIXED, ALONE = "mixed", "one device"
GRIDS = {("zero", "columns"): "2d", ("data", "zero", "columns"): "2.5d", ("rows", "hidden", "weights"): "3d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A plan's name: as a whole, by mesh axis, in a sentence. `factors`: parts of a product, a pipeline first."""

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
    def called(self) -> str:
        """The printed name, which says so if it is no known scheme."""
        return self.name if self.scheme else f"no known scheme ({self.name})"

    def has(self, scheme: str) -> bool:
        """Whether the plan is of this scheme, or has it as a factor.

        >>> Named(name="", axes={}, sentence="", factors=(Factor(scheme="data", size=2, zero=3),)).has("zero3")
        True
        """
        return any(scheme in (factor.scheme, factor.alone) or (factor.zero and scheme == f"zero{factor.zero}") for factor in self.factors)


def scheme_of(plan: Plan, analysis: Analysis) -> Named:
    """Name a plan of the analysed model."""
    profiles = profiles_of(analysis)
    found = [_factors(plan, analysis, profiles, names, mesh) for names, mesh in _parts(plan, analysis)]
    axes = found[0][0]
    inside = [factors for _, factors in found]
    stages = stages_of(plan)
    pipeline = (Factor(scheme=f"pipeline-{plan.schedule.pipeline}", size=stages),) if stages > 1 else ()
    if len({tuple(map(str, factors)) for factors in inside}) > 1:
        parts = dict.fromkeys(PRODUCT.join(map(str, factors)) or ALONE for factors in inside)
        name = f"{pipeline[0]}{PRODUCT}({' | '.join(parts)})" if pipeline else " | ".join(parts)
        return Named(name=name, axes=axes, factors=(*pipeline, *(f for factors in inside for f in factors)), sentence=name)
    factors = (*pipeline, *inside[0])
    return Named(name=_name(factors), axes=axes, factors=factors, sentence=sentence_of(factors, plan.schedule))


def stages_of(plan: Plan) -> int:
    """The number of pipeline stages; of interleaved ones the plan lists the chunks."""
    return max(len(plan.stages) // plan.schedule.interleave, 1)


def _parts(plan: Plan, analysis: Analysis) -> list[tuple[list[str], tuple[AxisSpec, ...]]]:
    """The operators of the plan, by name, with the mesh that they run on: of each stage, where these differ."""
    names = [op.name for op in analysis.warm]
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    if len(set(meshes)) == 1:
        return [(names, meshes[0])]
    everything = [op.name for op in analysis.graph.operators]
    starts = [everything.index(stage.first) for stage in plan.stages] + [len(everything)]
    warm = set(names)
    held = [[name for name in everything[first:last] if name in warm] for first, last in itertools.pairwise(starts)]
    return list(zip(held, meshes, strict=True))


def _factors(
    plan: Plan, analysis: Analysis, profiles: Profiles, names: list[str], mesh: tuple[AxisSpec, ...]
) -> tuple[dict[str, str], tuple[Factor, ...]]:
    """The axes of a mesh by name, and the factors of the product that they make."""
    view = _View(plan, analysis, profiles, names)
    by_axis = {axis.name: Factor(scheme=view.scheme(i), size=axis.size, zero=view.zero(i)) for i, axis in enumerate(mesh) if axis.size > 1}
    merged: dict[tuple[str, int], int] = {}
    for factor in by_axis.values():
        key = (factor.scheme, factor.zero)
        merged[key] = merged.get(key, 1) * factor.size
    factors = tuple(Factor(scheme=scheme, size=size, zero=zero) for (scheme, zero), size in merged.items())
    return {name: factor.alone for name, factor in by_axis.items()}, _as_grid(factors)


def _as_grid(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """One factor for the axes that together are a grid."""
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
        raise PlanError(f"the plan's strategy of {operator!r}: " + unknown("factor", option, numbers))
    return numbers[option]


class _View:
    """A plan's strategies as splits."""

    def __init__(self, plan: Plan, analysis: Analysis, profiles: Profiles, names: Iterable[str]) -> None:
        self.plan, self.analysis, self.profiles = plan, analysis, profiles
        self.names = [name for name in names if name in plan.operators]
        self.options: dict[str, tuple[int, ...]] = {}
        index: dict[int, dict[str, int]] = {}
        for name in self.names:
            offer = analysis.offers[name]
            numbers = index.setdefault(id(offer), {option.name: i for i, option in enumerate(offer.options)})
            self.options[name] = tuple(_number(numbers, name, option) for option in plan.operators[name].strategy)

    def option(self, name: str, axis: int) -> Option:
        """The option that an operator takes on an axis."""
        return self.analysis.offers[name].options[self.options[name][axis]]

    def shares(self, axis: int, *parts: Part) -> dict[Split, float]:
        """Shares of the work of these parts by split; empty if the model has no such parts."""
        found = dict.fromkeys(Split, 0.0)
        for name in self.names:
            profile = self.profiles.by_name[name]
            if profile.part in parts:
                found[profile.splits[self.options[name][axis]]] += profile.work
        total = sum(found.values())
        return {split: work / total for split, work in found.items()} if total else {}

    def scheme(self, axis: int) -> str:
        """The name of an axis."""
        experts = self.shares(axis, Part.EXPERTS)
        if experts.get(Split.EXPERT, 0.0) >= ENOUGH:
            rest = self._of_products(axis, self.shares(axis, Part.PRODUCT))
            return "expert" if rest == "data" else f"expert+{rest}"
        shares = self.shares(axis, Part.PRODUCT, Part.EXPERTS) or self.shares(axis, Part.CORE, Part.OTHER, Part.LOOKUP)
        return self._of_products(axis, shares)

    def _of_products(self, axis: int, shares: dict[Split, float]) -> str:
        if not shares:
            return UNUSED
        if shares[Split.BATCH] >= ENOUGH:
            return "data"
        if shares[Split.SEQUENCE] >= ENOUGH:
            core = self.shares(axis, Part.CORE) or dict.fromkeys(Split, 0.0)
            inside = core[Split.RING] + core[Split.SEQUENCE]
            return "ulysses" if core[Split.INNER] >= ENOUGH else "context" if inside >= ENOUGH else "sequence"
        weights = shares[Split.INNER] + shares[Split.HIDDEN]
        if weights >= ENOUGH:
            return self._of_weights(axis, shares)
        if shares[Split.SPACE] >= ENOUGH:
            return "spatial"
        if shares[Split.WHOLE] + shares[Split.SHARE] + shares[Split.PARTIAL] >= ENOUGH:
            return UNUSED
        rows = shares[Split.BATCH] + shares[Split.SEQUENCE]
        return "rows" if rows >= ENOUGH else MIXED

    def _of_weights(self, axis: int, shares: dict[Split, float]) -> str:
        if shares[Split.HIDDEN] >= ENOUGH:
            return "hidden"
        if shares[Split.INNER] >= ENOUGH and self._reduced(axis):
            return "megatron-sp" if self._rows_between(axis) else "megatron"
        if not self._reduced(axis):
            return "columns" if len([n for n in self.names if self.profiles.by_name[n].part is Part.PRODUCT]) > 1 else "megatron"
        return "tensor"

    def _reduced(self, axis: int) -> bool:
        """Whether some product leaves a partial sum."""
        products = (name for name in self.names if self.profiles.by_name[name].part in (Part.PRODUCT, Part.EXPERTS))
        return any(self.profiles.by_name[name].reduces[self.options[name][axis]] for name in products)

    def _rows_between(self, axis: int) -> bool:
        """Whether most operators without an inner dim (norms, residuals) split their rows."""
        found: Counter[bool] = Counter()
        for name in self.names:
            profile = self.profiles.by_name[name]
            if profile.part is Part.OTHER and Split.INNER not in profile.splits and {Split.BATCH, Split.SEQUENCE} & {*profile.splits}:
                found[profile.splits[self.options[name][axis]] in (Split.BATCH, Split.SEQUENCE)] += 1
        return found[True] > found[False]

    def zero(self, axis: int) -> int:
        """The ZeRO stage of most parameters on an axis; 0 if their stored layout is the used one."""
        stored = {name: parse_layout(parameter.storage) for name, parameter in self.plan.parameters.items()}
        gathered: set[str] = set()
        used: set[str] = set()
        for op in self.analysis.warm:
            if op.name not in self.options or self.profiles.by_name[op.name].part is Part.WEIGHT:
                continue
            for name, placement in zip(op.inputs, self.option(op.name, axis).inputs, strict=True):
                for root in self.profiles.roots.get(name, ()):
                    if axis >= len(stored[root]):
                        continue  # tied: it is stored as an earlier stage, on a mesh of fewer axes, has it
                    used.add(root)
                    if stored[root][axis].kind is Kind.SPLIT and placement.kind is not Kind.SPLIT:
                        gathered.add(root)
        sizes = {name: self.analysis.graph.tensors[name].bytes for name in used}
        if 2 * sum(sizes[name] for name in gathered) <= sum(sizes.values()):
            return 0
        return zero_of(self.plan, train=self.analysis.train)


def zero_of(plan: Plan, *, train: bool) -> int:
    """The ZeRO stage that a plan's schedule gives to parameters stored split and used whole."""
    return zero_stage(plan.schedule.gathered, plan.schedule.accumulated) if train else 3


def _name(factors: tuple[Factor, ...]) -> str:
    return PRODUCT.join(map(str, factors)) if len(factors) > 1 else factors[0].alone if factors else ALONE
