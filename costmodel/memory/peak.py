"""The bytes of a device at the peak of a training step (or of an inference), part by part.

peak = parameters + optimizer state + master weights + max over the moments t of (kept(t) + gradients(t) + buffers(t) +
passing(t))

`predicted_memory` plays the order of the runtime's step (see `order_liveness`); `autograd_memory` walks a program as
plain autograd runs it (see `liveness`); `occupancy` adds allocator and context. `in_flight`: the number of
micro-batches (of a pipeline stage, times the layers that the program stands for) whose kept activations count.
`optimizer_shards`, `gradient_shards`: the number of devices over which optimizer state (with master weights) and
gradients are split, besides the storage of their parameters (ZeRO 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES, Role, Tensor
from autopar.order.scheduled import Scheduled, scheduled
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import PLAIN, Schedule, Types
from autopar.sharding.time_split import micro_batch_options

from ..step.host import streamed_bytes
from ..step.pricing import optimizer_named
from .live_bytes import Live
from .liveness import Recompute, live_bytes
from .order_liveness import step_bytes
from .saved_values import facts_of

NO_RECOMPUTE = Recompute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device at its peak, part by part.

    `parameters`: with buffers, the needed parts of inputs, and gathered copies. `activations`: values kept by autograd,
    of all micro-batches in flight. `buffers`: flat messages under way. `transient`: everything else alive at the peak.
    Not in the total: `saved`: bytes that one micro-batch leaves from its forward to its backward pass; `host`: bytes in
    the memory of the device's host.
    """

    parameters: float
    gradients: float
    master: float
    optimizer: float
    activations: float
    buffers: float
    transient: float
    saved: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the total by name."""
        names = ("parameters", "gradients", "master", "optimizer", "activations", "buffers", "transient")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes for each element of a parameter; None: as many as the parameter has itself.

    `gradient`; `master`: a copy in higher precision (0: none); `state`: of each of the optimizer's tensors. `main`:
    gradients are added into permanent buffers of that size. `types` of a plan: only the master is stored, gradients
    arrive in its type, and used values are cast unit by unit.
    """

    gradient: float | None = None
    master: float = 0.0
    state: float | None = None
    main: bool = False
    types: Types | None = None

    def casts(self, tensor: Tensor) -> bool:
        """Whether only the master of a parameter is stored."""
        return self.types is not None and self.types.casts(tensor)

    def of(self, tensor: Tensor) -> tuple[float, float, float]:
        """Bytes of (gradient, master, one state) for each element of a trained parameter."""
        if self.types is None or not self.types.casts(tensor):
            return self.sizes(tensor.dtype)
        stored = float(DTYPE_BYTES[self.types.stored(tensor)])
        return stored, stored, stored

    def sizes(self, dtype: str) -> tuple[float, float, float]:
        """The bytes of gradient, master and state for a parameter stored in `dtype`."""
        own = float(DTYPE_BYTES[dtype])
        return own if self.gradient is None else self.gradient, self.master, own if self.state is None else self.state


PRECISIONS: Mapping[str, Precision] = {
    "same": Precision(),
    "mixed": Precision(master=4.0, state=4.0),
    "mixed-main": Precision(gradient=4.0, master=4.0, state=4.0, main=True),
}
"""`same`: everything in the parameter's type. `mixed`: 16-bit weights and gradients, 2 + 2 + 12 bytes with Adam
(Rajbhandari et al., arXiv:1910.02054, section 3.1). `mixed-main`: gradients summed in float32, 18 bytes with Adam
(Megatron-LM's page on its distributed optimizer).
"""


def precision_named(name: str) -> Precision:
    """The precision called `name`; an unknown name is an error that lists the valid ones."""
    if name not in PRECISIONS:
        raise UsageError(unknown("precision", name, PRECISIONS))
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one device that stay from step to step, and `gradients` when all are complete.

    `largest`: of the largest trained shard. `host`: optimizer state in host memory, of which `streamed` bytes are on
    the device at once during the update. `apart`: gradients of the parameters of `host`.
    """

    parameters: float
    gradients: float
    master: float
    optimizer: float
    largest: float
    host: float = 0.0
    streamed: float = 0.0
    apart: float = 0.0

    def temporaries(self, optimizer: str, precision: Precision, *, one_by_one: bool) -> float:
        """Bytes that the update needs for a while: the optimizer's temporaries, and the states that are streamed."""
        if precision.master:
            return self.streamed
        method = optimizer_named(optimizer)
        alone = self.streamed + self.largest * (method.alone if one_by_one else method.together) if self.host else 0.0
        return max(alone, self.largest * method.alone if one_by_one else (self.gradients - self.apart) * method.together)


def certain_bytes(analysis: Analysis) -> float:
    """Bytes on every device under any plan: constants, and the preamble's whole inputs for all micro-batches."""
    graph = analysis.graph
    try:
        sampled = set(micro_batch_options(analysis).options)
    except UsageError:
        sampled = set()
    whole = {name for op in graph.operators if op.name in analysis.cold and op.name not in sampled for name in op.inputs}
    found = (t for t in graph.tensors.values() if t.role is Role.CONSTANT or (t.role is Role.INPUT and t.name in whole))
    return sum(tensor.bytes for tensor in found)


def states_of(
    program: Program, analysis: Analysis, *, optimizer: str, precision: Precision, optimizer_shards: int = 1, gradient_shards: int = 1,
    of: Callable[[str], bool] = lambda name: True,
) -> States:  # fmt: skip
    """Bytes that one device stores of the tensors whose names `of` accepts, and bytes of training those parameters."""
    graph, mesh = program.graph, program.assignment.mesh.shape
    count = optimizer_named(optimizer).states
    stored = gradients = master = states = largest = apart = 0.0
    streamed: list[float] = []
    for tensor in filter(lambda t: of(t.name), graph.parameters):
        size = local_bytes(program.assignment.storage[tensor.name], tensor.bytes, mesh)
        trained = analysis.train and tensor.trainable
        stored += 0.0 if trained and precision.casts(tensor) else size
        if trained:
            elements = size / DTYPE_BYTES[tensor.dtype]
            of_gradient, of_master, of_state = precision.of(tensor)
            gradients += elements * of_gradient / gradient_shards
            master += elements * of_master / optimizer_shards
            largest = max(largest, elements * of_master if precision.casts(tensor) else size)
            if tensor.name in program.assignment.host:
                streamed.append(elements * of_state * count / optimizer_shards)
                apart += elements * of_gradient / gradient_shards
            else:
                states += elements * of_state * count / optimizer_shards
    stored += sum(tensor.bytes for tensor in graph.tensors.values() if tensor.role is Role.CONSTANT and of(tensor.name))
    stored += sum(local_bytes(layout, graph.tensors[name].bytes, mesh) for name, layout in inputs_read(program) if of(name))
    return States(
        parameters=stored, gradients=gradients, master=master, optimizer=states, largest=largest, host=sum(streamed),
        streamed=streamed_bytes(streamed), apart=apart,
    )  # fmt: skip


def predicted_memory(
    program: Program | Scheduled,
    analysis: Analysis,
    *,
    optimizer: str,
    composite: bool = False,
    schedule: Schedule = PLAIN,
) -> Memory:
    """Bytes of one device at the peak of a step in the runtime, under the program's own schedule or `schedule`.

    With micro-batches the program is that of one of them. `composite`: with a CPU's kernels (see `rules.saved`), where
    the optimizer takes one parameter after another.
    """
    plan = scheduled(program, schedule) if isinstance(program, Program) else program
    chosen = Precision(types=plan.schedule.types)
    states = states_of(plan.program, analysis, optimizer=optimizer, precision=chosen)
    live = step_bytes(plan, facts_of(analysis, composite=composite, counted=True), train=analysis.train)
    return _at_peak(states, live, main=False, in_flight=1.0, temporaries=states.temporaries(optimizer, chosen, one_by_one=composite))


def autograd_memory(
    program: Program,
    analysis: Analysis,
    *,
    optimizer: str,
    precision: str | Precision = "same",
    recompute: Recompute = NO_RECOMPUTE,
    in_flight: float = 1.0,
    optimizer_shards: int = 1,
    gradient_shards: int = 1,
    regather: bool = False,
    composite: bool = False,
) -> Memory:
    """Bytes of one device at the peak of a step of plain autograd, as in other frameworks.

    `regather`: gathered values are gathered again in the backward pass, not kept. `composite`: as in
    `predicted_memory`.
    """
    chosen = precision_named(precision) if isinstance(precision, str) else precision
    states = states_of(
        program, analysis, optimizer=optimizer, precision=chosen, optimizer_shards=optimizer_shards, gradient_shards=gradient_shards
    )
    main = analysis.train and (chosen.main or in_flight > 1)
    facts = facts_of(analysis, composite=composite)
    live = live_bytes(program, facts, train=analysis.train, recompute=recompute, accumulating=main, regather=regather)
    temporaries = states.temporaries(optimizer, chosen, one_by_one=composite)
    return _at_peak(states, live, main=main, in_flight=in_flight, temporaries=temporaries)


def _at_peak(states: States, live: Live, *, main: bool, in_flight: float, temporaries: float) -> Memory:
    """The moment of the step's largest sum, or the optimizer's step after it."""
    waiting = (in_flight - 1) * live.saved
    totals = [sum(parts) for parts in zip(live.kept, live.gradients, live.buffers, live.passing, live.gathered, strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    fixed = {"master": states.master, "optimizer": states.optimizer, "saved": live.saved, "host": states.host}
    if states.gradients + temporaries > totals[peak] + waiting + (states.gradients if main else 0.0):
        parts = {"parameters": states.parameters, "gradients": states.gradients, "transient": temporaries}
        return Memory(**fixed, **parts, activations=0.0, buffers=0.0)
    return Memory(
        **fixed, parameters=states.parameters + live.gathered[peak], gradients=states.gradients if main else live.gradients[peak],
        activations=live.kept[peak] + waiting, buffers=live.buffers[peak], transient=live.passing[peak],
    )  # fmt: skip
