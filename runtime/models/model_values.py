"""Values of a model's parameters and constants, wherever they are: module, model file, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.ir import Role
from autopar.model import LoadedModel
from autopar.runtime.files.module_weights import saved_buffers, values_from_files
from autopar.runtime.files.weight_files import FileTensor
from autopar.sharding.schedule import PLAIN, Types

from .onnx_module import fresh_weights, to_torch

ONNX_SEED = 0
"""Seed of fresh weights for an ONNX file that holds none."""


def model_values(
    model: LoadedModel,
    types: Types = PLAIN.types,
    *,
    seed: int = ONNX_SEED,
    weights: str | Path | None = None,
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """Values of every parameter (in its stored type) and constant, by graph name.

    Values in files are read one at a time, when asked for. `weights`: safetensors files of a
    PyTorch model.
    """
    tensors = {
        name: replace(tensor, dtype=types.stored(tensor))
        for name, tensor in model.graph.tensors.items()
    }
    graph = replace(model.graph, tensors=tensors)
    read = values_from_files(replace(model, graph=graph), weights) if weights is not None else {}
    if model.torch is not None:
        return _module_values(model, types, read)
    wanted = {
        t.name: getattr(torch, t.dtype)
        for t in graph.tensors.values()
        if t.role in (Role.PARAMETER, Role.CONSTANT)
    }
    values: dict[str, Tensor | Callable[[], Tensor]] = {
        n: to_torch(array).to(wanted[n]) for n, array in graph.constants.items() if n in wanted
    }
    stored = model.weights() if model.weights is not None else ()
    values.update(
        (n, to_torch(array).to(wanted[n])) for n, array in stored if n in wanted and n not in values
    )
    missing = [name for name in wanted if name not in values]
    if missing:
        try:
            values.update((n, value) for n, value in fresh_weights(graph, seed) if n in missing)
        except (RuntimeError, MemoryError) as error:
            # A RuntimeError is torch's for memory that it cannot get.
            reason = str(error).splitlines()[0]
            raise ModelError(
                f"the weights that the model file lacks cannot be drawn: {reason}"
            ) from error
    return values


def _module_values(
    model: LoadedModel, types: Types, files: Mapping[str, Tensor | FileTensor]
) -> dict[str, Tensor | Callable[[], Tensor]]:
    """Values of a module.

    Parameters that are stored in another type than used have their values before the cast.
    """
    assert model.torch is not None
    module: nn.Module = model.module
    values: dict[str, Tensor | Callable[[], Tensor]] = dict(model.torch.constants)
    values.update(module.named_buffers())
    values.update(module.named_parameters())
    given = dict(
        module.named_parameters() if model.given is None else model.given.named_parameters()
    )
    for tensor in model.graph.parameters:
        if types.casts(tensor):
            values[tensor.name] = _cast(
                given[tensor.name].detach(), getattr(torch, types.stored(tensor))
            )
    # Values in files come before the module's own, also where those have memory.
    values.update(files)
    on_meta = [
        name for name, value in values.items() if isinstance(value, Tensor) and value.is_meta
    ]
    if files:
        read = {name for paths, _ in saved_buffers(module) for name in paths} | set(
            model.graph.tensors
        )
        on_meta = [name for name in on_meta if name in read]
    if on_meta and files:
        raise ModelError(
            f"no file holds {', '.join(on_meta[:5])}, computed when the module is made, which was "
            "on the meta device: make it under autopar.parameters_on_meta(), which leaves buffers "
            "where they are"
        )
    if on_meta:
        raise ModelError(
            f"the module has no weights: {', '.join(on_meta[:5])} lie on the meta device; give "
            "their files as weights=FOLDER (--weights FOLDER), or materialise it before running"
        )
    return values


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor | Callable[[], Tensor]:
    """A value in that type, cast when it is asked for."""
    return value if value.dtype == dtype or value.is_meta else partial(value.to, dtype)
