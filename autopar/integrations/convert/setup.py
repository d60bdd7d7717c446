"""A plan's work by mesh axis and in time, in the common words of training configurations.

It is read off the plan's file alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.costmodel.frameworks import (
    Framework,
    changed,
    framework_named,
    framework_of,
    target_named,
)
from autopar.errors import UsageError
from autopar.ir.dtype import HALVES
from autopar.ir.recipes import ATTENTIONS, VIEWS
from autopar.plan import Plan
from autopar.plan_checks import require_consistent
from autopar.plan_parts import OperatorPlan
from autopar.printable import printable
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.schedule import zero_stage
from autopar.units import bytes_text

from .axis_work import WORDS, AxisWork, Work, axis_work, is_product, is_split, placements
from .costs import bytes_of, elements
from .splittable import Owners, Splittable

Recompute = Literal["none", "selective", "alternate", "core_attn", "full"]
NORMS = ("aten.layer_norm.default", "aten.rms_norm.default", "aten.mul.Tensor")
"""Operators that scale values [batch, sequence, features] by a weight of the features."""
IMAGE_DIMS = 4
"""The dims of a batch of images [batch, channels, height, width], which has no sequence."""
MOST = 0.9
"""Smallest share of recomputed operators at which all of them count as recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The text of a file, and sentences on the parts of the plan that it leaves out."""

    text: str
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A plan by degrees.

    `zero`: the ZeRO stage of the data axes, 0 to 3. `sequence_parallel`: whether activations
    between the products of a tensor axis are split along the sequence. `lost`: sentences on the
    parts that no target can say.
    """

    plan: Plan
    axes: tuple[AxisWork, ...]
    zero: int
    sequence_parallel: bool
    recompute: Recompute
    stages: int
    batch: int
    sequence: int | None
    lost: tuple[str, ...]

    def degree(self, *work: Work) -> int:
        """Devices along all axes of these kinds of work."""
        return math.prod(axis.size for axis in self.axes if axis.work in work)

    @property
    def experts(self) -> int:
        """Devices over which experts are split, among them those that split other weights."""
        return self.degree("expert") * math.prod(axis.size for axis in self.axes if axis.folded)

    @property
    def inside_experts(self) -> int:
        """Devices over which the weights of each expert are split."""
        return self.degree("tensor") // math.prod(axis.size for axis in self.axes if axis.folded)

    def framework(self, target: str) -> Framework:
        """The framework that the plan is priced for, if that is the target's, else the target's."""
        if target_named(self.plan.target)[0] != target:
            return framework_of(target, self.zero)
        return changed(framework_named(self.plan.framework), self.plan.habits)

    @property
    def ranks(self) -> int:
        """Ranks of the target: the devices along axes on which they do something."""
        return self.stages * math.prod(axis.size for axis in self.axes if axis.work != "idle")

    @property
    def shards(self) -> int:
        """Devices of the data axes over which parameters are stored split."""
        return math.prod(
            axis.size for axis in self.axes if axis.work == "data" and axis.stored_split
        )

    @property
    def local_batch(self) -> int:
        """Samples of a micro-batch on one device.

        Devices that split experts split the batch as well.
        """
        return self.batch // (self.plan.schedule.micro_batches * self.degree("data", "expert"))

    @property
    def has_experts(self) -> bool:
        """Whether the model has layers of experts."""
        return any(operator.kind == EXPERTS for operator in self.plan.operators.values())

    @property
    def gradient_type(self) -> str:
        """The type in which gradients travel: the plan's, else that of the computation."""
        return self.plan.schedule.reduce or self.parameter_type(HALVES) or "float32"

    def parameter_type(self, known: Collection[str]) -> str | None:
        """The type of parameters, if it is the only one that a target knows."""
        types = {parameter.dtype for parameter in self.plan.parameters.values()} & set(known)
        return types.pop() if len(types) == 1 else None

    def refuse(self, target: str, *lacks: str) -> None:
        """Raise a `UsageError` that lists `lacks`, unless all of them are empty."""
        complaints = [lack for lack in lacks if lack]
        if complaints:
            what = "express this plan"
            rest = f"plan --target {target} stays within what it can"
            # What a plan for this very target lacks is the model's.
            if self.plan.target == target:
                what = "train this model"
                rest = "plan for another --target"
            raise UsageError(f"{target} cannot {what}: {'; '.join(complaints)}; {rest}")

    def mixed(self, share: float = MOST) -> Iterable[str]:
        """Complaints of a target that allows one kind of work per axis.

        An axis is complained about where less than `share` of its operators do its work.
        """
        for axis in self.axes:
            if axis.mixed and axis.share < share:
                yield f"on axis {axis.name} most operators {WORDS[axis.work]}, but {axis.odd()}"

    def minor(self) -> Iterable[str]:
        """Losses of such a target where a few operators do other work.

        The target gives them the work of the rest, with the same values.
        """
        for axis in self.axes:
            if axis.mixed and axis.share >= MOST:
                lost = (
                    f"of the operators that {WORDS[axis.work]} along {axis.name} as all others do, "
                    f"the plan has {axis.odd()}: values stay the same, time and memory do not"
                )
                yield printable(lost, lines=False)

    def optimizer_beyond(self, known: Collection[str]) -> str:
        """The complaint of a target with only the `known` optimizers; "" if one is the plan's."""
        model = self.plan.model
        if model.mode != "train" or model.optimizer in known:
            return ""
        return f"the optimizer {model.optimizer}"

    def pipeline_beyond(self, known: Collection[str]) -> str:
        """The complaint of a target with only the `known` schedules; "" if one is the plan's."""
        pipeline = self.plan.schedule.pipeline
        if self.stages == 1 or pipeline in known:
            return ""
        return f"the pipeline schedule {pipeline}"

    def split_beyond(self, known: Splittable) -> Iterable[str]:
        """Complaints of a target that splits the weights of `known` products alone."""
        owners = Owners.of(self.plan.operators)
        odd = {
            operator.kind: name
            for name, operator in reversed(self.plan.operators.items())
            if is_product(operator) and self._splits_odd(name, operator, known, owners)
        }
        what = "modules that are no nn.Linear: " if known.modules else ""
        for kind, name in odd.items():
            shown = printable(name, lines=False)
            yield f"splitting the weights of {what}{kind} (such as {shown})"

    def _splits_odd(
        self, name: str, operator: OperatorPlan, known: Splittable, owners: Owners
    ) -> bool:
        """Whether an operator splits a weight that is none of the `known` ones."""
        held = [
            (tensor, layout)
            for tensor, layout in placements(operator.inputs)
            if tensor in self.plan.parameters
        ]
        return any(
            any(map(is_split, layout)) and not known.takes(name, operator.kind, names, owners)
            for tensor, layout in held
            if len(self.plan.parameters[tensor].shape) > 1
            for names in ([tensor, *(name for name, _ in held if name != tensor)],)
        )

    def of_whole_stages(self) -> Iterable[str]:
        """Losses of a target whose stages are FSDP2's under torch's pipelines.

        These add up whole gradients and reduce them once a step, whatever the policy of gathers:
        with parameters that stay whole (`reshard_after_forward=False`) that is ZeRO 1.
        """
        if self.stages > 1 and self.zero > 1:
            yield (
                "gradients are added up whole and reduced once a step (ZeRO 1): "
                f"{self.gathered(self.gradient_type)}"
            )
        if self.stages > 1 and self.zero == 3:
            yield (
                "parameters stay gathered from a stage's first backward pass to the end of the "
                f"step: {self.gathered()}"
            )

    def gathered(self, dtype: str | None = None) -> str:
        """The bytes that whole copies of parameters take beyond shards; `dtype`: in that type."""
        data = [number for number, axis in enumerate(self.axes) if axis.work == "data"]
        sizes = [bytes_of(elements(self.plan, whole), dtype) for whole in (data, ())]
        return f"{bytes_text(sizes[0] - sizes[1])} more on a device"

    def widened(self) -> Iterable[str]:
        """The loss of a target that always updates parameters of 16 bits in float32."""
        narrow = self.parameter_type(HALVES) is not None and self.plan.schedule.master is None
        if narrow and self.plan.model.mode == "train":
            more = bytes_text(bytes_of(elements(self.plan), "float32"))
            yield f"parameters are stored and updated in float32 as well: {more} more on a device"

    def staged(self) -> str:
        """The complaint of a target without pipelines; "" for a single stage."""
        return f"{self.stages} pipeline stages" if self.stages > 1 else ""


def setup_of(plan: Plan) -> Setup:
    """The setup of a plan; `UsageError` if its stages are on different meshes."""
    require_consistent(plan)
    if any(stage.mesh != plan.mesh for stage in plan.stages):
        raise UsageError("no target can express this plan: its stages are on different meshes")
    axes = tuple(axis_work(plan, index) for index in range(len(plan.mesh)))
    schedule = plan.schedule
    zero = 0
    # Frameworks share out all other parameters over the ranks of experts, too.
    if any(axis.stored_split for axis in axes if axis.work in ("data", "expert")):
        zero = zero_stage(schedule.gathered, schedule.accumulated)
    # The plan does not name the dims of inputs: the first is taken for [batch, sequence, ...], as
    # the models of these projects have it; four dims are those of images.
    shape = next((spec.shape for spec in plan.model.inputs.values() if spec.shape), (1,))
    return Setup(
        plan=plan,
        axes=axes,
        zero=zero,
        sequence_parallel=any(
            axis.work == "tensor" and _between_sequences(plan, index)
            for index, axis in enumerate(axes)
        ),
        recompute=_recompute(plan),
        stages=max(len(plan.stages) // schedule.interleave, 1),
        batch=shape[0],
        sequence=shape[1] if 1 < len(shape) < IMAGE_DIMS else None,
        lost=tuple(printable(note, lines=False) for note in _losses(plan, axes)),
    )


UNMERGED = "passes of two micro-batches are not merged to hide exchanges of experts"


def _recompute(plan: Plan) -> Recompute:
    recomputed = sum(map(len, plan.schedule.recompute))
    if not recomputed:
        return "none"
    if recomputed >= MOST * len(plan.operators):
        return "full"
    repeated = [plan.operators[name] for names in plan.schedule.recompute for name in names]
    if all(operator.kind in ATTENTIONS | VIEWS for operator in repeated):
        return "core_attn"
    weights = {name for name, one in plan.parameters.items() if len(one.shape) > 1}
    products = [
        operator
        for operator in repeated
        if is_product(operator) and any(name in weights for name, _ in operator.inputs)
    ]
    return "alternate" if products else "selective"


def _between_sequences(plan: Plan, index: int) -> bool:
    """Whether norms have their values split along dim 1."""
    for operator in plan.operators.values():
        inputs = placements(operator.inputs)
        values = [layout[index] for name, layout in inputs if name not in plan.parameters]
        if operator.kind not in NORMS or len(values) in (0, len(inputs)):
            continue
        if is_split(values[0]) and values[0].dim == 1:
            return True
    return False


def _losses(plan: Plan, axes: Sequence[AxisWork]) -> Iterable[str]:
    """Sentences on changes in where things are stored and when they travel; no value changes."""
    for axis in axes:
        if axis.size > 1:
            yield from _axis_losses(axis)
    yield from _reordered(plan, axes)
    if plan.schedule.reductions.formats:
        yield f"gradients of {len(plan.schedule.reductions.formats)} parameters travel uncompressed"
    if hosts := sum(parameter.state == "host" for parameter in plan.parameters.values()):
        yield (
            f"optimizer state of {hosts} parameters in host memory is left to the target's own "
            f"offloading: without it {bytes_text(plan.predicted.host_memory)} more on a device"
        )
    if plan.schedule.overlap_experts:
        yield UNMERGED
    if plan.unused:
        stay = "device of the cluster stays" if plan.unused == 1 else "devices of the cluster stay"
        yield f"{plan.unused} {stay} idle"


def _axis_losses(axis: AxisWork) -> Iterable[str]:
    if axis.work == "idle":
        yield (
            f"the devices along {axis.name}={axis.size} repeat each other's work, so the target "
            "goes without them"
        )
    if axis.work == "expert" and axis.whole_experts:
        yield (
            f"experts are stored split over {axis.name}={axis.size}, which saves memory; the plan "
            "stores them whole and computes with a part"
        )
    if axis.stored_split and axis.work not in ("data", "expert"):
        yield (
            f"parameters stored split over {axis.name}, which is no data axis, are stored whole "
            "there"
        )
    if axis.repeated:
        dims: dict[Work, str] = {"sequence": "the sequence", "ulysses": "the sequence"}
        split = {**dims, "tensor": "their heads"}.get(axis.work, "the batch")
        yield (
            f"{axis.repeated} products that every device along {axis.name} repeats split {split} "
            "there as well: values stay the same"
        )


def _reordered(plan: Plan, axes: Sequence[AxisWork]) -> Iterable[str]:
    """Sentences on tensor axes outside data axes: targets have them inside."""
    pairs = list(zip(plan.mesh, axes, strict=True))
    data = [spec.level for spec, axis in pairs if axis.work == "data" and axis.size > 1]
    if not data:
        return
    for spec, axis in pairs:
        innermost = plan.mesh[-1].name == axis.name
        if axis.work == "tensor" and spec.level != data[-1] and not innermost:
            yield (
                f"weights are split over neighbouring devices, not along {axis.name}, which the "
                f"plan has on level {spec.level}"
            )
