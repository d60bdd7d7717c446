"""The bytes of a device that stay from step to step: parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.costmodel.step.host_offload import streamed_bytes
from autopar.costmodel.step.mesh_prices import optimizer_named
from autopar.errors import UsageError
from autopar.ir import DTYPE_BYTES, Role
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.time_split import micro_batch_options

from .precision import SAME, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The optimizer and the precision of a training, and the shards of its states.

    `optimizer_shards`, `gradient_shards`: the number of devices over which optimizer state (with
    master weights) and gradients are split, besides the storage of their parameters (ZeRO 1, 2).
    """

    optimizer: str
    precision: Precision = SAME
    optimizer_shards: int = 1
    gradient_shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one device that stay from step to step, and `gradients` when all are complete.

    `largest`: of the largest trained shard. `host`: optimizer state in host memory, of which
    `streamed` bytes are on the device at once during the update. `apart`: gradients of the
    parameters of `host`.
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
        """Return the bytes that the update needs for a while.

        They are the optimizer's temporaries, and the states that are streamed.
        """
        if precision.master:
            return self.streamed
        method = optimizer_named(optimizer)
        if one_by_one:
            copies = method.alone
            on_device = self.largest * copies
        else:
            copies = method.together
            on_device = (self.gradients - self.apart) * copies
        # Parameters with state on the host are updated one after another, apart from the others.
        streaming = self.streamed + self.largest * copies if self.host else 0.0
        return max(streaming, on_device)


def certain_bytes(analysis: Analysis) -> float:
    """Return the bytes on every device under any plan.

    They are constants, and the preamble's whole inputs for all micro-batches.
    """
    graph = analysis.graph
    # A model that does not run on micro-batches has no operator that is cut by samples.
    try:
        sampled = set(micro_batch_options(analysis).options)
    except UsageError:
        sampled = set()
    whole = {
        name
        for op in graph.operators
        if op.name in analysis.cold and op.name not in sampled
        for name in op.inputs
    }
    tensors = (
        t
        for t in graph.tensors.values()
        if t.role is Role.CONSTANT or (t.role is Role.INPUT and t.name in whole)
    )
    return sum(tensor.bytes for tensor in tensors)


def states_of(
    program: Program,
    analysis: Analysis,
    training: Training,
    *,
    of: Callable[[str], bool] = lambda name: True,
) -> States:
    """Return the bytes that one device stores from step to step.

    They are those of the tensors whose names `of` accepts, and of training those parameters.
    """
    graph = program.graph
    mesh = program.assignment.mesh.shape
    count = optimizer_named(training.optimizer).states
    precision = training.precision
    optimizer_shards = training.optimizer_shards
    gradient_shards = training.gradient_shards
    stored = gradients = master = states = largest = apart = 0.0
    streamed: list[float] = []
    for tensor in filter(lambda t: of(t.name), graph.parameters):
        size = local_bytes(program.assignment.storage[tensor.name], tensor.bytes, mesh)
        trained = analysis.train and tensor.trainable
        # Where only the master is stored, it counts as such, below.
        stored += 0.0 if trained and precision.casts(tensor) else size
        if trained:
            elements = size / DTYPE_BYTES[tensor.dtype]
            of_gradient, of_master, of_state = precision.of(tensor)
            gradients += elements * of_gradient / gradient_shards
            master += elements * of_master / optimizer_shards
            largest = max(largest, elements * of_master if precision.casts(tensor) else size)
            # State in host memory comes to the device in chunks, for the update alone.
            if tensor.name in program.assignment.host:
                streamed.append(elements * of_state * count / optimizer_shards)
                apart += elements * of_gradient / gradient_shards
            else:
                states += elements * of_state * count / optimizer_shards
    return States(
        parameters=stored + _read_bytes(program, of),
        gradients=gradients,
        master=master,
        optimizer=states,
        largest=largest,
        host=sum(streamed),
        streamed=streamed_bytes(streamed),
        apart=apart,
    )


def _read_bytes(program: Program, of: Callable[[str], bool]) -> int:
    """Bytes of the constants, and of the parts of inputs that operators read."""
    graph = program.graph
    mesh = program.assignment.mesh.shape
    constants = sum(
        tensor.bytes
        for tensor in graph.tensors.values()
        if tensor.role is Role.CONSTANT and of(tensor.name)
    )
    inputs = sum(
        local_bytes(layout, graph.tensors[name].bytes, mesh)
        for name, layout in inputs_read(program)
        if of(name)
    )
    return constants + inputs
