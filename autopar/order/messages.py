"""Messages of each action of a step.

They are collectives on the axes of a stage, messages to other stages, and sums over stages.

Between stages of equal meshes every device sends its shard to the device with the same coordinates.
Between unequal ones a value is gathered whole first, and each device that reads it gets it from a
device that holds it. Its gradient comes back whole in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES
from autopar.sharding.layout import Kind, Layout, Placement, R, local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.redistribution import change, local_bytes

from .actions import Action, Word
from .execution import Execution, Handed
from .ranks import tied_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One collective over mesh axes, or among `ranks` where `axes` is None.

    The `ranks` of a send are its sender and its receiver. `most`: as of a collective.
    """

    kind: str
    axes: Axes | None
    nbytes: int
    ranks: tuple[int, ...] = ()
    most: int = 0


def issued_by(execution: Execution, action: Action, device: int) -> Iterator[Message]:
    """Messages that `device` (counted within its stage) issues for an action."""
    chunk = execution.chunks[action.chunk]
    match action.word:
        case Word.SEND_FORWARD:
            yield from _sent(execution, (action.chunk, _peer(action)), device, forward=True)
        case Word.SEND_BACKWARD:
            yield from _sent(execution, (_peer(action), action.chunk), device, forward=False)
        case Word.SUM_TIED:
            yield from _tied(execution, action.chunk, device)
        case _:  # a whole gradient is brought to the layout of its value without a collective
            for c in chunk.micro.issued(action):
                yield Message(kind=c.kind, axes=c.axes, nbytes=c.nbytes, most=c.most)


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer


def receivers(device: int, senders: int, count: int) -> list[int]:
    """The devices of one stage, `count` of them, that get a message from a device of another.

    All senders hold the whole value or equal parts, so the receivers are dealt out evenly.

    >>> receivers(1, 2, 4)
    [1, 3]
    """
    return list(range(device, count, senders))


def message_pairs(execution: Execution) -> list[tuple[int, int]]:
    """Senders and receivers of the messages of a step, by rank, each pair once and in one order."""
    pairs: dict[tuple[int, int], None] = {}
    for edge in execution.edges:
        for here, there in (edge, edge[::-1]):
            own = first_rank(execution, here)
            other = first_rank(execution, there)
            # Chunks of one stage find each other's values in memory.
            if own == other:
                continue
            senders = execution.chunks[here].mesh.devices
            for device in range(senders):
                to = receivers(device, senders, execution.chunks[there].mesh.devices)
                pairs.update(dict.fromkeys((own + device, other + number) for number in to))
    return list(pairs)


def first_rank(execution: Execution, chunk: int) -> int:
    """The first rank of the stage that holds a chunk."""
    return sum(c.mesh.devices for c in execution.chunks[: chunk % execution.stages])


def _in_time(execution: Execution, value: Handed, layout: Layout) -> tuple[int, ...]:
    """The shape of a device's part of a micro-batch's value."""
    chunk = execution.chunks[0]
    shape = chunk.whole.program.graph.tensors[value.name].shape
    time: tuple[Placement, ...] = (
        () if chunk.split is None else (chunk.split.placements[value.name],)
    )
    sizes = () if chunk.split is None else (chunk.whole.schedule.micro_batches,)
    return local_shape((*time, *layout), shape, (*sizes, *_mesh_of(execution, layout)))


def _mesh_of(execution: Execution, layout: Layout) -> tuple[int, ...]:
    return next(
        chunk.mesh.shape for chunk in execution.chunks if len(chunk.mesh.shape) == len(layout)
    )


def _sent(
    execution: Execution, edge: tuple[int, int], device: int, *, forward: bool
) -> Iterator[Message]:
    first, second = (execution.chunks[number] for number in edge)
    here, there = edge if forward else edge[::-1]
    direct = first.mesh.shape == second.mesh.shape
    values = [value for value in execution.edges[edge] if forward or value.differentiable]
    sizes: dict[str, int] = {}
    for value in values:
        layout = value.made if forward else value.taken
        tensor = first.whole.program.graph.tensors[value.name]
        if not direct and forward:
            yield from _gathered(execution, value, tensor.bytes)
        elements = 1
        for size in _in_time(execution, value, layout if direct else (R,) * len(layout)):
            elements *= size
        # All values of one type travel in one message.
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + elements * DTYPE_BYTES[tensor.dtype]
    own = first_rank(execution, here)
    other = first_rank(execution, there)
    counts = execution.chunks[here].mesh.devices, execution.chunks[there].mesh.devices
    to = receivers(device, *counts)
    for nbytes in sizes.values():
        for number in to:
            yield Message(
                kind="send", axes=None, nbytes=nbytes, ranks=(own + device, other + number)
            )


def _gathered(execution: Execution, value: Handed, nbytes: int) -> Iterator[Message]:
    """The collectives that make a value whole before it is sent."""
    mesh = _mesh_of(execution, value.made)
    # A value that is not cut into micro-batches is sent whole with each of them.
    share = execution.schedule.micro_batches if _is_cut(execution, value) else 1
    for before, after in itertools.pairwise(_home(value.made)):
        moved = change(before, after, mesh)
        ahead, _ = moved.transfers
        if ahead is not None:
            yield Message(
                kind=ahead.collective,
                axes=moved.axes,
                nbytes=ahead.scale * local_bytes(before, nbytes // share, mesh),
            )


def _is_cut(execution: Execution, value: Handed) -> bool:
    split = execution.chunks[0].split
    return split is not None and split.placements[value.name].kind is Kind.SPLIT


def _home(layout: Layout) -> Sequence[Layout]:
    chain = [layout]
    # Splits of one dim nest, so the innermost one is undone first.
    for axis in reversed(range(len(layout))):
        if layout[axis].kind is not Kind.REPLICATED:
            chain.append((*chain[-1][:axis], R, *chain[-1][axis + 1 :]))
    return chain


def _tied(execution: Execution, stage: int, device: int) -> Iterator[Message]:
    for name, stages in tied_parameters(execution).items():
        if stage not in stages:
            continue
        tensor = execution.chunks[0].whole.program.graph.tensors[name]
        chunks = [
            next(c for c in execution.chunks[s :: execution.stages] if name in c.stored)
            for s in stages
        ]
        layouts = [chunk.stored[name] for chunk in chunks]
        firsts = [first_rank(execution, number) for number in stages]
        own = chunks[stages.index(stage)]
        size = execution.schedule.types.reduced_bytes(tensor)
        # Equal shards on equal meshes are summed rank by rank, without gathering them.
        if len(set(layouts)) == 1 and len({chunk.mesh.shape for chunk in chunks}) == 1:
            nbytes = local_bytes(layouts[0], size, own.mesh.shape)
            yield Message(
                kind="all_reduce",
                axes=None,
                nbytes=nbytes,
                ranks=tuple(first + device for first in firsts),
            )
            continue
        layout = layouts[stages.index(stage)]
        for before, after in itertools.pairwise(_home(layout)):
            moved = change(before, after, own.mesh.shape)
            ahead, _ = moved.transfers
            if ahead is not None:
                nbytes = ahead.scale * local_bytes(before, size, own.mesh.shape)
                yield Message(kind=ahead.collective, axes=moved.axes, nbytes=nbytes)
        members = sorted(
            first + i
            for first, chunk in zip(firsts, chunks, strict=True)
            for i in range(chunk.mesh.devices)
        )
        yield Message(kind="all_reduce", axes=None, nbytes=size, ranks=tuple(members))
