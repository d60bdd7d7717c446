"""`resume`: a training continues from a checkpoint, under the present plan, number of ranks and stages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from autopar.errors import PlanError

from ..agreement import agree, digest
from ..module import ParallelModule
from .leftovers import dropped, empty_leftovers
from .manifest import RANDOM, Manifest, find_checkpoint, read_manifest
from .saving import Positioned, cause_of, device_of, finish_saving, saving_group
from .states import (
    SHOWN,
    Tensors,
    differences,
    empty_states,
    load_optimizer,
    model_tensors,
    optimizer_differences,
    set_random_states,
)
from .storage import SafeReader, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The position of the training: `step` steps are done.

    `extra`: as given to `save`. `notes`: sentences worth telling the user.
    """

    path: Path
    step: int
    extra: Any = None
    notes: tuple[str, ...] = field(default=())


def resume(
    module: nn.Module,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    sampler: Positioned | None = None,
    name: str | None = None,
) -> Resumed | None:
    """Load a folder's latest checkpoint (or the one called `name`) into a module and optimizer; None if there is none.

    Every rank calls this. Plan, number of ranks, stages and ZeRO may differ from those that saved; a plain module on
    one device works, too. A checkpoint of another model or optimizer, or a damaged one, is refused on every rank with
    the difference, and the module stays unchanged.
    """
    finish_saving()
    failure: Exception | None = None
    path, manifest, text = None, None, ""
    targets: Tensors = {}
    states: dict[str, dict[str, Any]] = {}
    take_leftovers: Callable[[], None] = lambda: None  # noqa: E731
    try:
        path = find_checkpoint(Path(folder).absolute(), name)
        if path is not None:
            manifest, text = read_manifest(path)
            _require_fit(module, optimizer, sampler, manifest, path)
            targets, states = _targets(module, optimizer, manifest)
            more, take_leftovers = empty_leftovers(module, manifest)
            targets |= more
    except Exception as error:
        failure = error
    agree({"the checkpoint": digest(text)}, failure=failure, device=device_of(module))
    if path is None or manifest is None:
        return None
    reader = SafeReader(path, manifest)
    _require_whole(reader, device_of(module))
    _read(targets, reader)
    take_leftovers()
    if optimizer is not None:
        load_optimizer(optimizer, module, manifest, states)
    set_random_states(targets)
    if sampler is not None and manifest.sampler is not None:
        sampler.load_state_dict(manifest.sampler)
    notes = _notes(module, manifest)
    if notes and (not dist.is_initialized() or dist.get_rank() == 0):
        print("\n".join(f"autopar: {note}" for note in notes), file=sys.stderr)
    return Resumed(path=path, step=manifest.step, extra=manifest.extra, notes=notes)


def _require_fit(module: nn.Module, optimizer: Optimizer | None, sampler: Positioned | None, manifest: Manifest, path: Path) -> None:
    found = differences(module, manifest)
    if optimizer is not None and not found:
        found = optimizer_differences(optimizer, module, manifest)
    if sampler is not None and manifest.sampler is None:
        found.append("the checkpoint has no position of a sampler")
    if found:
        shown = "\n  ".join(found[:SHOWN]) + (f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        raise PlanError(f"the checkpoint {path} (of {manifest.model}, step {manifest.step}) does not fit:\n  {shown}")


def _targets(module: nn.Module, optimizer: Optimizer | None, manifest: Manifest) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """The tensors to fill: the module's own, and new ones for the optimizer's state."""
    found = model_tensors(module)
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        more, states = empty_states(optimizer, module, manifest)
        found |= more
    for kind, entry in manifest.named(RANDOM).items():
        if kind == "cpu" or (isinstance(module, ParallelModule) and module.engine.device.type == kind):
            found[RANDOM + kind] = torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype))
    return found, states


def _require_whole(reader: SafeReader, device: torch.device) -> None:
    """Check the pieces, so that every rank learns of a damaged one before the module is changed."""
    failure: Exception | None = None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        reader.require_whole(rank, ranks)
    except Exception as error:
        failure = error
    agree({}, failure=failure, device=device)


def _read(targets: Tensors, reader: SafeReader) -> None:
    group = saving_group()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp_load(targets, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise cause_of(error, "the checkpoint cannot be read") from None


def _notes(module: nn.Module, manifest: Manifest) -> tuple[str, ...]:
    found = []
    if isinstance(module, ParallelModule) and manifest.model_fingerprint not in (None, module.engine.graph.fingerprint()):
        text = "is of a model with these parameters, but another graph (another batch or loss, say)"
        found.append(f"the checkpoint of step {manifest.step} {text}")
    if names := dropped(module, manifest):
        listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        found.append(f"what compressed gradients had left over is dropped, because these are summed whole here: {listed}")
    return tuple(found)
