"""Small trials of a model: a copy with one layer of each kind, called with few samples and tokens.

What an import may misread is the code of the model, which small sizes run as large ones do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import ModelError
from autopar.frontends.torch import equal_layers
from autopar.model import LoadedModel
from autopar.runtime.models.example_inputs import with_values

SAMPLES = 2
"""The samples of a trial; one alone would hide what mixes samples."""
TOKENS = 8
"""The length of a trial's sequences."""
STORED_BYTES = 2**31
"""The most bytes of parameters in a trial, which has as many of gradients, twice."""
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with the module and the inputs to call it with, and its sizes in words."""

    model: LoadedModel
    module: nn.Module
    said: str


class NoTrial(Exception):
    """No trial of a model can be made; the text says why."""


def trials_of(model: LoadedModel) -> Iterator[Callable[[], Trial]]:
    """Trials of a PyTorch model, the smallest first; each raises where it cannot be made."""
    if model.again is None or model.call is None:
        yield lambda: _as_planned(model)
        return
    module = model.module if model.given is None else model.given
    _require_values(module)
    tokens = _lengths(model.call)
    shapes = [(TOKENS, _cut(model.call, TOKENS, tokens))] if tokens else []
    shapes.append((0, _cut(model.call, 0, frozenset())))
    for length, call in shapes:
        for kinds in (True, False):
            yield lambda call=call, kinds=kinds, length=length: _trial(  # type: ignore[misc]
                model, module, call, one_of_each=kinds, length=length
            )


def _as_planned(model: LoadedModel) -> Trial:
    """The model as it is, for one whose sizes are fixed."""
    module = _twin(model.module)
    _require_values(module)
    _require_small(module)
    return Trial(model=with_values(model, 0), module=module, said="at its own sizes")


def _trial(
    model: LoadedModel, module: nn.Module, call: Any, *, one_of_each: bool, length: int
) -> Trial:
    twin = _twin(module)
    left_out = 0
    if one_of_each:
        assert model.torch is not None
        left_out = _keep_one_of_each(twin, model.torch.reads)
        if not left_out:
            raise NoTrial("no two layers are equal")
    _require_small(twin)
    assert model.again is not None
    small = with_values(model.again(twin, call), 0)
    sizes = f"{SAMPLES} samples" + (f" of {length}" if length else "")
    layers = f", {left_out} equal layers left out" if left_out else ""
    return Trial(model=small, module=twin, said=sizes + layers)


def _require_values(module: nn.Module) -> None:
    """Refuse a module without weights."""
    named = next((name for name, value in module.named_parameters() if value.is_meta), None)
    if named is not None:
        raise NoTrial(f"its parameters have no values ({named} lies on the meta device)")


def _require_small(module: nn.Module) -> None:
    """Refuse a module whose gradients take too much memory."""
    stored = sum(value.numel() * value.element_size() for value in module.parameters())
    if stored > STORED_BYTES:
        raise NoTrial(
            f"its smallest trial has {stored / 2**30:.1f} GiB of parameters, more than "
            f"{STORED_BYTES / 2**30:.0f}"
        )


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its parameters' memory, and has buffers of its own.

    Floats of 16 bits are cast to 32, in which rounding hides less.
    """
    memo: dict[int, Any] = {}

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value.detach().float() if value.dtype in _HALVES else value.detach()

    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(wide(parameter), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = wide(buffer).clone()
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:  # whatever a module holds that cannot be copied
        words = str(error).strip().split("\n")[0]
        raise NoTrial(f"it cannot be copied: {type(error).__name__}: {words}") from error
    return twin


def _keep_one_of_each(module: nn.Module, reads: Any) -> int:
    """Leave out layers of lists that are equal to an earlier one; how many there were."""
    left_out = 0
    for path, part in list(module.named_modules()):
        if not isinstance(part, nn.ModuleList):
            continue
        kept = list[nn.Module]()
        for name, layer in part.named_children():
            place = f"{path}.{name}" if path else name
            if any(equal_layers(layer, other, place, reads) for other in kept):
                left_out += 1
            else:
                kept.append(layer)
        if len(kept) < len(part):
            part._modules.clear()
            part.extend(kept)
    return left_out


def _lengths(call: Any) -> frozenset[int]:
    """The lengths of sequences: second dims of inputs of integers."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    integers = [leaf for leaf in tensors if not leaf.is_floating_point() and leaf.dim() == 2]
    return frozenset(leaf.shape[1] for leaf in integers if leaf.shape[1] > TOKENS)


def _cut(call: Any, length: int, lengths: frozenset[int]) -> Any:
    """A call with few samples, and with sequences of these `lengths` cut to `length`."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    batch = next((leaf.shape[0] for leaf in tensors if leaf.dim()), 0)

    def cut(value: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(value.shape):
            if size in lengths:
                value = value.narrow(dim, 0, length)
            elif dim == 0 and size == batch > SAMPLES:
                value = value.narrow(dim, 0, SAMPLES)
        value = value.detach()
        return (value.float() if value.dtype in _HALVES else value).clone()

    return pytree.tree_map_only(torch.Tensor, cut, call)


def kinds_without(trial: Trial, model: LoadedModel) -> list[str]:
    """The kinds of operators of a model that its trial has none of."""
    tried = {operator.kind for operator in trial.model.source.operators}
    return sorted({operator.kind for operator in model.source.operators} - tried)


def failed(error: Exception) -> str:
    """Why a trial could not be made or run, in one line."""
    words = str(error).strip().split("\n")[0]
    return words if isinstance(error, (NoTrial, ModelError)) else f"{type(error).__name__}: {words}"
