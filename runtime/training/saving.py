"""`save`: a checkpoint of module, optimizer and position, whole or not at all, at once or during the next steps."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import autopar
from autopar.errors import AutoparError, RunError, UsageError

from ..agreement import agree, digest
from ..launch import let_wait
from ..module import ParallelModule
from ..parameters import local_of
from .leftovers import leftover_tensors
from .manifest import Group, Manifest, Scalar
from .states import Tensors, groups_of, kind_of, model_tensors, optimizer_tensors, random_states
from .storage import SafeWriter

SLOWEST = timedelta(minutes=30)
"""The longest wait of a rank for another's disk."""


class Positioned(Protocol):
    """An object with a position in the data, such as `autopar.sampler`."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at this position."""


class Saving:
    """A save under way, or done: `path` is known when it is done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.path: Path | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._copies: Tensors = {}

    def wait(self, seconds: float | None = None) -> Path:
        """The checkpoint's path, when it is whole; a `RunError` where it cannot be, or is not within `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise RunError(f"the save of step {self.step} is not through after {seconds:g} s: the disk is too slow for saves so often")
        if self._error is not None:
            raise self._error
        assert self.path is not None
        return self.path

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()


class _Held:
    """The saves of this process that may be under way, by folder, and the group in which ranks talk about them."""

    def __init__(self) -> None:
        self.savings: dict[Path, Saving] = {}
        self.world: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None


_HELD = _Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The data that each rank sends to rank 0."""

    numbers: dict[str, Scalar]
    groups: list[Group]
    manifest: Manifest


def save(
    module: nn.Module,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    step: int,
    sampler: Positioned | None = None,
    extra: Any = None,
    keep: int | None = None,
    wait: float | None = None,
) -> Saving:
    """Save after `step` steps; every rank calls this, with the same folder. A plain module on one device works, too.

    `sampler`: its position is saved. `extra`: further plain data (as in JSON) for the resumed training, such as a
    scheduler's state dict. `keep`: the number of checkpoints that stay. `wait`: None waits until the checkpoint is
    whole. A number of seconds copies the data to the host's memory and writes it during the next steps; it first waits
    at most that long for the save before, whose memory it uses again, since fresh memory costs more to fill than to
    copy. A checkpoint gets its name only when it is whole on the disk; a save that fails or is killed leaves the one
    before intact.
    """
    place = Path(folder).absolute()
    failure: Exception | None = None
    room: Tensors = {}
    try:
        before = _HELD.savings.pop(place, None)
        if before is not None:
            before.wait(wait)
            room = before._copies
        state, facts, plan = _gathered(module, optimizer, step, sampler, extra, keep)
    except Exception as error:
        failure = error
    agree({"the step to save": digest(str(step))}, failure=failure, device=device_of(module))
    group = saving_group()
    writer = SafeWriter(place, facts, _manifest, plan=plan, keep=keep)
    saving = Saving(step)
    if wait is None:
        _write(saving, state, writer, group)
        saving.wait()
        return saving
    saving._copies = on_host(state, room)
    saving._thread = threading.Thread(target=_write, args=(saving, saving._copies, writer, group), name=f"autopar-save-{step}")
    saving._thread.start()
    _HELD.savings[place] = saving
    return saving


def finish_saving() -> None:
    """Wait for every save that is under way in this process."""
    while _HELD.savings:
        _HELD.savings.popitem()[1].wait()


def _gathered(
    module: nn.Module, optimizer: Optimizer | None, step: int, sampler: Positioned | None, extra: Any, keep: int | None
) -> tuple[Tensors, _Facts, str | None]:
    """This rank's tensors, its facts, and the plan as text."""
    if step < 0 or (keep is not None and keep < 1):
        raise UsageError(f"step is {step} and keep is {keep}; a step is at least 0, and at least 1 checkpoint is kept")
    state = model_tensors(module, writing=True)
    states: tuple[Tensors, dict[str, Scalar]] = ({}, {})
    if optimizer is not None:
        states = optimizer_tensors(optimizer, module)
    plan = module.engine.plan if isinstance(module, ParallelModule) else None
    text = plan.to_json() if plan is not None else None
    manifest = Manifest(
        made_by=autopar.__version__,
        step=step,
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        model=module.engine.graph.name if isinstance(module, ParallelModule) else type(module).__name__,
        model_fingerprint=module.engine.graph.fingerprint() if isinstance(module, ParallelModule) else None,
        plan_fingerprint=digest(text).hex() if text is not None else None,
        plan=str(plan) if plan is not None else "",
        optimizer=kind_of(optimizer) if optimizer is not None else None,
        sampler=_plain_data("the sampler's state", sampler.state_dict()) if sampler is not None else None,
        extra=_plain_data("extra", extra),
        tensors={},
        files={},
    )
    groups = groups_of(optimizer, module) if optimizer is not None else []
    state |= states[0] | random_states(module) | leftover_tensors(module)
    return state, _Facts(numbers=states[1], groups=groups, manifest=manifest), text


def _plain_data(what: str, value: Any) -> Any:
    """The value as it will be read again; nothing else is saved, since a stranger's pickle is a stranger's program."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} is to be plain data (numbers, texts, lists, dicts): {error}") from error


def _manifest(told: list[_Facts]) -> Manifest:
    """The manifest, without tensors and files, from the data of all ranks."""
    numbers: dict[str, Scalar] = {}
    for rank, one in enumerate(told):
        for path, number in one.numbers.items():
            if repr(numbers.setdefault(path, number)) != repr(number):
                both = f"{numbers[path].value} and, on rank {rank}, {number.value}"
                raise RunError(f"{path} is {both}: a checkpoint holds one number for all ranks")
    counts = {len(one.groups) for one in told}
    if len(counts) > 1:
        raise RunError(f"the ranks' optimizers have unequal numbers of groups: {sorted(counts)}")
    groups = []
    for parts in zip(*(one.groups for one in told), strict=True):
        names = dict.fromkeys(name for part in parts for name in part.names)
        groups.append(Group(names=tuple(names), options=parts[0].options))
    return told[0].manifest.model_copy(update={"scalars": numbers, "groups": tuple(groups)})


def on_host(state: Tensors, room: Tensors) -> Tensors:
    """Copies in the host's memory with the values' own descriptions, in the memory of `room` where it fits.

    From a GPU they go through pinned memory, all at once.
    """
    found: Tensors = {}
    for name, value in state.items():
        local = local_of(value)
        held = local_of(room[name]) if name in room else None
        if held is None or (held.shape, held.dtype) != (local.shape, local.dtype):
            held = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        held.copy_(local, non_blocking=True)
        found[name] = type(value)(held, value._spec, requires_grad=False) if isinstance(value, DTensor) else held
    if any(local_of(value).is_cuda for value in state.values()):
        torch.cuda.current_stream().synchronize()
    return found


def device_of(module: nn.Module) -> torch.device:
    """The device on which ranks of this module compare data."""
    return module.engine.device if isinstance(module, ParallelModule) else torch.device("cpu")


def saving_group() -> dist.ProcessGroup | None:
    """A Gloo group of all ranks for checkpoints only; while it waits for a slow disk, steps communicate on."""
    if not dist.is_initialized():
        return None
    if _HELD.world is not dist.group.WORLD:
        _HELD.world, _HELD.group = dist.group.WORLD, let_wait(dist.new_group(backend="gloo", timeout=SLOWEST))
    return _HELD.group


def _write(saving: Saving, state: Tensors, writer: SafeWriter, group: dist.ProcessGroup | None) -> None:
    """Write, and say how it went."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp_save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        saving.path = writer.folder / writer.name
    except CheckpointException as error:
        saving._error = cause_of(error, "the checkpoint cannot be saved")
    except Exception as error:
        saving._error = RunError(f"the checkpoint cannot be saved: {error}")
    if saving._error is None:
        return
    writer.abandon()
    if saving._thread is not None:
        print(f"autopar: step {saving.step}: {saving._error}", file=sys.stderr)


def cause_of(error: CheckpointException, what: str) -> AutoparError:
    """The first failing rank's error, in one sentence."""
    rank, (cause, _) = min(error.failures.items())
    return RunError(f"{what}: rank {rank}: {cause}" if str(cause) else f"{what}: rank {rank}: {type(cause).__name__}")
