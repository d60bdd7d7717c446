"""The plans that a target of `convert` can say, as restrictions of a request.

Each axis of a mesh is named after its work, which is a known scheme; the target's own table of
what it says (`integrations.convert.reach`) tells which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import UsageError, unknown
from autopar.integrations.convert import FOLDED, KINDS, REACHES, REPLICAS, WEIGHTS, Reach, convert
from autopar.plan import Plan
from autopar.planning.model.pins import together
from autopar.planning.model.request import Request
from autopar.planning.model.restrictions import Limits, Space
from autopar.schemes import AXIS_SCHEMES, AxisScheme, Scheme
from autopar.schemes.axis_schemes import UNSPLIT
from autopar.schemes.pinning import Possible
from autopar.schemes.splits import Part, profiles_of
from autopar.sharding.analysis import Analysis
from autopar.sharding.layer_numbers import between_layers
from autopar.sharding.mesh import Mesh
from autopar.sharding.rules import is_product
from autopar.sharding.time_split import micro_batch_options

from .whole_products import whole_products


def _whole_otherwise(scheme: AxisScheme) -> AxisScheme:
    """The scheme, with heads split evenly, and products whole that it, or its target, cannot split.

    Targets know no other work of such ranks.
    """
    products = (*scheme.prefer[Part.PRODUCT], UNSPLIT)
    prefer = {**scheme.prefer, Part.PRODUCT: products, Part.FIXED: (UNSPLIT,)}
    return replace(scheme, whole_heads=True, prefer=prefer)


EXPERT_SHARD = "expert-shard"
"""The name of ranks of experts over which all other parameters are stored split."""
SCHEMES: Mapping[str, AxisScheme] = {
    "data": AXIS_SCHEMES["data"],
    "shard": AXIS_SCHEMES["zero3"],
    "expert": AXIS_SCHEMES["expert"],
    EXPERT_SHARD: replace(AXIS_SCHEMES["expert"], storage="split"),
    "context": AXIS_SCHEMES["context"],
    "ulysses": AXIS_SCHEMES["ulysses"],
    "tensor": _whole_otherwise(AXIS_SCHEMES["megatron"]),
    "tensor-sp": _whole_otherwise(AXIS_SCHEMES["megatron-sp"]),
    "tensor-ep": _whole_otherwise(AXIS_SCHEMES["expert+megatron"]),
    "tensor-sp-ep": _whole_otherwise(AXIS_SCHEMES["expert+megatron-sp"]),
}
"""The scheme of each name that a mesh axis has."""


def within(request: Request, target: str, analysis: Analysis) -> list[Request]:
    """The request within each part of the plans that a target can say."""
    if target not in REACHES:
        raise UsageError(unknown("target", target, REACHES))
    missing = _missing(analysis)
    if "expert" not in missing and any({*FOLDED} & {*reach.axes} for reach in REACHES[target]):
        # Whole experts on the ranks that split weights need fewer messages than parts of each.
        missing |= {*WEIGHTS}
    requests = [_within(request, reach, analysis, missing) for reach in REACHES[target]]
    possible = [one for one in requests if one is not None]
    if not possible:
        reason = _joined(analysis)
        why = f": its ranks have shares of the batch, and {reason}" if reason else ""
        raise UsageError(f"{target} can say no plan of this model with these options{why}")
    return possible


def _within(
    request: Request, reach: Reach, analysis: Analysis, missing: set[str]
) -> Request | None:
    """The request within a part; None where its own choices are out of it."""
    if not request.train and not reach.infers:
        return None
    if reach.optimizers is not None and request.optimizer not in (*reach.optimizers, "none"):
        return None
    if request.zero not in (None, *reach.zeros, *reach.near):
        return None
    if request.overlap_experts and not reach.merges:
        return None
    said = {*reach.axes} - missing
    if {"shard", "expert"} <= said:
        # Who stores parameters split does so over the ranks of experts, too. Whole ones are for
        # those who ask for a mesh or single operators.
        free = request.mesh is None and request.uniform
        said = said - ({"expert"} if free else set()) | {EXPERT_SHARD}
    axes = [tuple(name for name in kind if name in said) for kind in KINDS]
    if not any(axes) or (reach.needed and not {*reach.needed} - missing):
        return None
    least, most = reach.stages
    operators = [(op.name, is_product(op.kind)) for op in analysis.graph.operators]
    space = Space(
        axes=tuple(names for names in axes if names),
        needed=frozenset(reach.needed),
        zeros=reach.zeros,
        recomputes=reach.recomputes,
        schedules=reach.searched or reach.schedules,
        stages=(least, most or math.inf),
        filled=reach.filled,
    )
    named = _Named(analysis=analysis, fixed=whole_products(analysis, reach.weights))
    return replace(
        request,
        space=space,
        cuts=between_layers(operators) if reach.whole_layers else request.cuts,
        limits=together(request.limits, named) if request.limits else named,
        offload=request.offload or (None if reach.hosts else "none"),
        overlap_experts=request.overlap_experts if reach.merges else False,
    )


def _missing(analysis: Analysis) -> set[str]:
    """The names of axes that split a part which the model does not have."""
    parts = {profile.part for profile in profiles_of(analysis).by_name.values()}
    missing = set[str]()
    if Part.EXPERTS not in parts:
        missing |= {"expert", *FOLDED}
    if Part.CORE not in parts:
        missing |= {"context", "ulysses"}
    # Ranks of a target compute on their own samples, whatever the model does with all of them.
    return missing | ({*REPLICAS, "expert"} if _joined(analysis) else set())


def _joined(analysis: Analysis) -> str:
    """The reason why samples cannot be computed apart from each other; "" where they can."""
    shapes = [analysis.graph.tensors[name].shape for name in analysis.graph.inputs]
    if not any(shape and shape[0] > 1 for shape in shapes):
        return ""
    try:
        micro_batch_options(analysis)
    except UsageError as error:
        return str(error).partition(": ")[2]
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """The limits of the schemes that the axes of a mesh are named after.

    `fixed`: products whose weights the target does not split.
    """

    analysis: Analysis = field(repr=False)
    fixed: frozenset[str] = frozenset()
    by_names: dict[tuple[str, ...], Possible] = field(default_factory=dict, repr=False)

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        names = tuple(axis.name for axis in mesh.axes)
        if names not in self.by_names:
            axes = tuple(SCHEMES[name] for name in names)
            scheme = Scheme(
                name=" x ".join(names), words="", axes=axes, named=names, fixed=self.fixed
            )
            self.by_names[names] = Possible(scheme=scheme, analysis=self.analysis)
        return self.by_names[names](analysis, mesh)


def require_said(plan: Plan, target: str) -> None:
    """Refuse a plan that the target cannot say, by what is no choice of the search."""
    convert(plan, target)
