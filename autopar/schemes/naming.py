"""Which known scheme a plan is: the name of every mesh axis, from what most of the work is split along, and of the whole plan.

The products of weights vote, each with its multiply-adds; what `ENOUGH` of them do on an axis names it:

    batch       data; zero1, zero2 or zero3 where most parameters are stored split and used whole
    sequence    ulysses where attention splits heads, context where it splits the sequence, else sequence
    inner       megatron-sp where the rows between the products are split, else megatron
    hidden      hidden (the dim that joins the layers); columns: inner and hidden, along the outputs alone
    experts     expert where everything else splits the batch, else expert+ what the rest does
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..plan import Plan
from ..plan_parts import StagePlan
from ..sharding.analysis import Analysis
from ..sharding.candidates import Option
from ..sharding.layout import Kind, parse_layout
from .axis import ENOUGH
from .known import PRODUCT
from .splits import Part, Profiles, Split, profiles_of

UNUSED, MIXED = "replicated", "mixed"
GRIDS = {("zero", "columns"): "2d", ("data", "zero", "columns"): "2.5d", ("rows", "hidden", "weights"): "3d"}
WORDS = {
    "data": "the batch is split over {}", "sequence": "the sequence is split over {}, attention's keys are gathered",
    "ulysses": "the sequence is split over {}, and the heads inside attention", "context": "the sequence is split over {}, inside attention too",
    "megatron": "heads, feed-forward and vocabulary are split over {}, activations between are whole",
    "megatron-sp": "heads, feed-forward and vocabulary are split over {}, and the rows between them",
    "hidden": "the hidden dim of the weights is split over {}", "columns": "weights are split over {} along their outputs",
    "tensor": "weights are split over {}", "expert": "experts are split over {}, everything else splits the batch there",
    "spatial": "images are split in space over {}", UNUSED: "every operator is repeated on all of {}",
    "2d": "rows and columns of every product are split over {}", "2.5d": "the batch is split over grids of rows and columns, {} in all",
    "3d": "rows, hidden and inner dim of every product are split over {}",
}  # fmt: skip
STORED = {
    1: "parameters are stored split and gathered once a step", 2: "parameters are stored split and gathered once a step, gradients are added up as shards",
    3: "parameters are stored split and gathered for every pass",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of a plan's name: a scheme over `size` devices; `zero`: how parameters that lie split are used (0: they are not)."""

    scheme: str
    size: int
    zero: int = 0

    @property
    def alone(self) -> str:
        """The name where the plan is nothing else."""
        return f"zero{self.zero}" if self.zero and self.scheme == "data" else self.scheme + (f" (zero{self.zero})" if self.zero else "")

    def __str__(self) -> str:
        return f"{self.scheme} {self.size}" + (f" (zero{self.zero})" if self.zero else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a plan is called: as a whole, by mesh axis, and in a sentence. `factors`: the parts of a product, a pipeline first."""

    name: str
    axes: Mapping[str, str]
    factors: tuple[Factor, ...]
    sentence: str

    def has(self, scheme: str) -> bool:
        """Whether the plan is of that scheme, or it is one of its factors.

        >>> Named(name="", axes={}, sentence="", factors=(Factor(scheme="data", size=2, zero=3),)).has("zero3")
        True
        """
        return any(scheme in (factor.scheme, factor.alone) or (factor.zero and scheme == f"zero{factor.zero}") for factor in self.factors)


def scheme_of(plan: Plan, analysis: Analysis) -> Named:
    """Name a plan of the analysed model."""
    profiles = profiles_of(analysis)
    stages = plan.stages or (None,)
    found = [
        _factors(plan, analysis, profiles, names, stage) for stage, names in zip(stages, _stage_operators(plan, analysis), strict=True)
    ]
    axes = found[0][0]
    inside = [factors for _, factors in found]
    pipeline = (Factor(scheme=f"pipeline-{plan.schedule.pipeline}", size=len(plan.stages)),) if len(plan.stages) > 1 else ()
    if len({tuple(map(str, factors)) for factors in inside}) > 1:
        parts = dict.fromkeys(_name(factors) for factors in inside)
        name = f"{pipeline[0]}{PRODUCT}({' | '.join(parts)})"
        return Named(name=name, axes=axes, factors=(*pipeline, *(f for factors in inside for f in factors)), sentence=name)
    factors = (*pipeline, *inside[0])
    return Named(name=_name(factors), axes=axes, factors=factors, sentence=_sentence(factors, plan))


def _stage_operators(plan: Plan, analysis: Analysis) -> list[list[str]]:
    """The names of the operators of every stage; stages that are split over equal meshes are taken together."""
    names = [op.name for op in analysis.warm]
    if len({stage.mesh for stage in plan.stages}) <= 1:
        return [names] * max(len(plan.stages), 1)
    everything = [op.name for op in analysis.graph.operators]
    starts = [everything.index(stage.first) for stage in plan.stages] + [len(everything)]
    warm = set(names)
    return [[n for n in everything[a:b] if n in warm] for a, b in zip(starts, starts[1:], strict=False)]


def _factors(
    plan: Plan, analysis: Analysis, profiles: Profiles, names: list[str], stage: StagePlan | None
) -> tuple[dict[str, str], tuple[Factor, ...]]:
    """The axes of a stage by name, and the factors of the product that they make."""
    mesh = stage.mesh if stage is not None else plan.mesh
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
            self.options[name] = tuple(numbers[option] for option in plan.operators[name].strategy)

    def option(self, name: str, axis: int) -> Option:
        """The option that an operator takes on an axis."""
        return self.analysis.offers[name].options[self.options[name][axis]]

    def shares(self, axis: int, *parts: Part) -> Counter[Split]:
        """The share of the work of these parts that is split so."""
        found: Counter[Split] = Counter()
        for name in self.names:
            profile = self.profiles.by_name[name]
            if profile.part in parts:
                found[profile.splits[self.options[name][axis]]] += profile.work  # type: ignore[assignment]
        total = sum(found.values()) or 1.0
        return Counter({split: work / total for split, work in found.items()})  # type: ignore[misc]

    def scheme(self, axis: int) -> str:
        """The name of an axis."""
        experts = self.shares(axis, Part.EXPERTS)
        if experts[Split.EXPERT] >= ENOUGH:
            rest = self._of_products(axis, self.shares(axis, Part.PRODUCT))
            return "expert" if rest == "data" else f"expert+{rest}"
        shares = self.shares(axis, Part.PRODUCT, Part.EXPERTS) or self.shares(axis, Part.CORE, Part.OTHER, Part.LOOKUP)
        return self._of_products(axis, shares)

    def _of_products(self, axis: int, shares: Counter[Split]) -> str:
        if shares[Split.BATCH] >= ENOUGH:
            return "data"
        if shares[Split.SEQUENCE] >= ENOUGH:
            core = self.shares(axis, Part.CORE)
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

    def _of_weights(self, axis: int, shares: Counter[Split]) -> str:
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
        """Which ZeRO most parameters have on an axis; 0 where they are used as they are stored."""
        stored = {name: parse_layout(parameter.storage) for name, parameter in self.plan.parameters.items()}
        gathered: set[str] = set()
        used: set[str] = set()
        for op in self.analysis.warm:
            if op.name not in self.options or self.profiles.by_name[op.name].part is Part.WEIGHT:
                continue
            for name, placement in zip(op.inputs, self.option(op.name, axis).inputs, strict=True):
                for root in self.profiles.roots.get(name, ()):
                    used.add(root)
                    if stored[root][axis].kind is Kind.SPLIT and placement.kind is not Kind.SPLIT:
                        gathered.add(root)
        sizes = {name: self.analysis.graph.tensors[name].bytes for name in used}
        if 2 * sum(sizes[name] for name in gathered) <= sum(sizes.values()):
            return 0
        return zero_of(self.plan, train=self.analysis.train)


def zero_of(plan: Plan, *, train: bool) -> int:
    """Which ZeRO a plan's schedule makes of parameters that are stored split and used whole."""
    return 3 if plan.schedule.gathered == "again" or not train else 2 if plan.schedule.accumulated == "shards" else 1


def _name(factors: tuple[Factor, ...]) -> str:
    return PRODUCT.join(map(str, factors)) if len(factors) > 1 else factors[0].alone if factors else "one device"


def _sentence(factors: tuple[Factor, ...], plan: Plan) -> str:
    """What the plan does, in words."""
    said = []
    for factor in factors:
        over = f"{factor.size} devices"
        if factor.scheme.startswith("pipeline-"):
            words = (
                f"{factor.size} stages of consecutive operators run {plan.schedule.micro_batches} micro-batches ({plan.schedule.pipeline})"
            )
        elif factor.scheme.startswith("expert+"):
            words = f"experts are split over {over}, the rest is {factor.scheme.removeprefix('expert+')} there"
        else:
            words = WORDS.get(factor.scheme, f"{factor.scheme} over {{}}").format(over)
        said.append(words + (f" ({STORED[factor.zero]})" if factor.zero else ""))
    text = "; ".join(said) or "nothing is split"
    return text[0].upper() + text[1:] + "."
