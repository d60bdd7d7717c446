"""Small trials of a model: a copy with one layer of each kind, called with few samples and tokens.

What an import may misread is the code of the model, which small sizes run as large ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import ModelError
from autopar.model import LoadedModel
from autopar.runtime.models.example_inputs import with_values
from autopar.runtime.models.small_copies import (
    cut_call,
    leave_out_equal,
    lengths_of,
    twin_of,
    wider,
)

SAMPLES = 2
"""The samples of a trial; one alone would hide what mixes samples."""
TOKENS = 8
"""The length of a trial's sequences."""
STORED_BYTES = 2**31
"""The most bytes of parameters in a trial, which has as many of gradients, twice."""


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
    if model.small is not None:
        yield from (partial(_of_copy, make) for make in model.small.of(model.source))
        return
    if model.at_sizes is None or model.call is None:
        yield lambda: _as_planned(model)
        return
    module = model.module if model.given is None else model.given
    _require_values(module)
    tokens = lengths_of(model.call, TOKENS)
    smaller = _own(cut_call(model.call, SAMPLES, 0, frozenset()))
    shapes = [(TOKENS, _own(cut_call(model.call, SAMPLES, TOKENS, tokens)))] if tokens else []
    shapes.append((0, smaller))
    yield partial(_trial, model, module, shapes[0][1], one_of_each=True, length=shapes[0][0])
    for length, call in shapes:
        yield partial(_trial, model, module, call, one_of_each=False, length=length)
    # The rows of a graph's nodes are no samples, of which a few can be left out.
    yield partial(_at_its_sizes, model, module)


def _of_copy(make: Callable[[], LoadedModel]) -> Trial:
    """A small copy of the model's type."""
    small = with_values(make(), 0)
    shapes = [value.shape for value in small.inputs or ()]
    batch = ", ".join("x".join(map(str, shape)) for shape in dict.fromkeys(shapes))
    size = sum(value.numel() for value in small.given.parameters())
    said = f"by a copy of its type with {size} parameters, inputs of {batch}"
    return Trial(model=small, module=small.given, said=said)


def _as_planned(model: LoadedModel) -> Trial:
    """The model as it is, for one whose sizes are fixed."""
    module = twin_of(model.module, wide=True)
    _require_values(module)
    _require_small(module)
    return Trial(model=with_values(model, 0), module=module, said="at its own sizes")


def _at_its_sizes(model: LoadedModel, module: nn.Module) -> Trial:
    """The model with its example inputs as they are."""
    if sum(tensor.bytes for tensor in model.source.tensors.values()) > STORED_BYTES:
        raise NoTrial("it runs at no smaller sizes, and its own are large for a trial")
    twin = twin_of(module, wide=True)
    assert model.at_sizes is not None
    small = with_values(model.at_sizes(twin, _own(model.call), typed=False), 0)
    return Trial(model=small, module=twin, said="at its own sizes")


def _trial(
    model: LoadedModel, module: nn.Module, call: Any, *, one_of_each: bool, length: int
) -> Trial:
    twin = twin_of(module, wide=True)
    left_out = 0
    if one_of_each:
        assert model.torch is not None
        # Two of each kind stay, as equal layers are imported in another way than single ones.
        left_out = leave_out_equal(twin, model.torch.reads, each=2)
        if not left_out:
            raise NoTrial("no three layers are equal")
    _require_small(twin)
    assert model.at_sizes is not None
    small = with_values(model.at_sizes(twin, call, typed=False), 0)
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


def _own(call: Any) -> Any:
    """A copy of a call, with floats of 16 bits cast to 32."""

    def own(value: torch.Tensor) -> torch.Tensor:
        return wider(value).clone()

    return pytree.tree_map_only(torch.Tensor, own, call)


def kinds_without(trial: Trial, model: LoadedModel) -> list[str]:
    """The kinds of operators of a model that its trial has none of."""
    tried = {operator.kind for operator in trial.model.source.operators}
    return sorted({operator.kind for operator in model.source.operators} - tried)


def failed(error: Exception) -> str:
    """Why a trial could not be made or run, in one line."""
    words = str(error).strip().split("\n")[0]
    return words if isinstance(error, (NoTrial, ModelError)) else f"{type(error).__name__}: {words}"
