"""The parts of a strategy checkpoint's file, validated on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from .errors import UsageError, unknown
from .file_limits import DEGREE, LAYERS, MICRO_BATCHES, TENSOR_BYTES
from .ir.dtype import FLOATS
from .ir.recipes import NAMES
from .order.schedules import SCHEDULES
from .sharding.gradient_formats import check_format
from .sharding.mesh import Axis, Mesh
from .sharding.schedule import UNIT_BYTES, Reductions, Schedule, Types


class Part(BaseModel):
    """A part of the file: it has only the named fields, and none of them changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _float(name: str) -> str:
    if name not in FLOATS:
        raise ValueError(unknown("floating-point type", name, FLOATS))
    return name


FloatName = Annotated[str, AfterValidator(_float), Field(json_schema_extra={"enum": list(FLOATS)})]
"""The name of a floating-point type."""


def _precision(name: str) -> str:
    if name not in NAMES:
        raise ValueError(unknown("precision", name, NAMES))
    return name


PrecisionName = Annotated[
    str, AfterValidator(_precision), Field(json_schema_extra={"enum": list(NAMES)})
]
"""The name of a recipe of precision."""


Count = Annotated[int, Field(ge=0, lt=TENSOR_BYTES)]
"""A number of bytes or elements."""


def _countable(shape: tuple[int, ...]) -> tuple[int, ...]:
    elements = 1
    for size in shape:
        elements *= size
        if elements >= TENSOR_BYTES:
            raise ValueError("the tensor has too many elements to be counted")
    return shape


Shape = Annotated[tuple[Count, ...], AfterValidator(_countable)]
"""The sizes of a tensor's dims."""


class InputSpec(Part):
    """Shape (of the global batch) and dtype of one model input."""

    shape: Shape
    dtype: str


class ModelSpec(Part):
    """The model of the plan, and how it runs.

    `dtype`: the floating-point type of its cast (null: it keeps its own). `precision`: the recipe
    of its products (null: they are in the type of their operands). `proof`: what the proof of its
    import says (empty: none was made). `flops`: of a step's
    products, by their type (`autopar.sharding.model_flops`; empty: not counted). `onnx`:
    whether it is an ONNX file. `values`: of its inputs that are constants; `outputs`: its tensors
    that are given in place of its outputs (empty: they are).
    """

    name: str
    fingerprint: str
    mode: Literal["train", "infer"]
    optimizer: str
    loss: str | None = None
    dtype: FloatName | None = None
    precision: PrecisionName | None = None
    proof: str = ""
    inputs: dict[str, InputSpec]
    flops: dict[str, Annotated[float, Field(ge=0)]] = {}
    onnx: bool = False
    values: dict[str, float | tuple[float, ...]] = {}
    outputs: tuple[str, ...] = ()


class AxisSpec(Part):
    """One mesh axis."""

    name: str
    size: int = Field(ge=1, le=DEGREE)
    level: str


class OperatorPlan(Part):
    """An operator's strategy: one factor (or R, B, P) for each mesh axis.

    `inputs` and `outputs` pair its tensors with the layouts that follow, for readers without the
    model. `region`: the name of what it is decided with; `leads`: whether that follows from it.
    """

    kind: str
    fingerprint: str
    strategy: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    region: SkipJsonSchema[str] = Field(default="", exclude=True)
    leads: SkipJsonSchema[bool] = Field(default=True, exclude=True)


class PlacedOperator(OperatorPlan):
    """An operator of a region; `place`: its number in the order of the model."""

    place: Count


class RegionPlan(Part):
    """Operators that are decided as one: their strategies follow from that of the operator `lead`.

    `strategy`: of the lead, one factor (or R, B, P) for each mesh axis.
    """

    lead: str
    strategy: tuple[str, ...]
    operators: dict[str, PlacedOperator]


def in_order(regions: object) -> object:
    """The operators of a file's regions, in the order of the model."""
    if not isinstance(regions, dict):
        return regions
    placed: list[tuple[int, str, object]] = []
    for name, region in regions.items():
        if not isinstance(region, dict) or "operators" not in region:
            # By itself, as before there were regions.
            placed.append((len(placed), name, region))
            continue
        read = RegionPlan.model_validate(region)
        if read.lead not in read.operators or read.operators[read.lead].strategy != read.strategy:
            raise ValueError(f"the strategy of {name!r} is not that of its lead {read.lead!r}")
        for operator, plan in read.operators.items():
            fields = {key: getattr(plan, key) for key in OperatorPlan.model_fields}
            fields |= {"region": name, "leads": operator == read.lead}
            placed.append((plan.place, operator, OperatorPlan(**fields)))
    placed.sort(key=lambda one: one[0])
    operators = {operator: plan for _, operator, plan in placed}
    if len(operators) < len(placed):
        raise ValueError("an operator is in two regions")
    return operators


def by_region(operators: Mapping[str, OperatorPlan]) -> dict[str, RegionPlan]:
    """The regions of operators, each in the place of its first one."""
    parts: dict[str, dict[str, PlacedOperator]] = {}
    for place, (name, plan) in enumerate(operators.items()):
        fields = {key: getattr(plan, key) for key in OperatorPlan.model_fields}
        parts.setdefault(plan.region or name, {})[name] = PlacedOperator(**fields, place=place)
    regions = {}
    for region, held in parts.items():
        lead = next((name for name, plan in held.items() if plan.leads), min(held))
        regions[region] = RegionPlan(lead=lead, strategy=held[lead].strategy, operators=held)
    return regions


class ParameterPlan(Part):
    """A parameter's storage layout, and the place of its optimizer state.

    That place is the device's memory or its host's.
    """

    shape: Shape
    dtype: str
    storage: str
    state: Literal["device", "host"] = "device"


class RulePlan(Part):
    """A sharding rule found by executing an operator, for its calls with one signature."""

    kind: str
    signature: str
    rule: str
    linear: tuple[tuple[int, ...], ...] = ()
    products: tuple[str, ...] = ()
    differentiable: bool = True
    saves: Literal["inputs", "output", ""] = "inputs"


class CollectivePlan(Part):
    """One priced collective of a step.

    `axis`: a mesh axis, or several (a x b). `tensor`: the one that it moves.
    """

    phase: str
    kind: str
    axis: str
    nbytes: Count
    seconds: float
    tensor: str


def _scheduled(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(unknown("pipeline schedule", name, SCHEDULES))
    return name


ScheduleName = Annotated[
    str, AfterValidator(_scheduled), Field(json_schema_extra={"enum": list(SCHEDULES)})
]
"""The name of a pipeline schedule."""


def _gradient_format(name: str) -> str:
    try:
        return check_format(name)
    except UsageError as error:
        raise ValueError(str(error)) from error


FormatName = Annotated[str, AfterValidator(_gradient_format)]
"""The name of a gradient format."""


class ReductionsPlan(Part):
    """The reduction of gradients, where it differs from sums in units of about equal bytes."""

    fused: tuple[tuple[str, ...], ...] = ()
    cuts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    local: tuple[str, ...] = ()
    formats: tuple[tuple[str, FormatName], ...] = ()
    weight: float = Field(default=1.0, gt=0)
    mean: bool = False


class SchedulePlan(Part):
    """The order and the number types of a step's work.

    `micro_batches`: equal parts of the global batch, run one after the other, their gradients added
    up. `recompute`: segments, each the names of operators whose outputs are computed again in the
    backward pass. `gathered`: parameters stored split and used whole are gathered once "per_step"
    and stay whole until its end (ZeRO 1 and 2), or once "per_pass" (ZeRO 3). `accumulated`:
    gradients of parameters gathered per step are added up "whole" and scattered once a step (ZeRO
    1), or added up as "shards" after every micro-batch (ZeRO 2). `pipeline`, `interleave`: the
    order in which stages run micro-batches, and the number of chunks of the model on each.
    `master`: the type in which trained parameters are stored and updated; `reduce`: the type in
    which their gradients travel and are added up (null: the type in which they are used).
    `unit_bytes`: the approximate size of the units in which parameters are gathered and their
    gradients reduced; `prefetch`: the segments between two rounds of a gather, and
    between its last round and the first reader. `reductions`: how gradients are reduced.
    `overlap_experts`: each backward pass is merged with the forward pass of another micro-batch, so
    that exchanges of rows of experts in one run under the other; with stages if `pipeline` does so.
    """

    micro_batches: int = Field(default=1, ge=1, le=MICRO_BATCHES)
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["per_step", "per_pass"] = "per_step"
    accumulated: Literal["whole", "shards"] = "whole"
    pipeline: ScheduleName = "1f1b"
    interleave: int = Field(default=1, ge=1, le=MICRO_BATCHES)
    master: FloatName | None = None
    reduce: FloatName | None = None
    unit_bytes: int = Field(default=UNIT_BYTES, ge=1, lt=TENSOR_BYTES)
    prefetch: int = Field(default=1, ge=0, le=DEGREE)
    reductions: ReductionsPlan = ReductionsPlan()
    overlap_experts: bool = False

    @property
    def types(self) -> Types:
        """The types of stored parameters and of gradients."""
        return Types(master=self.master, reduce=self.reduce)

    @property
    def in_stage(self) -> Schedule:
        """The part of the schedule inside one stage."""
        return Schedule(
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            gathered=self.gathered,
            accumulated=self.accumulated,
            unit_bytes=self.unit_bytes,
            prefetch=self.prefetch,
            types=self.types,
            reductions=Reductions(**dict(self.reductions)),
            overlap_experts=self.overlap_experts,
        )


class StagePlan(Part):
    """One pipeline stage, or one of its chunks.

    Chunk k lies on stage k modulo the number of stages.

    It holds the operators from `first` to the next one's `first`, in the model's order, on devices
    of its own. `cluster`: the pool of its devices in a cluster of several device types (empty: one
    type). `forward`, `backward`: predicted seconds of one micro-batch; both passes take `hidden`
    less where they are merged. `memory`: predicted peak bytes of one device. `moved`: seconds of a
    step's collectives, of all micro-batches (part of forward and backward); `once`: seconds of the
    parameters' collectives once a step. `handed`: bytes of a micro-batch that one device sends to
    the next stage, in `send` seconds.
    """

    first: str
    mesh: tuple[AxisSpec, ...]
    cluster: str = ""
    forward: float
    backward: float
    memory: float
    hidden: float = 0.0
    moved: float = 0.0
    once: float = 0.0
    handed: float = 0.0
    send: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices of the stage."""
        return mesh_of(self.mesh).devices


class Predicted(Part):
    """Seconds of one step and bytes of one device, by part.

    `overlapped`: seconds of the communication that run under computation. `bubble`: seconds that
    the slowest stage waits for others. `host_memory`: further bytes in the memory of the device's
    host; `streamed`: seconds that they add to the update. All figures are those of the slowest
    stage and of the fullest device.
    """

    step: float
    forward: float
    backward: float
    update: float
    communication: float
    overlapped: float = 0.0
    bubble: float = 0.0
    memory: float
    memory_parts: dict[str, float]
    host_memory: float = 0.0
    streamed: float = 0.0


class RoutingPlan(Part):
    """The stated routing of tokens to experts, and what the busiest rank of experts then needs.

    `kind`: "even", "worst" (as many of each token's experts as possible on one rank) or "counts":
    the rows of each expert, by layer of experts (one row: of all layers). `imbalance`: rows of the
    busiest rank over the mean; `step`: seconds of a step that waits for it. `memory`: bytes of the
    fullest device with that many rows; `at`: with 1, 2 and 4 times the mean rows. `most`: the
    multiple of the mean rows from which on the plan exceeds the memory (null: no routing does).
    """

    kind: Literal["even", "worst", "counts"]
    counts: tuple[tuple[int, ...], ...] = Field(default=(), max_length=LAYERS)
    imbalance: float = Field(ge=1)
    step: float
    memory: float
    at: tuple[float, float, float]
    most: float | None


class Provenance(Part):
    """The origin of the plan: version of autopar, search method, seed, and the optimality gap.

    `objective`: seconds as the search adds them up. `lower_bound`: a lower bound on the seconds of
    every plan in reach of the search (on meshes of up to two axes, unless one was given).
    `bound_of`: the candidate that holds it. `gap`: the predicted step's excess over it, as a share
    (null: not bounded). `complete`: whether the search ran to its end; if it was interrupted, the
    gap counts everything left undone.
    `asked_gap`, `asked_seconds`: at which gap, and after how many seconds, it was asked to end.
    `inside`: the share of the step that stages which begin inside layers would save at most (0:
    nothing, or some do).
    """

    autopar: str
    method: str
    seed: int = 0
    objective: float
    lower_bound: float
    bound_of: str = ""
    gap: float | None
    complete: bool = True
    asked_gap: float | None = None
    asked_seconds: float | None = None
    inside: Annotated[float, Field(ge=0, le=1)] = 0.0


def mesh_of(axes: tuple[AxisSpec, ...]) -> Mesh:
    """The mesh of the file's axes."""
    return Mesh(axes=tuple(Axis(name=axis.name, size=axis.size, level=axis.level) for axis in axes))
