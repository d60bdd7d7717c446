"""The contents of a checkpoint by name: a module's tensors and torch's generators.

Names are those of the model's graph, which are those of the original module, so any plan, and the
plain module, reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import RunError
from autopar.runtime.files.module_weights import saved_buffers
from autopar.runtime.module.parallel_module import ParallelModule

from .durable_files import dtype_name
from .manifest import MODEL, RANDOM, Entry, Manifest

Tensors = dict[str, Tensor]
SHOWN = 10
"""Differences that a message lists."""


def parameters_of(module: nn.Module) -> Tensors:
    """The parameters that this rank has, by name."""
    if isinstance(module, ParallelModule):
        return dict(module.graph_parameters())
    return dict(module.named_parameters())


def buffers_of(module: nn.Module) -> Tensors:
    """The buffers that are saved, and the constants that a call changes."""
    saved = {paths[0]: buffer for paths, buffer in saved_buffers(module)}
    if not isinstance(module, ParallelModule):
        return saved
    # Constants that a call changes are state, though the module does not call them buffers.
    changing = {name: module._constant(name) for name in module.engine.graph.updates}
    return saved | changing


def model_tensors(module: nn.Module, *, writing: bool = False) -> Tensors:
    """Parameters and buffers; for `writing`, what one checkpoint cannot hold is refused."""
    buffers = buffers_of(module)
    if (
        writing
        and isinstance(module, ParallelModule)
        and module.engine.execution.schedule.reductions.local
    ):
        raise RunError(
            "every rank has parameters of its own (layerwise_parallel),"
            " which one checkpoint for any plan cannot hold"
        )
    return {
        MODEL + name: value.detach()
        for name, value in (*parameters_of(module).items(), *buffers.items())
    }


def _expected(module: nn.Module) -> dict[str, Entry]:
    """The shape and type of every tensor in a checkpoint of this model, on whichever rank."""
    held = parameters_of(module) | buffers_of(module)
    entries = {
        name: Entry(shape=tuple(value.shape), dtype=dtype_name(value.dtype))
        for name, value in held.items()
    }
    if isinstance(module, ParallelModule):
        # Stages on other ranks have parameters, too: the graph knows all of them.
        storages = module.engine.storages
        for tensor in module.engine.graph.parameters:
            dtype = dtype_name(storages.dtype_of(tensor.name))
            entries[tensor.name] = Entry(shape=tensor.shape, dtype=dtype)
    return entries


def differences(module: nn.Module, manifest: Manifest) -> list[str]:
    """The differences between a checkpoint and a module, in words."""
    here = _expected(module)
    there = manifest.named(MODEL)
    lines = [
        f"{name!r} is in the model, not in the checkpoint" for name in here if name not in there
    ]
    lines += [
        f"{name!r} is in the checkpoint, not in the model" for name in there if name not in here
    ]
    for name in (name for name in here if name in there):
        mine = here[name]
        saved = there[name]
        if (mine.shape, mine.dtype) != (saved.shape, saved.dtype):
            lines.append(
                f"{name!r} is {mine.dtype} {list(mine.shape)},"
                f" saved as {saved.dtype} {list(saved.shape)}"
            )
    return lines


def random_states(module: nn.Module) -> Tensors:
    """The states of rank 0's generators, by which all ranks draw."""
    # All ranks draw from the state of rank 0, so one is enough.
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    states = {f"{RANDOM}cpu": torch.get_rng_state()}
    if isinstance(module, ParallelModule) and module.engine.device.type == "cuda":
        states[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(module.engine.device)
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Go on drawing where rank 0 was."""
    if f"{RANDOM}cpu" in states:
        torch.set_rng_state(states[f"{RANDOM}cpu"])
    if f"{RANDOM}cuda" in states:
        torch.cuda.set_rng_state(states[f"{RANDOM}cuda"])
