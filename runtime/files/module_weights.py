"""A module's weights from files: a tensor for each parameter and buffer, or an error."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from autopar.errors import ModelError, UsageError
from autopar.ir import Graph
from autopar.model import LoadedModel

from .weight_files import FileTensor, read_headers

SHOWN = 20
"""Names of each kind that a message lists."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, new modules have their parameters on the meta device, and their buffers as usual."""

    def without_memory(
        module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # Called for each parameter as it is registered, so one at a time has memory.
    handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def saved_buffers(module: nn.Module, *, saved: bool = True) -> list[tuple[list[str], Tensor]]:
    """The buffers in the state dict, or those that are not `saved` there, each with all names."""
    buffers: dict[int, tuple[list[str], Tensor]] = {}
    for path, buffer, is_saved in _buffers(module):
        if is_saved is saved:
            buffers.setdefault(id(buffer), ([], buffer))[0].append(path)
    return list(buffers.values())


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every buffer under every name, and whether it is saved."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            yield (
                (f"{prefix}.{name}" if prefix else name),
                buffer,
                name not in part._non_persistent_buffers_set,
            )


def values_from_files(model: LoadedModel, where: str | Path) -> dict[str, Tensor | FileTensor]:
    """Parameters and buffers of a PyTorch model by the graph's names, in the graph's types."""
    if model.torch is None:
        raise UsageError("weights can be given for PyTorch models; an ONNX file names its own")
    module: nn.Module = model.module
    read = read_headers(where)
    groups = _named(module)
    optional = {path for path, _, saved in _buffers(module) if not saved}
    files = _under_prefix(read, [*(path for paths, _ in groups for path in paths), *optional])
    wrong: dict[str, list[str]] = {
        "missing": [],
        "unexpected": [],
        "of another shape": [],
        "of another kind": [],
    }
    tensors: dict[str, Tensor | FileTensor] = {}
    for paths, value in (
        *groups,
        *(([path], buffer) for path, buffer, saved in _buffers(module) if not saved),
    ):
        given = next((files[path] for path in paths if path in files), None)
        if given is None:
            wrong["missing"] += [] if paths[0] in optional else [paths[0]]
        elif given.shape != tuple(value.shape):
            wrong["of another shape"].append(
                f"{paths[0]} {list(given.shape)} for {list(value.shape)}"
            )
        elif given.is_float != value.is_floating_point():
            wrong["of another kind"].append(f"{paths[0]} {given.stored} for {value.dtype}")
        else:
            tensors[paths[0]] = dataclasses.replace(
                given, dtype=_planned(model.graph, paths[0], value)
            )
    known = {path for paths, _ in groups for path in paths} | optional
    wrong["unexpected"] = [name for name in files if name not in known]
    if any(wrong.values()):
        listed = "; ".join(
            f"{kind}: {listed_names(names)}" for kind, names in wrong.items() if names
        )
        raise ModelError(
            f"the weights in {where} are not those of {type(module).__name__}: {listed}"
        )
    return tensors | {
        name: value for name, value in _computed_buffers(module).items() if name not in tensors
    }


def _named(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and saved buffers, each with all its names; the first is its name in the graph."""
    parameters: dict[int, tuple[list[str], Tensor]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(parameter), ([], parameter))[0].append(path)
    return [*parameters.values(), *saved_buffers(module)]


def _under_prefix(read: Mapping[str, FileTensor], paths: Sequence[str]) -> dict[str, FileTensor]:
    """The tensors by the module's names, if the files' names all lack (or have) one prefix.

    So it is where one of the two is a model within another.
    """
    known = set(paths)
    if not known.isdisjoint(read) or not read or not paths:
        return dict(read)
    # One name tells the prefixes that may be meant; the others must agree.
    first = next(iter(read))
    lacking = {path.removesuffix(first) for path in paths if path.endswith(f".{first}")}
    for prefix in sorted(lacking, key=len):
        if all(prefix + name in known for name in read):
            return {prefix + name: value for name, value in read.items()}
    for path in paths:
        prefix = first.removesuffix(path)
        if not first.endswith(f".{path}"):
            continue
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in read):
            return {name.removeprefix(prefix): value for name, value in read.items()}
    return dict(read)


def _planned(graph: Graph, name: str, value: Tensor) -> torch.dtype:
    if name not in graph.tensors:
        return value.dtype
    dtype: torch.dtype = getattr(torch, graph.tensors[name].dtype)
    return dtype


def listed_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _computed_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers on the meta device that no file holds, as the model itself computes them.

    Models of transformers can.
    """
    computed: dict[str, Tensor] = {}
    ways: dict[str, Callable[[nn.Module], Any]] = {}
    for prefix, part in module.named_modules():
        if callable(getattr(part, "_init_weights", None)):
            ways[prefix] = part._init_weights
        own = {
            name: buffer
            for name, buffer in part.named_buffers(recurse=False)
            if name in part._non_persistent_buffers_set
        }
        way = next(
            (
                ways[above]
                for above in reversed(ways)
                if above == "" or f"{prefix}.".startswith(f"{above}.")
            ),
            None,
        )
        if way is None or not any(buffer.is_meta for buffer in own.values()):
            continue
        # Values that do not depend on the memory's old contents have been initialised.
        first, second = (_initialised(part, own, way, fill) for fill in (0, 1))
        for name, value in first.items():
            if torch.equal(value, second[name]):
                computed[f"{prefix}.{name}" if prefix else name] = value
    return computed


def _initialised(
    part: nn.Module, own: Mapping[str, Tensor], way: Callable[[nn.Module], Any], fill: int
) -> dict[str, Tensor]:
    # A shallow copy, since the model's own buffers stay as they are until all values are known.
    alone = copy.copy(part)
    alone._buffers = {
        **part._buffers,
        **{name: torch.full_like(value, fill, device="cpu") for name, value in own.items()},
    }
    with torch.no_grad():
        way(alone)
    return {
        name: value for name, value in alone._buffers.items() if name in own and value is not None
    }


def fill_module(module: nn.Module, values: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
    """Replace a module's parameters and buffers by whole values; tied ones stay tied."""
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    made: dict[int, Tensor] = {}
    for path, old in state.items():
        if id(old) not in made and path in values:
            given = values[path]
            value = given.detach() if isinstance(given, Tensor) else given()
            made[id(old)] = (
                nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
            )
    for path, old in state.items():
        if id(old) in made:
            parent, _, leaf = path.rpartition(".")
            owner = module.get_submodule(parent)
            (owner._parameters if isinstance(old, nn.Parameter) else owner._buffers)[leaf] = made[
                id(old)
            ]  # type: ignore[assignment]
