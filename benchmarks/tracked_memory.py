"""The peak of a training step's memory by torch's own tracker, on fake tensors.

Nothing is computed or allocated. One rank of many runs on a process group that moves nothing, so
any size of model and mesh can be tracked in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from autopar.runtime.execution.stage import Stage
from autopar.runtime.files.weight_files import FileTensor
from autopar.runtime.lowering import LocalSegment
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.cuts import Cut
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import R
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import Types


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Bytes at the `peak`, and bytes `saved` from the forward to the backward pass."""

    peak: int
    saved: int


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Makes fake collectives hold the memory of real ones: their inputs, until the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        into_given = func is torch.ops._c10d_functional.all_gather_into_tensor_out.default
        run = _into_given if into_given else func
        # A fake collective returns at once, and would let its input go before the real one does.
        out = super().__torch_dispatch__(run, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.held.pop(args[0].untyped_storage()._cdata, None)
        elif func.namespace == "_c10d_functional":
            self.held[out.untyped_storage()._cdata] = args[0]
        return out


def _into_given(*args: Any, out: Tensor) -> Tensor:
    """Gather into `out`, and return it, where the fake kernel returns another tensor."""
    torch.ops._c10d_functional.all_gather_into_tensor_out(*args, out=out)
    return out


def _total(tracker: MemTracker, kind: str) -> int:
    """Bytes on devices; tensors that only describe a shape take none."""
    snapshot = tracker.get_tracker_snapshot(kind)
    return sum(sizes["Total"] for device, sizes in snapshot.items() if device.type != "meta")


def track_step(
    loss: Callable[..., Tensor],
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    foreach: bool = False,
    rooms: Callable[[], Sequence[Tensor]] = tuple,
) -> Tracked:
    """Track the second step of training with AdamW, when its state exists.

    foreach: all parameters are updated together. rooms: tensors whose memory is freed and allocated
    again.
    """
    optimizer = torch.optim.AdamW(module.parameters(), foreach=foreach)

    def step(forward_done: Callable[[], None]) -> None:
        """One step, with a call between its passes."""
        value = loss(*inputs)
        forward_done()
        # A gradient that is known even if nothing is computed.
        torch.autograd.backward(value, torch.tensor(1.0, dtype=value.dtype))
        del value
        optimizer.step()
        optimizer.zero_grad()

    # The first step allocates the optimizer's state, which every later one has.
    step(lambda: None)
    tracker = _Tracker()
    tracker.track_external(module, optimizer, *inputs, *rooms())
    between: list[int] = []
    with tracker:
        step(lambda: between.append(_total(tracker, "current")))
    return Tracked(peak=_total(tracker, "peak"), saved=between[0] - _total(tracker, "current"))


Parts = Callable[[nn.Module], Iterable[nn.Module]]


def track_module(
    make: Callable[[], nn.Module],
    make_inputs: Callable[[], Sequence[Tensor]],
    *,
    recompute: Parts | None = None,
) -> Tracked:
    """Track a module that returns its loss, on one device.

    recompute: gives the parts of the module that are recomputed.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make().train()
        for part in recompute(module) if recompute is not None else ():
            part.forward = _checkpointed(part.forward)
        return track_step(module, module, make_inputs())


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward function that is recomputed in the backward pass."""
    return lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
    )


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `ranks` that do not exist, inside the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def track_program(
    program: Program | Execution, *, foreach: bool = False, fake: bool = True
) -> Tracked:
    """Track a program (or a plan's step) on this rank.

    Its mesh has as many devices as the process group (see `fake_world`). Whole inputs count as in
    host memory: only the parts that are read count. With real ranks, `fake` must be off: then
    tensors and arithmetic are real.
    """
    run = program.whole.program if isinstance(program, Execution) else program
    graph = run.graph
    types = program.schedule.types if isinstance(program, Execution) else Types()
    mode: AbstractContextManager[Any] = (
        FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    )

    def zeros(tensor: Described) -> Tensor:
        """A tensor of the graph, with nothing in it."""
        with mode:
            return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))

    held = [
        replace(tensor, dtype=types.stored(tensor))
        for tensor in graph.tensors.values()
        if tensor.role in (Role.PARAMETER, Role.CONSTANT)
    ]
    values = {tensor.name: _unread(tensor, mode) if fake else zeros(tensor) for tensor in held}
    module = ParallelModule(program, DeviceGroups.create(run.assignment.mesh), values)
    for stage in module.engine.stages.values():
        _unhook(stage)
    # Ranks agree on a seed by its value, and fake tensors have none.
    if fake:
        module.engine.random = False
    with mode:
        inputs = [zeros(graph.tensors[name]) for name in graph.inputs]
        loss = _loss(module, graph.inputs)
        rooms = partial(_rooms, module)
        tracked = track_step(loss, module, inputs, foreach=foreach, rooms=rooms)
    whole_inputs = sum(value.nbytes for value in inputs)
    return replace(tracked, peak=tracked.peak - whole_inputs + bytes_of_views(program))


def _loss(module: ParallelModule, names: Sequence[str]) -> Callable[..., Tensor]:
    """The loss of a step on inputs that nobody compares, as their content is nothing."""
    place = module.loss_index
    assert place is not None
    return lambda *inputs: module._run(dict(zip(names, inputs, strict=True)), [place])[1][place]


def _unread(tensor: Described, mode: AbstractContextManager[Any]) -> FileTensor:
    """A tensor as if in a file, whose parts are fake zeros: its content cannot be read."""

    class Unread(FileTensor):
        """A tensor of a file that does not exist."""

        def shard(self, cuts: Sequence[Cut]) -> Tensor:
            """A part of the tensor, of zeros."""
            shape = list(self.shape)
            for cut in cuts:
                shape[cut.dim] //= cut.degree
            with mode:
                return torch.zeros(shape, dtype=self.dtype)

    dtype = getattr(torch, tensor.dtype)
    fact = tensor.name.encode()
    return Unread(
        name=tensor.name,
        path=Path(),
        shape=tensor.shape,
        stored="",
        dtype=dtype,
        fact=fact,
        opened=cast(Any, None),
    )


def _unhook(stage: Stage) -> None:
    """Let the stage run its segments' bare code.

    The tracker would hook modules, and count their gradients for longer than they live.
    """
    # All programs are lowered here, before the mode of fake tensors begins.
    for index in range(stage.count):
        stage.program(index)
    stage.run_as(lambda program: replace(program, segments=tuple(map(_bare, program.segments))))


def _bare(segment: LocalSegment) -> LocalSegment:
    """A segment with a function in place of its module."""
    code: Any = segment.module.forward
    return replace(segment, module=code)


def _rooms(module: ParallelModule) -> list[Tensor]:
    """The tensors of gathered values, which give up the memory behind them and get it again."""
    stages = module.engine.stages.values()
    return [value for stage in stages for value in stage.units.rooms.values()]


def bytes_of_views(program: Program | Execution) -> int:
    """Bytes of the parts of inputs that are views here and would be copies on a device.

    Other parts are tracked.
    """
    run = program.micro.program if isinstance(program, Execution) else program
    mesh = run.assignment.mesh.shape
    tensors = run.graph.tensors
    # A cut of the first dim is contiguous, so it is a view of the whole input.
    outermost = (
        (name, layout)
        for name, layout in inputs_read(run)
        if all(p == R or (p.dim, p.parts) == (0, 1) for p in layout)
    )
    return sum(local_bytes(layout, tensors[name].bytes, mesh) for name, layout in outermost)
