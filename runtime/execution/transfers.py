"""Messages between stages: values forward, gradients backward.

There is one message for each type of a chunk's values.

Between stages of equal meshes every rank sends to the rank with the same coordinates, in the
value's own layout. Between unequal ones a value is gathered whole first and sent to every rank that
reads it. Its gradient, whole as well, goes back the same way.

Each direction between two ranks has a group of its own. So a send that waits for its receive holds
up no message of the other direction.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Chunk, Execution, Handed
from autopar.order.messages import receivers
from autopar.runtime.lowering.frame import Frame
from autopar.runtime.lowering.program import Place, Time
from autopar.runtime.ranks.collectives import in_movable_type
from autopar.runtime.ranks.world import World
from autopar.runtime.redistribution.steps import Chain, act, step_actions
from autopar.sharding.layout import Kind, Layout, R, local_shape
from autopar.sharding.redistribution import changed_axes


def _chain_to_whole(layout: Layout) -> list[Layout]:
    """The chain from a layout to the whole value, with the whole gradient."""
    # The innermost axis first: the outer ones see contiguous parts then.
    chain = [layout]
    for axis in reversed(range(len(layout))):
        if layout[axis].kind is not Kind.REPLICATED:
            chain.append((*chain[-1][:axis], R, *chain[-1][axis + 1 :]))
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One end of an edge on this rank.

    Its values' places, shapes and types, whether their gradients flow back, and the chains to the
    whole values.
    """

    places: tuple[Place, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    flows: tuple[bool, ...]
    chains: tuple[tuple[Layout, ...], ...]


Arriving = tuple[dist.Work, dict[int, Tensor]]
"""A message on its way, and the pieces of its memory by their places among the edge's values."""


class Edge:
    """The values from chunk `source` to chunk `target`, seen from a rank of one of them."""

    def __init__(
        self,
        execution: Execution,
        world: World,
        edge: tuple[int, int],
        values: Sequence[Handed],
        device: torch.device,
    ) -> None:
        self.source, self.target = edge
        self.device = device
        self.groups = world.groups
        first = execution.chunks[self.source]
        second = execution.chunks[self.target]
        self.direct = first.mesh.shape == second.mesh.shape
        stages = execution.stages
        # Chunks of one stage lie on the same ranks: values stay where they are.
        self.near = self.source % stages == self.target % stages
        self.sends = world.stage == self.source % stages
        self.receives = world.stage == self.target % stages
        self.starts = world.firsts[self.source % stages], world.firsts[self.target % stages]
        self.sizes = first.mesh.devices, second.mesh.devices
        self.rank = world.rank
        self.messages = world.messages
        self.out = self._end(first, values, made=True) if self.sends else None
        self.into = self._end(second, values, made=False) if self.receives else None

    def _end(self, chunk: Chunk, values: Sequence[Handed], *, made: bool) -> _End:
        assert self.groups is not None
        count = chunk.whole.schedule.micro_batches
        time = None if chunk.split is None else Time(split=chunk.split, count=count, index=0)
        frame = Frame(chunk.whole, self.groups, time)
        tensors = chunk.whole.program.graph.tensors
        layouts = [value.made if made else value.taken for value in values]
        names = [value.name for value in values]
        shapes = []
        for name, layout in zip(names, layouts, strict=True):
            # Between unequal meshes whole values travel.
            sent = frame.place(name, layout if self.direct else (R,) * len(layout))
            shapes.append(local_shape(sent[1], tensors[name].shape, frame.mesh))
        return _End(
            places=tuple(map(frame.place, names, layouts)),
            shapes=tuple(shapes),
            dtypes=tuple(getattr(torch, tensors[name].dtype) for name in names),
            flows=tuple(value.differentiable for value in values),
            chains=tuple(tuple(_chain_to_whole(layout)) for layout in layouts),
        )

    # --- who talks to whom ---

    def _others(self, *, forward: bool, sending: bool) -> list[int]:
        """The ranks at the other end; a receiver has exactly one."""
        here, there = (0, 1) if forward == sending else (1, 0)
        own = self.rank - self.starts[here]
        first = self.starts[there]
        if not sending:
            return [first + own % self.sizes[there]]
        # Ranks of the smaller mesh serve several of the larger one, by turns.
        others = receivers(own, self.sizes[here], self.sizes[there])
        return [first + other for other in others]

    # --- messages ---

    def send(
        self, values: Sequence[Tensor], *, forward: bool, under_way: deque[tuple[dist.Work, Tensor]]
    ) -> None:
        """Begin to send values (with `forward`), or the gradients of those that have one."""
        end = self.out if forward else self.into
        assert end is not None
        if not self.direct and forward:
            values = list(map(self._whole, values, end.chains))
        # Both ends go through the types in the order of the values: messages have no names.
        for dtype in dict.fromkeys(value.dtype for value in values):
            # One message for all values of a type, since every message costs a latency.
            flat = torch.cat([value.reshape(-1) for value in values if value.dtype is dtype])
            for other in self._others(forward=forward, sending=True):
                group = self.messages[self.rank, other]
                work = dist.isend(in_movable_type(flat), other, group=group)
                assert work is not None
                # The memory must stay until the message has gone.
                under_way.append((work, flat))

    def begin_receive(self, *, forward: bool) -> list[Arriving]:
        """Begin to receive values, or the gradients of those that have one."""
        end = self.into if forward else self.out
        assert end is not None
        wanted = [i for i in range(len(end.places)) if forward or end.flows[i]]
        messages = []
        (other,) = self._others(forward=forward, sending=False)
        group = self.messages[other, self.rank]
        for dtype in dict.fromkeys(end.dtypes[i] for i in wanted):
            of_type = [i for i in wanted if end.dtypes[i] is dtype]
            sizes = [torch.Size(end.shapes[i]).numel() for i in of_type]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            # Messages between two ranks arrive in the order of sending, so they need no tag.
            work = dist.irecv(in_movable_type(flat), other, group=group)
            assert work is not None
            pieces = zip(of_type, flat.split(sizes), strict=True)  # type: ignore[no-untyped-call]
            messages.append((work, {i: piece.view(end.shapes[i]) for i, piece in pieces}))
        return messages

    def receive(self, messages: Sequence[Arriving], *, forward: bool) -> list[Tensor]:
        """Wait for what `begin_receive` began, in the order of the values."""
        end = self.into if forward else self.out
        assert end is not None
        values: dict[int, Tensor] = {}
        for work, pieces in messages:
            work.wait()
            values.update(pieces)
        if not self.direct and not forward:
            return [self._part(values[i], end.chains[i]) for i in sorted(values)]
        return [values[i] for i in sorted(values)]

    def gradients_of(self, behind: dict[Place, Tensor]) -> list[Tensor]:
        """The gradients at the receiving end, taken from there.

        They are zeros where the loss reaches nothing, since the sending stage expects a message.
        """
        assert self.into is not None
        end = self.into
        gradients = []
        for i, place in enumerate(end.places):
            gradient = behind.pop(place, None)
            if not end.flows[i]:
                continue
            if gradient is None:
                # The other end waits for this message, also if the loss does not reach the value.
                gradient = torch.zeros(end.shapes[i], dtype=end.dtypes[i], device=self.device)
            gradients.append(gradient)
        return gradients

    def gradient_places(self) -> list[Place]:
        """The places of the gradients at the sending end."""
        assert self.out is not None
        return list(itertools.compress(self.out.places, self.out.flows))

    def _whole(self, value: Tensor, chain: Sequence[Layout]) -> Tensor:
        for ahead, _, group in self._steps(chain):
            value = act(value, ahead, group)
        return value

    def _part(self, gradient: Tensor, chain: Sequence[Layout]) -> Tensor:
        for _, back, group in reversed(self._steps(chain)):
            gradient = act(gradient, back, group)
        return gradient

    def _steps(self, chain: Sequence[Layout]) -> Chain:
        assert self.groups is not None
        mesh = self.groups.mesh.shape
        over = self.groups.over
        return tuple(
            (*step_actions(before, after, mesh), over(changed_axes(before, after)))
            for before, after in itertools.pairwise(chain)
        )


def edges_of(
    execution: Execution, world: World, device: torch.device
) -> dict[tuple[int, int], Edge]:
    """The edges that this rank has a part in."""
    stages = execution.stages
    return {
        pair: Edge(execution, world, pair, values, device)
        for pair, values in execution.edges.items()
        if world.stage in (pair[0] % stages, pair[1] % stages)
    }
