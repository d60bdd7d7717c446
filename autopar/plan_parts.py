"""The parts of a strategy checkpoint: what its file holds, validated on load."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .errors import UsageError, unknown
from .ir.dtype import FLOATS
from .limits import MICRO_BATCHES
from .order.schedules import SCHEDULES
from .sharding.gradient_formats import check_format
from .sharding.mesh import Axis, Mesh
from .sharding.schedule import UNIT_BYTES, Reductions, Schedule, Types


class Part(BaseModel):
    """Nothing beside the named fields, and nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _float(name: str) -> str:
    if name not in FLOATS:
        raise ValueError(unknown("floating-point type", name, FLOATS))
    return name


FloatName = Annotated[str, AfterValidator(_float), Field(json_schema_extra={"enum": list(FLOATS)})]
"""The name of a floating-point type."""


class InputSpec(Part):
    """Shape (of the global batch) and dtype of one model input."""

    shape: tuple[int, ...]
    dtype: str


class ModelSpec(Part):
    """Which model the plan is for, and how it is run; `dtype`: the floating-point type to which it was cast (null: it keeps its own)."""

    name: str
    fingerprint: str
    mode: Literal["train", "infer"]
    optimizer: str
    loss: str | None = None
    dtype: FloatName | None = None
    inputs: dict[str, InputSpec]


class AxisSpec(Part):
    """One mesh axis."""

    name: str
    size: int = Field(ge=1)
    level: str


class OperatorPlan(Part):
    """An operator's strategy: one factor (or R, B, P) for each mesh axis.

    `inputs` and `outputs` pair its tensors with the layouts that follow, for those who read the plan without the model.
    """

    kind: str
    fingerprint: str
    strategy: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()


class ParameterPlan(Part):
    """A parameter's storage layout, and where its optimizer state is: on the device, or in the memory of the device's host."""

    shape: tuple[int, ...]
    dtype: str
    storage: str
    state: Literal["device", "host"] = "device"


class RulePlan(Part):
    """A sharding rule that was found by executing the operator, for its calls with one signature."""

    kind: str
    signature: str
    rule: str
    linear: tuple[tuple[int, ...], ...] = ()
    products: tuple[str, ...] = ()
    differentiable: bool = True
    saves: Literal["inputs", "output", ""] = "inputs"


class CollectivePlan(Part):
    """One collective of a step, as priced: its phase, kind, mesh axis, bytes and seconds, and the tensor that it moves."""

    phase: str
    kind: str
    axis: str
    nbytes: int
    seconds: float
    tensor: str


def _scheduled(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(unknown("pipeline schedule", name, SCHEDULES))
    return name


ScheduleName = Annotated[str, AfterValidator(_scheduled), Field(json_schema_extra={"enum": list(SCHEDULES)})]
"""The name of a pipeline schedule."""


def _gradient_format(name: str) -> str:
    try:
        return check_format(name)
    except UsageError as error:
        raise ValueError(str(error)) from error


FormatName = Annotated[str, AfterValidator(_gradient_format)]
"""The name of a gradient format."""


class ReductionsPlan(Part):
    """How gradients are brought home, where it is another way than in units of about equal bytes, summed.

    `fused`: sets of parameters, each a unit of its own. `cuts`: the other parameters, in the order in which the backward pass gives their
    gradients, make a unit up to each of these numbers, and one of the rest. `local`: parameters of which every rank has its own, whose
    gradients are not summed. Gradients are multiplied by `weight` and, with `mean`, divided by the number of ranks that share them.
    `formats`: parameters whose gradients travel in another format where they are summed whole: a floating-point type, or low-rank factors
    (`powersgd-R` of rank R, `powersgd/F` of a share 1 / F of the elements).
    """

    fused: tuple[tuple[str, ...], ...] = ()
    cuts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    local: tuple[str, ...] = ()
    formats: tuple[tuple[str, FormatName], ...] = ()
    weight: float = Field(default=1.0, gt=0)
    mean: bool = False


class SchedulePlan(Part):
    """When the work of a step is done, and in which types, beside where.

    `micro_batches`: equal parts of the global batch, run one after the other, their gradients added up. `recompute`: segments, each
    the names of operators whose outputs are made again in the backward pass. `gathered`: parameters stored split and used whole
    are "kept" from their first use to the backward pass (ZeRO 1 and 2) or gathered "again" (ZeRO 3). `accumulated`: gradients of kept
    parameters are added up "whole" and scattered once a step (ZeRO 1), or as "shards" after every micro-batch (ZeRO 2). `pipeline`,
    `interleave`: the order in which stages run micro-batches, and how many chunks of the model each holds. `master`: the type in which
    trained parameters are stored and updated; `reduce`: that in which their gradients travel and are added up (null: the type in which
    they are used). `unit_bytes`, `prefetch`: parameters are gathered, and their gradients reduced, in units of about so many bytes, so many
    segments of the model ahead. `reductions`: how gradients are brought home.
    """

    micro_batches: int = Field(default=1, ge=1, le=MICRO_BATCHES)
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["kept", "again"] = "kept"
    accumulated: Literal["whole", "shards"] = "whole"
    pipeline: ScheduleName = "1f1b"
    interleave: int = Field(default=1, ge=1)
    master: FloatName | None = None
    reduce: FloatName | None = None
    unit_bytes: int = Field(default=UNIT_BYTES, ge=1)
    prefetch: int = Field(default=1, ge=0)
    reductions: ReductionsPlan = ReductionsPlan()

    @property
    def types(self) -> Types:
        """The types of stored parameters and of gradients."""
        return Types(master=self.master, reduce=self.reduce)

    @property
    def in_stage(self) -> Schedule:
        """The part of it that concerns one stage."""
        return Schedule(
            micro_batches=self.micro_batches, recompute=self.recompute, gathered=self.gathered, accumulated=self.accumulated,
            unit_bytes=self.unit_bytes, prefetch=self.prefetch, types=self.types, reductions=Reductions(**dict(self.reductions)),
        )  # fmt: skip


class StagePlan(Part):
    """One pipeline stage (or one of its chunks, where stages are interleaved: chunk k of p stages lies on the devices of stage k modulo p).

    It holds the operators from `first` on, in the model's order, to where the next one begins, on devices of its own.

    `cluster`: the part of a cluster of several device types that its devices belong to (empty: there is one type). `forward`,
    `backward`: predicted seconds of one micro-batch. `memory`: predicted bytes of one of its devices at the peak. `moved`, `once`: seconds
    of the collectives of a step, of all micro-batches (within forward and backward), and of parameters once. `handed`: bytes of a
    micro-batch that one of its devices sends to the next stage, in `send` seconds.
    """

    first: str
    mesh: tuple[AxisSpec, ...]
    cluster: str = ""
    forward: float
    backward: float
    memory: float
    moved: float = 0.0
    once: float = 0.0
    handed: float = 0.0
    send: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices of the stage."""
        return mesh_of(self.mesh).devices


class Predicted(Part):
    """Seconds of one step and bytes of one device, by part; of the communication, `overlapped` seconds run under computation.

    `bubble`: seconds that the slowest stage waits for others. `host_memory`: bytes beside, in the memory of the device's host, and
    `streamed`: by how many seconds they make the update longer. All figures are those of the slowest stage, and of the fullest device.
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


class Provenance(Part):
    """Who made the plan: version of autopar, search method, seed, and the optimality gap.

    `objective`: seconds as the search adds them up. `lower_bound`: seconds that no plan undercuts of all that the search could have tried
    (on meshes of up to two axes, unless one was given); `gap`: of the predicted step above it, as a share of it (null: not bounded).
    `complete`: whether the search ran to its end or was interrupted, when the gap counts all that it left undone.
    """

    autopar: str
    method: str
    seed: int = 0
    objective: float
    lower_bound: float
    gap: float | None
    complete: bool = True


def mesh_of(axes: tuple[AxisSpec, ...]) -> Mesh:
    """The mesh of the file's axes."""
    return Mesh(axes=tuple(Axis(name=axis.name, size=axis.size, level=axis.level) for axis in axes))
