"""The schemes known by name: the scheme of each mesh axis, the mesh's shape, the schedule's limits.

    2d     q x q        rows x columns of every product: SUMMA (van de Geijn and Watts, 1997);
                        Optimus (Xu et al., arXiv:2104.05343)
    2.5d   d x q x q    the batch over d such grids: Tesseract (Wang et al., arXiv:2105.14500)
    3d     l x l x l    rows, hidden and inner dim of every product (Bian et al., arXiv:2105.14450)

ZeRO: Rajbhandari et al., arXiv:1910.02054. Megatron: Shoeybi et al., arXiv:1909.08053; with
sequence parallelism, Korthikanti et al., arXiv:2205.05198. Ulysses: Jacobs et al.,
arXiv:2309.14509. Ring attention: Liu et al., arXiv:2310.01889. Experts: GShard (Lepikhin et al.,
arXiv:2006.16668). Pipelines: GPipe (Huang et al., arXiv:1811.06965), 1F1B and the 64 x 6 x 8 of
GPT-3 (Narayanan et al., arXiv:2104.04473).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import UsageError, unknown
from autopar.order.schedules import SCHEDULES
from autopar.planning.model.folding import find_runs
from autopar.planning.model.restrictions import Limits
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh

from .axis import AxisScheme, axis_limits, lacking
from .axis_schemes import AXIS_SCHEMES
from .recipes import scheme_text
from .splits import Part, Profiles, profiles_of
from .wording import PRODUCT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A known scheme.

    `axes`: the axis schemes, outermost first; a single one holds on every axis of a mesh of any
    shape. `sizes`: their degrees, if they are fixed. `shape`: the wanted shape of the mesh, or
    "any". `named`: the axis names that `axes` belong to, instead of positions. `zero`, `pipeline`,
    `stages`: fixed parts of the schedule (stages 0: as many as devices and layers allow). `fixed`:
    products of the model whose weights are not to be split.
    """

    name: str
    words: str
    axes: tuple[AxisScheme, ...]
    sizes: tuple[int, ...] = ()
    shape: str = "any"
    named: tuple[str, ...] = ()
    zero: int | None = None
    pipeline: str | None = None
    stages: int | None = None
    fixed: frozenset[str] = frozenset()

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """The limits on this mesh."""
        return axis_limits(self.by_axis(mesh), analysis, self.profiles(analysis), mesh)

    def profiles(self, analysis: Analysis) -> Profiles:
        """The operators of a model as the scheme sees them."""
        return profiles_of(analysis).fixing(self.fixed)

    def by_axis(self, mesh: Mesh) -> tuple[AxisScheme | None, ...]:
        """The scheme of every axis of the mesh."""
        if self.named:
            at = {
                mesh.index(name): scheme for name, scheme in zip(self.named, self.axes, strict=True)
            }
            return tuple(at.get(axis) for axis in range(len(mesh.axes)))
        if len(self.axes) == 1:
            return self.axes * len(mesh.axes)
        return self.axes if len(self.axes) == len(mesh.axes) else (None,) * len(mesh.axes)

    def lacks(self, analysis: Analysis, mesh: Mesh) -> str | None:
        """The reason against the scheme for the model on this mesh.

        It is None if the model can have the scheme.
        """
        if len(self.axes) > 1 and not self.named and len(mesh.axes) != len(self.axes):
            return f"{self.name} has {len(self.axes)} mesh axes, {mesh} has {len(mesh.axes)}"
        missing = [name for name in self.named if name not in {axis.name for axis in mesh.axes}]
        if missing:
            return (
                f"the mesh has no axis {missing[0]!r}; its axes are "
                f"{', '.join(axis.name for axis in mesh.axes)}"
            )
        if self.sizes and mesh.shape != self.sizes:
            return f"{self.name} is for a mesh of {'x'.join(map(str, self.sizes))}, not {mesh}"
        reason = lacking(self.by_axis(mesh), analysis, self.profiles(analysis), mesh)
        return f"{self.name}: {reason}" if reason else None

    def with_storage(self, zero: int) -> Scheme:
        """The scheme with parameters stored whole (ZeRO 0) or split, where rows alone are split."""
        storage = "split" if zero else "whole"
        axes = tuple(replace(a, storage=storage) if a.storage != "used" else a for a in self.axes)
        return replace(self, axes=axes, zero=zero)

    def stages_for(self, devices: int, analysis: Analysis) -> int | None:
        """The number of pipeline stages, where the scheme is a pipeline."""
        if self.stages is None:
            return None
        if self.stages:
            if devices % self.stages:
                raise UsageError(
                    f"{self.name}: {devices} devices do not make {self.stages} equal stages"
                )
            return self.stages
        most = layers_of(analysis)
        return max(count for count in range(1, min(devices, most) + 1) if devices % count == 0)

    def mesh_sizes(self, devices: int) -> tuple[int, ...] | None:
        """The mesh for the devices of a stage (None: any).

        A `UsageError` lists numbers of devices that would do.
        """
        if self.sizes:
            if math.prod(self.sizes) != devices:
                raise UsageError(
                    f"{self.name} is for {math.prod(self.sizes) * (self.stages or 1)} devices, not "
                    f"{devices * (self.stages or 1)}"
                )
            return self.sizes
        if self.shape == "any":
            return None
        sizes = _SHAPES[self.shape](devices)
        if sizes is None:
            below = next((n for n in range(devices - 1, 1, -1) if _SHAPES[self.shape](n)), None)
            above = next(n for n in range(devices + 1, 100 * devices) if _SHAPES[self.shape](n))
            would = " or ".join(
                f"{n} ({'x'.join(map(str, _SHAPES[self.shape](n) or ()))})"
                for n in (below, above)
                if n
            )
            raise UsageError(
                f"{self.name} needs a mesh of {self.shape} devices: {would}, not {devices}; --mesh "
                "gives another shape of its axes"
            )
        return sizes


def _square(devices: int) -> tuple[int, ...] | None:
    side = math.isqrt(devices)
    return (side, side) if side > 1 and side * side == devices else None


def _deep_square(devices: int) -> tuple[int, ...] | None:
    """The widest square grid q x q whose depth is at most q."""
    sides = (
        q
        for q in range(math.isqrt(devices), 1, -1)
        if devices % (q * q) == 0 and 2 <= devices // (q * q) <= q
    )
    side = next(sides, None)
    return None if side is None else (devices // (side * side), side, side)


def _cube(devices: int) -> tuple[int, ...] | None:
    side = round(devices ** (1 / 3))
    return (side,) * 3 if side > 1 and side**3 == devices else None


def _line(devices: int) -> tuple[int, ...]:
    return (devices,)


_SHAPES = {
    "one axis of": _line,
    "q x q": _square,
    "d x q x q (d up to q)": _deep_square,
    "l x l x l": _cube,
}
_LINE, _SQUARE, _DEEP, _CUBE = _SHAPES


def layers_of(analysis: Analysis) -> int:
    """The number of equal layers; of a model without any, of products with a weight."""
    layers = sum(run.layers for run in find_runs(analysis.graph))
    products = sum(
        profile.part in (Part.PRODUCT, Part.EXPERTS)
        for profile in profiles_of(analysis).by_name.values()
    )
    return layers or max(products, 1)


def _plain(name: str, **more: int) -> Scheme:
    return Scheme(
        name=name, words=AXIS_SCHEMES[name].words, axes=(AXIS_SCHEMES[name],), zero=more.get("zero")
    )


def _grid(name: str, words: str, shape: str, *axes: str) -> Scheme:
    return Scheme(
        name=name, words=words, shape=shape, axes=tuple(AXIS_SCHEMES[axis] for axis in axes), zero=3
    )


def _pipeline(schedule: str) -> Scheme:
    words = f"stages of consecutive layers in the order {schedule}, data parallel inside"
    return Scheme(
        name=f"pipeline-{schedule}",
        words=words,
        axes=(AXIS_SCHEMES["data"],),
        zero=0,
        pipeline=schedule,
        stages=0,
    )


def triple(stages: int, data: int, tensor: int, name: str) -> Scheme:
    """Pipeline x data x tensor parallelism, as Megatron trains.

    1F1B over the stages, tensor parallel inside.
    """
    return Scheme(
        name=name,
        words=f"{stages} pipeline stages x {data} data parallel x {tensor} tensor parallel",
        sizes=(data, tensor),
        axes=(AXIS_SCHEMES["data"], AXIS_SCHEMES["megatron"]),
        pipeline="1f1b",
        stages=stages,
    )


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _plain("data", zero=0),
        _plain("zero1", zero=1),
        _plain("zero2", zero=2),
        _plain("zero3", zero=3),
        _plain("tensor"),
        _plain("megatron"),
        _plain("megatron-sp"),
        _plain("ulysses", zero=0),
        replace(_plain("context", zero=0), shape=_LINE),
        _plain("expert"),
        _grid(
            "2d",
            "rows x columns of every product, weights stored split over both",
            _SQUARE,
            "zero3",
            "columns",
        ),
        _grid("2.5d", "the batch over grids of rows x columns", _DEEP, "data", "zero3", "columns"),
        _grid(
            "3d",
            "rows x hidden dim x inner dim of every product",
            _CUBE,
            "zero3",
            "hidden",
            "inner",
        ),
        *(_pipeline(row.name) for row in SCHEDULES.values() if row.scheme),
        triple(64, 6, 8, "gpt3-64x6x8"),
    )
}
"""The schemes, by name."""

_TRIPLE = re.compile(r"(?:gpt3-)?(\d+)x(\d+)x(\d+)|p(\d+)d(\d+)t(\d+)")
_FACTOR = re.compile(r"([\w.+-]+) (\d+)(?: \((zero[123])\))?")


def scheme_named(text: str) -> Scheme:
    """The scheme called `text`.

    A name, PxDxT (pipeline, data, tensor), a product as plans are named, AXIS:NAME,..., or a recipe
    as people write it (DDP, FSDP, TP8 x DP8).

    >>> scheme_named("p4d2t8").sizes
    (2, 8)
    >>> scheme_named("pipeline-1f1b 4 x data 2 (zero1) x megatron-sp 8").stages
    4
    """
    if text in SCHEMES:
        return SCHEMES[text]
    if text in AXIS_SCHEMES:
        return _plain(text)
    if text.removeprefix("pipeline-") in SCHEDULES:
        return _pipeline(text.removeprefix("pipeline-"))
    if ":" in text:
        return _by_axis_name(text)
    numbers = _TRIPLE.fullmatch(text)
    if numbers:
        stages, data, tensor = (int(n) for n in numbers.groups() if n)
        if not stages * data * tensor:
            raise UsageError(f"scheme {text!r}: every number must be at least 1")
        return triple(stages, data, tensor, text)
    factors = [_FACTOR.fullmatch(part) for part in text.split(PRODUCT)]
    if all(factors):
        return _product(text, [(f[1], int(f[2]), f[3]) for f in factors if f])
    if recipe := scheme_text(text):
        return replace(scheme_named(recipe), name=text)
    raise UsageError(unknown("scheme", text, (*SCHEMES, "PxDxT", "TP8 x DP8", "DDP", "FSDP")))


def _by_axis_name(text: str) -> Scheme:
    pairs = [part.partition(":") for part in text.split(",")]
    if any(not axis or not colon for axis, colon, _ in pairs):
        raise UsageError(f"scheme {text!r} is not of the form NAME or AXIS:NAME,...")
    axes = tuple(_axis_scheme(name) for _, _, name in pairs)
    zero = {int(a.name[-1]) for a in axes if a.name in ("zero1", "zero2", "zero3")}
    return Scheme(
        name=text,
        words=text,
        axes=axes,
        named=tuple(axis for axis, _, _ in pairs),
        zero=_one_zero(text, zero),
    )


def _one_zero(text: str, stages: set[int]) -> int | None:
    if len(stages) > 1:
        raise UsageError(f"scheme {text!r} names several kinds of ZeRO; a plan has one")
    return stages.pop() if stages else None


def _axis_scheme(name: str) -> AxisScheme:
    if name not in AXIS_SCHEMES:
        raise UsageError(unknown("scheme", name, AXIS_SCHEMES))
    return AXIS_SCHEMES[name]


def _stored_scheme(name: str, stored: str | None) -> AxisScheme:
    """The scheme of a factor, whose parameters are stored split on its axis if it says so."""
    if name == "data":
        return AXIS_SCHEMES[stored or name]
    scheme = _axis_scheme(name)
    return replace(scheme, storage="split") if stored else scheme


def _product(text: str, factors: list[tuple[str, int, str | None]]) -> Scheme:
    """A product of schemes with their degrees, the pipeline first."""
    stages = pipeline = None
    if factors[0][0].startswith("pipeline-"):
        pipeline = factors[0][0].removeprefix("pipeline-")
        stages = factors[0][1]
        factors = factors[1:]
    axes = tuple(_stored_scheme(name, stored) for name, _, stored in factors)
    zero = {int(stored[-1]) for _, _, stored in factors if stored} | {
        int(name[-1]) for name, _, _ in factors if name in ("zero1", "zero2", "zero3")
    }
    return Scheme(
        name=text,
        words=text,
        axes=axes or (AXIS_SCHEMES["data"],),
        sizes=tuple(size for _, size, _ in factors),
        pipeline=pipeline,
        stages=stages,
        zero=_one_zero(text, zero),
    )
