"""The peak of a training step's memory by torch's own tracker, on fake tensors: nothing is computed or allocated.

One rank of many runs on a process group that moves nothing, so any size of model and mesh can be tracked in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from autopar.ir import Role
from autopar.ir import Tensor as Described
from autopar.order.execution import Execution
from autopar.sharding.layout import R
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes

from ..collectives import Cut, DeviceGroups
from ..lowering import LocalSegment
from ..module import ParallelModule
from ..stage import Stage
from ..weight_files import FileTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Bytes: at the `peak`, and `saved` from the forward to the backward pass."""

    peak: int
    saved: int


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Makes fake collectives hold the memory of real ones: their inputs, until they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.held.pop(args[0].untyped_storage()._cdata, None)
        elif func.namespace == "_c10d_functional":
            self.held[out.untyped_storage()._cdata] = args[0]
        return out


def _total(tracker: MemTracker, kind: str) -> int:
    """Bytes on devices; tensors that only describe a shape take none."""
    snapshot = tracker.get_tracker_snapshot(kind)
    return sum(found["Total"] for device, found in snapshot.items() if device.type != "meta")


def track_step(
    loss: Callable[..., Tensor],
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    foreach: bool = False,
    rooms: Callable[[], Sequence[Tensor]] = tuple,
) -> Tracked:
    """The second step of training with AdamW, when its state exists. `foreach`: all parameters are updated together.

    `rooms`: tensors whose memory is freed and allocated again.
    """
    optimizer = torch.optim.AdamW(module.parameters(), foreach=foreach)

    def step(forward_done: Callable[[], None]) -> None:
        value = loss(*inputs)
        forward_done()
        # A gradient that is known even if nothing is computed.
        torch.autograd.backward(value, torch.tensor(1.0, dtype=value.dtype))
        del value
        optimizer.step()
        optimizer.zero_grad()

    step(lambda: None)
    tracker = _Tracker()
    tracker.track_external(module, optimizer, *inputs, *rooms())
    between: list[int] = []
    with tracker:
        step(lambda: between.append(_total(tracker, "current")))
    return Tracked(peak=_total(tracker, "peak"), saved=between[0] - _total(tracker, "current"))


Parts = Callable[[nn.Module], Iterable[nn.Module]]


def track_module(make: Callable[[], nn.Module], make_inputs: Callable[[], Sequence[Tensor]], *, recompute: Parts | None = None) -> Tracked:
    """A module that returns its loss, on one device; `recompute` gives the parts of it that are computed again."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make().train()
        for part in recompute(module) if recompute is not None else ():
            part.forward = _again(part.forward)
        return track_step(module, module, make_inputs())


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """For a while this process is rank 0 of `ranks` that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def track_program(program: Program | Execution, *, foreach: bool = False, fake: bool = True) -> Tracked:
    """A program (or a plan's step) on this rank; its mesh has as many devices as the process group (see `fake_world`).

    Whole inputs count as in host memory: only the parts that are read count. With real ranks, `fake` must be off: then
    tensors and arithmetic are real.
    """
    run = program.whole.program if isinstance(program, Execution) else program
    graph = run.graph
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()

    def zeros(tensor: Described) -> Tensor:
        with mode:
            return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))

    held = [tensor for tensor in graph.tensors.values() if tensor.role in (Role.PARAMETER, Role.CONSTANT)]
    values = {tensor.name: _unread(tensor, mode) if fake else zeros(tensor) for tensor in held}
    module = ParallelModule(program, DeviceGroups.create(run.assignment.mesh), values)
    for stage in module.engine.stages.values():
        _unhook(stage)
    if fake:
        module.engine.random = False  # all draw the numbers of one seed: there is none to be told
    with mode:
        inputs = [zeros(graph.tensors[name]) for name in graph.inputs]
        found = track_step(_loss(module, graph.inputs), module, inputs, foreach=foreach, rooms=lambda: list(_rooms(module)))
    return replace(found, peak=found.peak - sum(value.nbytes for value in inputs) + _views(program))


def _loss(module: ParallelModule, names: Sequence[str]) -> Callable[..., Tensor]:
    """The loss of a step on inputs that nobody compares, as their content is nothing."""
    place = module.loss_index
    assert place is not None
    return lambda *inputs: module._run(dict(zip(names, inputs, strict=True)), [place])[place]


def _unread(tensor: Described, mode: AbstractContextManager[Any]) -> FileTensor:
    """A tensor as if in a file, whose parts are fake zeros: its content cannot be read."""

    class Unread(FileTensor):
        def shard(self, cuts: Sequence[Cut]) -> Tensor:
            shape = list(self.shape)
            for cut in cuts:
                shape[cut.dim] //= cut.degree
            with mode:
                return torch.zeros(shape, dtype=self.dtype)

    dtype, fact = getattr(torch, tensor.dtype), tensor.name.encode()
    return Unread(name=tensor.name, path=Path(), shape=tensor.shape, stored="", dtype=dtype, fact=fact, opened=cast(Any, None))


def _unhook(stage: Stage) -> None:
    """Let the stage run its segments' bare code, since the tracker would hook modules and keep their gradients."""
    programs = {index: stage.program(index) for index in range(stage.count)}
    bare = {id(program): replace(program, segments=tuple(map(_bare, program.segments))) for program in programs.values()}
    stage._programs = {index: bare[id(program)] for index, program in programs.items()}
    stage.first = stage._programs[0]


def _bare(segment: LocalSegment) -> LocalSegment:
    code: Any = segment.module.forward
    return replace(segment, module=code)


def _rooms(module: ParallelModule) -> Iterator[Tensor]:
    """The tensors of gathered values, which give up the memory behind them and get it again."""
    for stage in module.engine.stages.values():
        yield from stage.units.kept.values()


def _views(program: Program | Execution) -> int:
    """Bytes of the parts of inputs that are views here and would be copies on a device; other parts are tracked."""
    run = program.micro.program if isinstance(program, Execution) else program
    mesh, tensors = run.assignment.mesh.shape, run.graph.tensors
    outermost = ((n, layout) for n, layout in inputs_read(run) if all(p == R or (p.dim, p.parts) == (0, 1) for p in layout))
    return sum(local_bytes(layout, tensors[name].bytes, mesh) for name, layout in outermost)
