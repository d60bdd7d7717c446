"""A plan's work by mesh axis and in time, from its file alone, in the common words of training configurations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import UsageError
from ..plan import Plan
from ..plan_checks import require_consistent
from ..plan_parts import OperatorPlan
from ..printable import printable
from ..sharding.layout import Kind, Layout, Placement, parse_layout
from ..sharding.rules import RULES
from ..sharding.rules.experts import EXPERTS
from ..sharding.schedule import zero_stage

Work = Literal["data", "tensor", "sequence", "expert", "idle"]
EMBEDDINGS = ("aten.embedding.default", "onnx.Gather")
LINEAR = (
    "aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "onnx.MatMul", "onnx.Gemm",
)  # fmt: skip
"""Products of values and a weight of two dims."""
NORMS = (
    "aten.layer_norm.default", "aten.rms_norm.default", "aten.mul.Tensor", "onnx.LayerNormalization", "onnx.RMSNormalization", "onnx.Mul",
)  # fmt: skip
"""Operators that scale values [batch, sequence, features] by a weight of the features."""
MOST = 0.9
"""Smallest share of recomputed operators at which all of them count as recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The text of a file, and sentences on the parts of the plan that it leaves out."""

    text: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWork:
    """The work of a mesh axis.

    `stored_split`: whether parameters that are used whole on it are stored split. `repeated`: the number of products
    that the plan repeats on every device of the axis; the target splits them like the others, with the same values.
    `mixed`: operators that do other work, by its kind. `share`: the share of operators that do the axis's own work.
    """

    name: str
    size: int
    work: Work
    stored_split: bool
    repeated: int = 0
    mixed: Mapping[Work, Sequence[str]] = field(default_factory=dict)
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A plan by degrees.

    `zero`: the ZeRO stage of the data axes, 0 to 3. `sequence_parallel`: whether activations between the products of a
    tensor axis are split along the sequence. `lost`: sentences on the parts that no target can say.
    """

    plan: Plan
    axes: tuple[AxisWork, ...]
    zero: int
    sequence_parallel: bool
    recompute: Literal["none", "selective", "full"]
    stages: int
    batch: int
    sequence: int | None
    lost: tuple[str, ...]

    def degree(self, *work: Work) -> int:
        """Devices along all axes of these kinds of work."""
        return math.prod(axis.size for axis in self.axes if axis.work in work)

    @property
    def ranks(self) -> int:
        """Ranks of the target: the devices along axes on which they do something."""
        return self.stages * math.prod(axis.size for axis in self.axes if axis.work != "idle")

    @property
    def shards(self) -> int:
        """Devices of the data axes over which parameters are stored split."""
        return math.prod(axis.size for axis in self.axes if axis.work == "data" and axis.stored_split)

    @property
    def local_batch(self) -> int:
        """Samples of a micro-batch on one device; devices that split experts split the batch as well."""
        return self.batch // (self.plan.schedule.micro_batches * self.degree("data", "expert"))

    def refuse(self, target: str, *lacks: str) -> None:
        """Raise a `UsageError` that lists `lacks`, unless all of them are empty."""
        found = [lack for lack in lacks if lack]
        if found:
            raise UsageError(f"{target} cannot express this plan: {'; '.join(found)}")

    def lacking(self, work: Work, words: str) -> str:
        """The complaint of a target without a kind of work about the axes that have it; "" if none has."""
        names = [f"{axis.name}={axis.size}" for axis in self.axes if axis.work == work and axis.size > 1]
        return f"{words} over {', '.join(names)}" if names else ""

    def mixed(self, share: float = MOST) -> Iterable[str]:
        """Complaints of a target with one kind of work per axis, where less than `share` of the operators do it."""
        for axis in self.axes:
            if axis.mixed and axis.share < share:
                yield f"on axis {axis.name} most operators {_WORDS[axis.work]}, but {_said(axis)}"

    def minor(self) -> Iterable[str]:
        """Losses of such a target where a few operators do other work: they follow the rest, with the same values."""
        for axis in self.axes:
            if axis.mixed and axis.share >= MOST:
                lost = f"of the operators that {_WORDS[axis.work]} along {axis.name} as all others do, the plan has {_said(axis)}"
                yield printable(f"{lost}: values stay the same, time and memory do not", lines=False)

    def optimizer_beyond(self, known: Collection[str]) -> str:
        """The complaint of a target with only the `known` optimizers; "" if the plan's is one of them."""
        model = self.plan.model
        return f"the optimizer {model.optimizer}" if model.mode == "train" and model.optimizer not in known else ""

    def pipeline_beyond(self, known: Collection[str]) -> str:
        """The complaint of a target with only the `known` pipeline schedules; "" if the plan's is one of them."""
        pipeline = self.plan.schedule.pipeline
        return f"the pipeline schedule {pipeline}" if self.stages > 1 and pipeline not in known else ""

    def split_beyond(self) -> str:
        """The complaint of a target that splits only the weights of linear layers, embeddings and experts."""
        odd = {operator.kind: name for name, operator in reversed(self.plan.operators.items()) if self._splits_odd(operator)}
        return "; ".join(f"splitting the weights of {kind} (such as {name})" for kind, name in odd.items())

    def _splits_odd(self, operator: OperatorPlan) -> bool:
        if not is_product(operator) or operator.kind in (*LINEAR, EXPERTS):
            return False
        weights = [layout for name, layout in placements(operator.inputs) if len(getattr(self.plan.parameters.get(name), "shape", ())) > 1]
        return any(_split(place) for layout in weights for place in layout)

    def staged(self) -> str:
        """The complaint of a target without pipelines; "" for a single stage."""
        return f"{self.stages} pipeline stages" if self.stages > 1 else ""


def setup_of(plan: Plan) -> Setup:
    """The setup of a plan."""
    require_consistent(plan)
    if any(stage.mesh != plan.mesh for stage in plan.stages):
        raise UsageError("no target can express this plan: its stages are on different meshes")
    axes = tuple(_axis(plan, index) for index in range(len(plan.mesh)))
    schedule = plan.schedule
    split = any(axis.stored_split for axis in axes if axis.work == "data")
    zero = zero_stage(schedule.gathered, schedule.accumulated) if split else 0
    recomputed = sum(map(len, schedule.recompute))
    shapes = [spec.shape for spec in plan.model.inputs.values() if spec.shape]
    return Setup(
        plan=plan,
        axes=axes,
        zero=zero,
        sequence_parallel=any(_between_sequences(plan, i) for i, axis in enumerate(axes) if axis.work == "tensor"),
        recompute="none" if not recomputed else "full" if recomputed >= MOST * len(plan.operators) else "selective",
        stages=max(len(plan.stages) // schedule.interleave, 1),
        batch=shapes[0][0] if shapes else 1,
        sequence=shapes[0][1] if shapes and len(shapes[0]) > 1 else None,
        lost=tuple(printable(note, lines=False) for note in _lost(plan, axes)),
    )


def placements(places: Iterable[tuple[str, str]]) -> list[tuple[str, Layout]]:
    """Tensors with their layouts."""
    return [(name, parse_layout(text)) for name, text in places]


def is_product(operator: OperatorPlan) -> bool:
    """Whether the operator multiplies."""
    return operator.kind in RULES and bool(RULES[operator.kind].products)


def _axis(plan: Plan, index: int) -> AxisWork:
    """The work of most products on the axis, and the other kinds of work there."""
    axis = plan.mesh[index]
    names: dict[Work, list[str]] = defaultdict(list)
    for name, operator in plan.operators.items():
        does = _work(plan, operator, index)
        if does is not None:
            names[does].append(name)
    kinds = [does for does in names if does != "idle"]
    if "expert" in kinds and set(kinds) <= {"expert", "data"}:
        kinds = ["expert"]
    work: Work = max(kinds, key=lambda does: len(names[does])) if kinds else "idle"
    repeated = len(names["idle"]) if work not in ("idle", "tensor") else 0
    return AxisWork(
        name=axis.name, size=axis.size, work=work, stored_split=_stored_split(plan, index), repeated=repeated,
        mixed={does: tuple(names[does]) for does in kinds if does != work},
        share=len(names[work]) / sum(len(names[does]) for does in kinds) if kinds else 1.0,
    )  # fmt: skip


def _said(axis: AxisWork) -> str:
    return ", ".join(f"{len(names)} {_WORDS[does]} (such as {names[0]})" for does, names in axis.mixed.items())


_WORDS: dict[Work, str] = {
    "data": "split the batch", "tensor": "split their weights", "sequence": "split the sequence", "expert": "split the experts",
    "idle": "are repeated",
}  # fmt: skip


def _work(plan: Plan, operator: OperatorPlan, index: int) -> Work | None:
    """The work on an axis of a weight's product with a value, or of a split embedding; None for others."""
    if not is_product(operator) and operator.kind not in EMBEDDINGS:
        return None
    inputs = placements(operator.inputs)
    weights = [layout[index] for name, layout in inputs if name in plan.parameters and len(plan.parameters[name].shape) > 1]
    values = [layout[index] for name, layout in inputs if name not in plan.parameters]
    if not weights or not values:
        return None
    if any(_split(place) for place in weights):
        return "expert" if operator.kind == EXPERTS and any(p.dim == 0 for p in weights if _split(p)) else "tensor"
    if operator.kind in EMBEDDINGS:
        return None
    if not _split(values[0]):
        return "idle"
    return "data" if values[0].dim == 0 else "sequence"


def _split(place: Placement) -> bool:
    return place.kind is Kind.SPLIT


def _stored_split(plan: Plan, index: int) -> bool:
    """Whether some parameter is stored split on an axis on which no operator reads it split."""
    uses = _uses(plan)
    for name, parameter in plan.parameters.items():
        stored = parse_layout(parameter.storage)[index]
        if _split(stored) and not any(_split(layout[index]) for layout in uses.get(name, [])):
            return True
    return False


def _uses(plan: Plan) -> dict[str, list[Layout]]:
    """The layouts in which operators read each parameter."""
    found: dict[str, list[Layout]] = {}
    for operator in plan.operators.values():
        for name, layout in placements(operator.inputs):
            if name in plan.parameters:
                found.setdefault(name, []).append(layout)
    return found


def _between_sequences(plan: Plan, index: int) -> bool:
    """Whether norms have their values split along dim 1."""
    for operator in plan.operators.values():
        names = [name for name, _ in operator.inputs]
        if operator.kind in NORMS and any(name in plan.parameters for name in names):
            values = [layout[index] for name, layout in placements(operator.inputs) if name not in plan.parameters]
            if values and _split(values[0]) and values[0].dim == 1:
                return True
    return False


def _lost(plan: Plan, axes: Sequence[AxisWork]) -> Iterable[str]:
    """Sentences on changes in where things are stored and when they travel; no value changes."""
    for axis in axes:
        if axis.work == "idle" and axis.size > 1:
            yield f"the devices along {axis.name}={axis.size} repeat each other's work, so the target goes without them"
        if axis.stored_split and axis.work != "data" and axis.size > 1:
            yield f"parameters stored split over {axis.name}, which is no data axis, are stored whole there"
        if axis.repeated and axis.size > 1:
            what = "the sequence" if axis.work == "sequence" else "the batch"
            yield f"{axis.repeated} products that every device along {axis.name} repeats split {what} there as well: values stay the same"
    inner = [level.level for level, axis in zip(plan.mesh, axes, strict=True) if axis.work == "data" and axis.size > 1]
    for level, axis in zip(plan.mesh, axes, strict=True):
        if axis.work == "tensor" and inner and level.level != inner[-1] and plan.mesh[-1].name != axis.name:
            yield f"weights are split over neighbouring devices, not along {axis.name}, which the plan has on level {level.level}"
    if plan.schedule.reductions.formats:
        yield f"gradients of {len(plan.schedule.reductions.formats)} parameters travel uncompressed"
    if hosts := sum(p.state == "host" for p in plan.parameters.values()):
        yield f"optimizer state of {hosts} parameters in host memory is left to the target's own offloading"
    if plan.unused:
        yield f"{plan.unused} devices of the cluster stay idle"
