"""`resume`: a training continues from a checkpoint, under another plan if need be.

The plan, the number of ranks and the stages may differ from those that saved.
"""

from __future__ import annotations

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
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.agreement import agree, digest

from .checkpoint_storage import SafeReader
from .compression_leftovers import dropped, empty_leftovers
from .durable_files import torch_dtype
from .latest import find_checkpoint, say_on_stderr
from .manifest import RANDOM, Manifest, read_manifest
from .module_state import SHOWN, Tensors, differences, model_tensors, set_random_states
from .rank_facts import Positioned, device_of
from .saved_optimizer import empty_states, load_optimizer, optimizer_differences
from .saving import cause_of, finish_saving, goes_on_from, saving_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The position of the training: `step` steps are done.

    `extra`: as passed to `save`. `notes`: sentences worth telling the user.
    """

    path: Path
    step: int
    extra: Any = None
    notes: tuple[str, ...] = field(default=())


def _nothing_left() -> None:
    """Do nothing, since no part of a checkpoint waits to be loaded."""


def resume(
    module: nn.Module,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    sampler: Positioned | None = None,
    name: str | None = None,
) -> Resumed | None:
    """Load a folder's latest checkpoint, or the one called `name`; None if there is none.

    Where the file `latest` is lost, the newest whole checkpoint is taken, and a note says so.
    Every rank calls this. Plan, number of ranks, stages and ZeRO may differ from those that saved;
    a plain module on one device works, too. A checkpoint of another model or optimizer, or a
    damaged one, is refused on every rank with the difference, and the module stays unchanged.
    """
    # A save under way may be the checkpoint to resume from.
    finish_saving()
    failure: Exception | None = None
    path = None
    manifest = None
    text = ""
    losses: list[str] = []
    targets: Tensors = {}
    states: dict[str, dict[str, Any]] = {}
    take_leftovers: Callable[[], None] = _nothing_left
    try:
        path = find_checkpoint(Path(folder).absolute(), name, losses.append)
        if path is not None:
            manifest, text = read_manifest(path)
            _require_fit(module, optimizer, sampler, manifest, path)
            targets, states = _targets(module, optimizer, manifest)
            more, take_leftovers = empty_leftovers(module, manifest)
            targets |= more
    except Exception as error:
        failure = error
    # Ranks of several machines may see unlike folders; nothing is loaded before they agree.
    agree({"the checkpoint": digest(text)}, failure=failure, device=device_of(module))
    if path is None or manifest is None:
        return None
    reader = SafeReader(path, manifest)
    _require_whole(reader, device_of(module))
    _read(targets, reader)
    # After the tensors are read: leftovers are shares of what was read into them.
    take_leftovers()
    if optimizer is not None:
        load_optimizer(optimizer, module, manifest, states)
    set_random_states(targets)
    if sampler is not None and manifest.sampler is not None:
        sampler.load_state_dict(manifest.sampler)
    # Where `latest` is lost, other checkpoints may be anybody's.
    goes_on_from(path, () if losses else manifest.beside)
    notes = (*losses, *_notes(module, manifest))
    # All ranks have the same notes; one of them says so.
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in notes:
            say_on_stderr(note)
    return Resumed(path=path, step=manifest.step, extra=manifest.extra, notes=notes)


def _require_fit(
    module: nn.Module,
    optimizer: Optimizer | None,
    sampler: Positioned | None,
    manifest: Manifest,
    path: Path,
) -> None:
    """Refuse a checkpoint of another model or optimizer, with the differences."""
    problems = differences(module, manifest)
    # An optimizer's differences follow from the model's, so they would only repeat them.
    if optimizer is not None and not problems:
        problems = optimizer_differences(optimizer, module, manifest)
    if sampler is not None and manifest.sampler is None:
        problems.append("the checkpoint has no position of a sampler")
    if not problems:
        return
    lines = problems[:SHOWN]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more")
    shown = "\n  ".join(lines)
    raise PlanError(
        f"the checkpoint {path} (of {manifest.model}, step {manifest.step}) does not fit:"
        f"\n  {shown}"
    )


def _targets(
    module: nn.Module, optimizer: Optimizer | None, manifest: Manifest
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """The tensors to fill: the module's own, and new ones for the optimizer's state."""
    targets = model_tensors(module)
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        tensors, states = empty_states(optimizer, module, manifest)
        targets |= tensors
    # A run on CPUs has no use for the state of a GPU's generator.
    generators = {"cpu"}
    if isinstance(module, ParallelModule):
        generators.add(module.engine.device.type)
    for kind, entry in manifest.named(RANDOM).items():
        if kind in generators:
            targets[RANDOM + kind] = torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype))
    return targets, states


def _require_whole(reader: SafeReader, device: torch.device) -> None:
    """Check the pieces, so that every rank learns of a damaged one before the module is changed."""
    failure: Exception | None = None
    try:
        if dist.is_initialized():
            reader.require_whole(dist.get_rank(), dist.get_world_size())
        else:
            reader.require_whole()
    except Exception as error:
        failure = error
    agree({}, failure=failure, device=device)


def _read(targets: Tensors, reader: SafeReader) -> None:
    """Let DCP fill the tensors from the pieces."""
    group = saving_group()
    # Flat names are ours already; DCP's flattening would rename those with dots.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp_load(
                targets,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise cause_of(error, "the checkpoint cannot be read") from None


def _notes(module: nn.Module, manifest: Manifest) -> tuple[str, ...]:
    """Sentences about parts of a checkpoint that this training does not use as they were."""
    notes = []
    saved = manifest.model_fingerprint
    if isinstance(module, ParallelModule) and saved not in (
        None,
        module.engine.graph.fingerprint(),
    ):
        text = "is of a model with these parameters, but another graph (another batch or loss, say)"
        notes.append(f"the checkpoint of step {manifest.step} {text}")
    if names := dropped(module, manifest):
        listed = ", ".join(names[:SHOWN])
        if len(names) > SHOWN:
            listed += f" and {len(names) - SHOWN} more"
        notes.append(
            "what compressed gradients had left over is dropped,"
            f" because these are summed whole here: {listed}"
        )
    return tuple(notes)
