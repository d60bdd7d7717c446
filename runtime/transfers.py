"""Messages between stages: values forward, gradients backward, one message for each type of a chunk's values.

Between stages of equal meshes every rank sends to the rank with the same coordinates, in the value's own layout.
Between unequal ones a value is gathered whole first and sent to every rank that reads it. Its gradient, whole as well,
goes back the same way.
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
from autopar.sharding.layout import Kind, Layout, R, local_shape
from autopar.sharding.redistribution import changed_axes

from .lowering.frame import Frame
from .lowering.program import Place, Time
from .redistribution import Chain, act, step_actions
from .world import World


def _home(layout: Layout) -> list[Layout]:
    """The chain from a layout to the whole value, with the whole gradient."""
    chain = [layout]
    for axis in reversed(range(len(layout))):
        if layout[axis].kind is not Kind.REPLICATED:
            chain.append((*chain[-1][:axis], R, *chain[-1][axis + 1 :]))
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One end of an edge on this rank: places, shapes and types of its values, and chains to whole values."""

    places: tuple[Place, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    flows: tuple[bool, ...]
    chains: tuple[tuple[Layout, ...], ...]


class Edge:
    """The values from chunk `source` to chunk `target`, seen from this rank, which belongs to one or both."""

    def __init__(self, execution: Execution, world: World, edge: tuple[int, int], values: Sequence[Handed], device: torch.device) -> None:
        self.source, self.target = edge
        self.device, self.groups = device, world.groups
        first, second = execution.chunks[self.source], execution.chunks[self.target]
        self.direct = first.mesh.shape == second.mesh.shape
        stages = execution.stages
        self.near = self.source % stages == self.target % stages
        self.sends = world.stage == self.source % stages
        self.receives = world.stage == self.target % stages
        self.starts = world.firsts[self.source % stages], world.firsts[self.target % stages]
        self.sizes = first.mesh.devices, second.mesh.devices
        self.rank, self.messages = world.rank, world.messages
        self.out = self._end(first, values, made=True) if self.sends else None
        self.into = self._end(second, values, made=False) if self.receives else None

    def _end(self, chunk: Chunk, values: Sequence[Handed], *, made: bool) -> _End:
        assert self.groups is not None
        count = chunk.whole.schedule.micro_batches
        time = None if chunk.split is None else Time(split=chunk.split, count=count, index=0)
        frame = Frame(chunk.whole, self.groups, time)
        tensors = chunk.whole.program.graph.tensors
        layouts = [value.made if made else value.taken for value in values]
        shapes = []
        for value, layout in zip(values, layouts, strict=True):
            place = frame.place(value.name, layout if self.direct else (R,) * len(layout))
            shapes.append(local_shape(place[1], tensors[value.name].shape, frame.mesh))
        return _End(
            places=tuple(frame.place(value.name, layout) for value, layout in zip(values, layouts, strict=True)),
            shapes=tuple(shapes),
            dtypes=tuple(getattr(torch, tensors[value.name].dtype) for value in values),
            flows=tuple(value.differentiable for value in values),
            chains=tuple(tuple(_home(layout)) for layout in layouts),
        )

    # --- who talks to whom ---

    def _others(self, *, forward: bool, sending: bool) -> list[int]:
        """The ranks at the other end; a receiver has exactly one."""
        here, there = (0, 1) if forward == sending else (1, 0)
        own = self.rank - self.starts[here]
        if self.direct:
            return [self.starts[there] + own]
        if not sending:
            return [self.starts[there] + own % self.sizes[there]]
        return [self.starts[there] + other for other in range(self.sizes[there]) if other % self.sizes[here] == own]

    # --- messages ---

    def send(self, values: Sequence[Tensor], *, forward: bool, under_way: deque[tuple[dist.Work, Tensor]]) -> None:
        """Begin to send values (with `forward`), or the gradients of those that have one."""
        end = self.out if forward else self.into
        assert end is not None
        if not self.direct and forward:
            values = [self._whole(value, chain) for value, chain in zip(values, end.chains, strict=True)]
        for dtype in dict.fromkeys(value.dtype for value in values):
            flat = torch.cat([value.reshape(-1) for value in values if value.dtype is dtype])
            for other in self._others(forward=forward, sending=True):
                work = dist.isend(flat, other, group=self.messages)
                assert work is not None
                under_way.append((work, flat))

    def receive(self, *, forward: bool) -> list[Tensor]:
        """Wait for values, or for the gradients of those that have one."""
        end = self.into if forward else self.out
        assert end is not None
        wanted = [i for i in range(len(end.places)) if forward or end.flows[i]]
        found: dict[int, Tensor] = {}
        (other,) = self._others(forward=forward, sending=False)
        for dtype in dict.fromkeys(end.dtypes[i] for i in wanted):
            own = [i for i in wanted if end.dtypes[i] is dtype]
            sizes = [torch.Size(end.shapes[i]).numel() for i in own]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            dist.recv(flat, other, group=self.messages)
            pieces = flat.split(sizes)  # type: ignore[no-untyped-call]
            found.update((i, piece.view(end.shapes[i])) for i, piece in zip(own, pieces, strict=True))
        if not self.direct and not forward:
            return [self._part(found[i], end.chains[i]) for i in wanted]
        return [found[i] for i in wanted]

    def gradients_of(self, behind: dict[Place, Tensor]) -> list[Tensor]:
        """The gradients at the receiving end, taken from there; zeros where the loss has reached none."""
        assert self.into is not None
        end = self.into
        found = []
        for place, shape, dtype, flows in zip(end.places, end.shapes, end.dtypes, end.flows, strict=True):
            gradient = behind.pop(place, None)
            if flows:
                found.append(torch.zeros(shape, dtype=dtype, device=self.device) if gradient is None else gradient)
        return found

    def gradient_places(self) -> list[Place]:
        """The places of the gradients at the sending end."""
        assert self.out is not None
        return [place for place, flows in zip(self.out.places, self.out.flows, strict=True) if flows]

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
        mesh, over = self.groups.mesh.shape, self.groups.over
        return tuple((*step_actions(before, after, mesh), over(changed_axes(before, after))) for before, after in itertools.pairwise(chain))


def edges_of(execution: Execution, world: World, device: torch.device) -> dict[tuple[int, int], Edge]:
    """The edges that this rank has a part in."""
    stages = execution.stages
    mine = {pair: values for pair, values in execution.edges.items() if world.stage in (pair[0] % stages, pair[1] % stages)}
    return {pair: Edge(execution, world, pair, values, device) for pair, values in mine.items()}
