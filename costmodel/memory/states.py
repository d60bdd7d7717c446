"""The bytes of a device that stay from step to step: parameters, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.costmodel.step.host_offload import streamed_bytes
from autopar.costmodel.step.mesh_prices import optimizer_named, optimizer_of
from autopar.errors import UsageError
from autopar.ir import DTYPE_BYTES, Role
from autopar.order.owners import ITEMSIZE
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.time_split import micro_batch_options

from .precision import SAME, Precision

EXCHANGES = 3
"""Times that a device's shards of all matrices are held in 16 bits during their update: as they go
to owners, as whole matrices come from others, and as updates come back.
"""
ITERATES = 5
"""Times that the largest matrix is held at its owner: it, its products with itself (twice), the
next iterate, and the result.
"""


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

    `host`: optimizer state in host memory, of which `streamed` bytes are on the device at once
    during the update. `apart`: gradients of the parameters of `host`. `exchanged`: of whole
    matrices in their update. Of all others, `elementwise`: gradients; `largest`: the largest shard.
    """

    parameters: float
    gradients: float
    master: float
    optimizer: float
    largest: float
    host: float = 0.0
    streamed: float = 0.0
    apart: float = 0.0
    elementwise: float = 0.0
    exchanged: float = 0.0

    def temporaries(self, optimizer: str, precision: Precision, *, one_by_one: bool) -> float:
        """Return the bytes that the update needs for a while.

        They are the optimizer's temporaries, and the states that are streamed.
        """
        if precision.master:
            return max(self.streamed, self.exchanged)
        named = optimizer_named(optimizer)
        method = named if named.others is None else optimizer_named(named.others)
        if one_by_one:
            copies = method.alone
            on_device = self.largest * copies
        else:
            copies = method.together
            on_device = (self.elementwise - self.apart) * copies
        # Parameters with state on the host are updated one after another, apart from the others.
        streaming = self.streamed + self.largest * copies if self.host else 0.0
        return max(streaming, on_device, self.exchanged)


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
    matrices = program.assignment.matrices
    precision = training.precision
    optimizer_shards = training.optimizer_shards
    gradient_shards = training.gradient_shards
    stored = gradients = master = states = largest = apart = 0.0
    elementwise = exchanged = widest = 0.0
    streamed: list[float] = []
    for tensor in filter(lambda t: of(t.name), graph.parameters):
        size = local_bytes(program.assignment.storage[tensor.name], tensor.own_bytes, mesh)
        trained = analysis.train and tensor.trainable
        # Where only the master is stored, it counts as such, below.
        stored += 0.0 if trained and precision.casts(tensor) else size
        if trained:
            elements = size / DTYPE_BYTES[tensor.dtype]
            count = optimizer_named(optimizer_of(tensor, training.optimizer, matrices)).states
            of_gradient, of_master, of_state = precision.of(tensor)
            gradients += elements * of_gradient / gradient_shards
            master += elements * of_master / optimizer_shards
            if tensor.name in matrices:
                exchanged += elements * ITEMSIZE
                widest = max(widest, math.prod(tensor.shape[-2:]) * ITEMSIZE)
            else:
                elementwise += elements * of_gradient / gradient_shards
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
        elementwise=elementwise,
        exchanged=EXCHANGES * exchanged + ITERATES * widest,
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
