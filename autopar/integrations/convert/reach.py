"""The plans that a target can say: one value, by which plans are refused and searched.

    kind of mesh axis    names
    data                 data: replicas                  shard: parameters are stored split
    expert               expert: experts are split, the batch of everything else
                         expert-shard: the same, with all other parameters stored split
    sequence             context: ring attention         ulysses: heads inside attention
    weights              tensor: values between whole    tensor-sp: split along the sequence
                         tensor-ep, tensor-sp-ep: the same, with whole experts on these ranks

`autopar plan --target TARGET` searches within the reach of a target, so that its plan is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .axis_work import AxisWork, Work
from .setup import Setup
from .splittable import BY_DEGREES, Splittable

WEIGHTS = ("tensor", "tensor-sp")
FOLDED = ("tensor-ep", "tensor-sp-ep")
"""Weights are split, and whole experts lie on the same ranks."""
KINDS = (
    ("data",),
    ("shard",),
    ("expert", "expert-shard"),
    ("context", "ulysses"),
    (*WEIGHTS, *FOLDED),
)
"""Kinds of mesh axes with their names, the outermost first, as the targets place ranks."""
PARTLY = ("selective", "alternate", "core_attn")
"""Recomputes of parts of a layer."""
REPLICAS = ("data", "shard")
SAID: Mapping[Work, str] = {
    "data": "replicas",
    "tensor": "splitting weights",
    "sequence": "splitting the sequence of attention",
    "ulysses": "splitting the sequence, and heads inside attention (Ulysses)",
    "expert": "splitting experts",
}

NEEDED = {
    "tensor": "a plan that splits no weights: it only says how weights are split",
    "shard": "a plan that stores all parameters whole on every rank",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """A part of the plans that a target can say.

    `axes`: the names of mesh axes. `needed`: of these one has to be there. `zeros`, `recomputes`:
    said as they are. `near`: ZeRO stages and recomputes that become others, with a note. `stages`:
    the least number of pipeline stages and the most (0: any number). `whole_layers`: stages hold
    whole layers. `schedules`: of a pipeline. `searched`: those of them that a search may take
    (all). `filled`: pipelines have at least as many micro-batches as stages. `hosts`: optimizer
    state in host memory is said. `merges`: so are passes merged for exchanges of experts.
    `weights`: the products whose weights are split. `where`: where the target says what its
    configuration does not, by kind of work, "stages" or "recompute".
    """

    axes: tuple[str, ...]
    needed: tuple[str, ...] = ()
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recomputes: tuple[str, ...] = ("none", "full")
    near: tuple[int | str, ...] = PARTLY
    stages: tuple[int, int] = (1, 1)
    whole_layers: bool = True
    schedules: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    filled: bool = False
    optimizers: tuple[str, ...] | None = None
    hosts: bool = False
    merges: bool = False
    infers: bool = False
    weights: Splittable = BY_DEGREES
    where: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, setup: Setup) -> Iterator[str]:
        """Complaints about the parts of a plan that are out of reach."""
        if not self.infers and setup.plan.model.mode == "infer":
            yield "inference"
        names = {name for axis in setup.axes if axis.size > 1 for name in _names(axis)}
        if self.needed and not names & {*self.needed}:
            yield NEEDED[self.needed[0]]
        yield from self._axes_beyond(setup)
        yield from self._steps_beyond(setup)
        if {*WEIGHTS, "expert"} & {*self.axes}:
            yield from setup.split_beyond(self.weights)
        if self.optimizers is not None:
            yield setup.optimizer_beyond(self.optimizers)

    def _axes_beyond(self, setup: Setup) -> Iterator[str]:
        rows = setup.sequence_parallel and "tensor-sp" not in self.axes
        for work, said in SAID.items():
            axes = [axis for axis in setup.axes if axis.work == work and axis.size > 1]
            beyond = [axis for axis in axes if not {*_names(axis)} & {*self.axes}]
            if beyond:
                names = ", ".join(f"{axis.name}={axis.size}" for axis in beyond)
                stored = "parameters stored split" if beyond[0].stored_split else "replicas"
                doing = stored if work == "data" else said
                if beyond[0].folded:
                    doing = "splitting experts over the ranks that split weights,"
                yield f"{doing} over {names}{self._aside(work)}"
            for axis in axes:
                if axis.odd_heads and axis not in beyond:
                    yield (
                        f"more devices along {axis.name}={axis.size} than divide the key-value "
                        f"heads of {axis.odd_heads!r}"
                    )
        if rows and "tensor" in self.axes:
            yield "sequence parallelism between tensor-parallel layers"

    def _steps_beyond(self, setup: Setup) -> Iterator[str]:
        least, most = self.stages
        if most and setup.stages > most:
            yield f"{setup.staged()}{self._aside('stages')}"
        elif setup.stages < least:
            yield f"a plan without pipeline stages{self._aside('stages')}"
        elif self.schedules:
            yield setup.pipeline_beyond(self.schedules)
        if setup.zero not in (*self.zeros, *self.near):
            others = ["split weights"] if setup.degree("tensor") > 1 else []
            others += ["pipeline stages"] if setup.stages > 1 else []
            beside = f" beside {' and '.join(others)}" if others else ""
            yield f"ZeRO {setup.zero}{beside}"
        if setup.recompute not in (*self.recomputes, *self.near):
            yield f"recompute ({setup.recompute}){self._aside('recompute')}"

    def _aside(self, key: str) -> str:
        return f" ({self.where[key]})" if key in self.where else ""


def _names(axis: AxisWork) -> tuple[str, ...]:
    """The names of axes that do such work; sequence parallelism is asked about apart."""
    by_work: Mapping[Work, tuple[str, ...]] = {
        "data": ("shard",) if axis.stored_split else ("data",),
        "idle": REPLICAS,
        "expert": ("expert",),
        "sequence": ("context",),
        "ulysses": ("ulysses",),
        "tensor": FOLDED if axis.folded else WEIGHTS,
    }
    return by_work[axis.work]


def lacks(reaches: Sequence[Reach], setup: Setup) -> list[str]:
    """Complaints about a plan that lies in none of the parts: those of the nearest one."""
    complaints = [[lack for lack in reach.lacks(setup) if lack] for reach in reaches]
    return min(complaints, key=len)
