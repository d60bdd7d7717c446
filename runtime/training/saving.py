"""`save`: a checkpoint of module, optimizer and position, whole or not at all.

It is written at once, or during the next steps.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import AutoparError, PlanError, RunError
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.ranks.agreement import agree, digest

from .checkpoint_storage import SafeWriter
from .finite_values import require_finite
from .folder_lock import hold
from .module_state import Tensors
from .rank_facts import Positioned, device_of, gather_state, joined_manifest

SLOWEST = timedelta(minutes=30)
"""The longest wait of a rank for another's disk."""


class Saving:
    """A save under way, or done: `path` is known when it is done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.path: Path | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._copies: Tensors = {}

    def wait(self, seconds: float | None = None) -> Path:
        """The checkpoint's path, when it is whole.

        Raises a `RunError` where it cannot be saved, or is not within `seconds`.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise RunError(
                    f"the save of step {self.step} is not through after {seconds:g} s:"
                    " the disk is too slow for saves so often"
                )
        if self._error is not None:
            raise self._error
        assert self.path is not None
        return self.path

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()


class _Held:
    """The saves of this process that may be under way, by folder, and the ranks' group for them.

    own: the names of the training's checkpoints in a folder: written here, or before what was
    resumed from.
    """

    def __init__(self) -> None:
        self.savings: dict[Path, Saving] = {}
        self.own: dict[Path, set[str]] = {}
        self.world: dist.ProcessGroup | None = None
        self.group: dist.ProcessGroup | None = None


_HELD = _Held()


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
    allow_nonfinite: bool = False,
) -> Saving:
    """Save after `step` steps; every rank calls this, with the same folder.

    A plain module on one device works, too. `sampler`: its position is saved. `extra`: further
    plain data (as in JSON) for the resumed training, such as a scheduler's state dict. `keep`: the
    number of this training's checkpoints that stay. `wait`: None waits until the checkpoint is
    whole. A number of seconds copies the data to the host's memory and writes it during the next
    steps; it first waits at most that long for the save before, whose memory it uses again, since
    fresh memory costs more to fill than to copy. `allow_nonfinite`: trained parameters may hold NaN
    or infinity, which every rank else refuses to save.

    A checkpoint gets its name only when it is whole on the disk; a save that fails or is killed
    leaves the one before intact. A folder is saved into by one training at a time.
    """
    place = Path(folder).absolute()
    failure: Exception | None = None
    room: Tensors = {}
    try:
        # Saves into one folder follow one another: the manifest of the later one counts as the
        # latest.
        before = _HELD.savings.pop(place, None)
        if before is not None:
            before.wait(wait)
            room = before._copies
        state, facts, plan = gather_state(module, optimizer, step, sampler, extra, keep)
        if not allow_nonfinite:
            require_finite(module, place, step)
        if not dist.is_initialized() or dist.get_rank() == 0:
            hold(place)
    except Exception as error:
        failure = error
    # Every rank fails if one cannot save, rather than waiting for it in the next collective.
    try:
        agree({"the step to save": digest(str(step))}, failure=failure, device=device_of(module))
    except PlanError as error:
        raise RunError(str(error)) from error
    group = saving_group()
    own = _HELD.own.setdefault(place, set())
    writer = SafeWriter(place, facts, joined_manifest, plan=plan, keep=keep, own=own)
    saving = Saving(step)
    if wait is None:
        _write(saving, state, writer, group)
        saving.wait()
        return saving
    # Copied here, because the next step changes the tensors while the thread writes them.
    saving._copies = on_host(state, room)
    saving._thread = threading.Thread(
        target=_write, args=(saving, saving._copies, writer, group), name=f"autopar-save-{step}"
    )
    saving._thread.start()
    _HELD.savings[place] = saving
    return saving


def goes_on_from(path: Path, beside: Collection[str]) -> None:
    """Take over a checkpoint and those `beside` it as this training's own."""
    _HELD.own.setdefault(path.parent, set()).update((path.name, *beside))


def finish_saving() -> None:
    """Wait for every save that is under way in this process."""
    while _HELD.savings:
        _HELD.savings.popitem()[1].wait()


def on_host(state: Tensors, room: Tensors) -> Tensors:
    """Copies of tensors in the host's memory, in the memory of `room` where it fits.

    They have the values' own descriptions. From a GPU they go through pinned memory, all at once.
    """
    copies: Tensors = {}
    for name, value in state.items():
        local = local_of(value)
        held = local_of(room[name]) if name in room else None
        # A model may have grown since the save before.
        if held is None or (held.shape, held.dtype) != (local.shape, local.dtype):
            # Only pinned memory can be copied to while the host goes on.
            held = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
        held.copy_(local, non_blocking=True)
        if isinstance(value, DTensor):
            copies[name] = type(value)(held, value._spec, requires_grad=False)
        else:
            copies[name] = held
    if any(local_of(value).is_cuda for value in state.values()):
        # The next step changes the tensors, so the copies must have been made.
        torch.cuda.current_stream().synchronize()
    return copies


def saving_group() -> dist.ProcessGroup | None:
    """A Gloo group of all ranks for checkpoints only.

    While it waits for a slow disk, steps communicate on.
    """
    if not dist.is_initialized():
        return None
    # A process group that was destroyed and made anew needs another group, too.
    if _HELD.world is not dist.group.WORLD:
        _HELD.world = dist.group.WORLD
        # A group of its own: the saving thread's messages must not mix with those of the steps.
        _HELD.group = dist.new_group(backend="gloo", timeout=SLOWEST)
    return _HELD.group


def _write(
    saving: Saving, state: Tensors, writer: SafeWriter, group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint, and tell the `Saving` how it went."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp_save(
                state,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        saving.path = writer.folder / writer.name
    except CheckpointException as error:
        saving._error = cause_of(error, "the checkpoint cannot be saved")
    except Exception as error:
        saving._error = RunError(f"the checkpoint cannot be saved: {error}")
    if saving._error is None:
        return
    # Nobody resumes from a half; the next save would remove it, too.
    writer.abandon()
    # In a thread nobody catches the error before the next `wait`.
    if saving._thread is not None:
        print(f"autopar: step {saving.step}: {saving._error}", file=sys.stderr)


def cause_of(error: CheckpointException, what: str) -> AutoparError:
    """The first failing rank's error, in one sentence."""
    rank, (cause, _) = min(error.failures.items())
    return RunError(f"{what}: rank {rank}: {str(cause) or type(cause).__name__}")
