"""Exports a module without its weights.

`torch.export` runs on fake tensors, cast where another dtype is wanted.
"""

from __future__ import annotations

import contextlib
import logging
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.utils import _pytree as pytree

from autopar.errors import ModelError
from autopar.forking import keep_forkable

from .folding import Folding, Kind, folded_calls, passed
from .known_arguments import KnownArguments, known_arguments
from .scans import scans_as_operators

FOLLOWED_NUMBERS = 2**16
"""The most elements of a constant whose values torch itself follows through an export."""
_OF_DATA = (symbolic_shapes.GuardOnDataDependentSymNode, fake_tensor.DataDependentOutputException)
_CONTEXTS = str(contextlib.__file__)

keep_forkable()  # before the first fake tensor


def export_fake(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    known: KnownArguments | None = None,
) -> torch.export.ExportedProgram:
    """Export a module by `torch.export` on fake tensors, and follow what is known with `known`.

    Real weights stay untouched, meta weights become fake CPU ones.
    """
    with _faked(module, args, kwargs, dtype, known) as (inputs, keyword_inputs, _):
        return _exported(module, inputs, keyword_inputs)


def export_folded(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    folding: Folding,
) -> tuple[torch.export.ExportedProgram, list[torch.export.ExportedProgram]]:
    """Export a module with calls of its layers, and a layer of each kind."""
    with _faked(module, args, kwargs, dtype, folding.known) as (inputs, keyword_inputs, mode):
        with folded_calls(folding):
            program = _exported(module, inputs, keyword_inputs)
        return program, [_layer(kind, mode, folding.known) for kind in folding.kinds]


def _layer(kind: Kind, mode: FakeTensorMode, known: KnownArguments) -> torch.export.ExportedProgram:
    """The program of a kind of layer: a function of the tensors that it is passed."""
    with mode:
        given = [
            torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in kind.arguments if passed(leaf)
        ]

    def forward(*tensors: torch.Tensor) -> Any:
        own = iter(tensors)
        leaves = [next(own) if passed(leaf) else leaf for leaf in kind.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, kind.spec)
        with known.called((args, kwargs)):
            return type(kind.layer).forward(kind.layer, *args, **kwargs)

    kind.layer.forward = forward
    try:
        return _exported(kind.layer, tuple(given), {})
    finally:
        del kind.layer.forward


@contextmanager
def _faked(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    known: KnownArguments | None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], FakeTensorMode]]:
    """Fake copies of the inputs, while the module has fake parameters and buffers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "meta":
            with mode:
                empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                return _like(value, empty)
        return mode.from_tensor(value, static_shapes=True)

    def wanted(value: torch.Tensor) -> Any:
        faked = fake(value)
        if dtype in (None, value.dtype) or not value.is_floating_point():
            return faked
        with mode:
            return _like(value, faked.detach().to(dtype))

    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    # A tied parameter has several paths and is replaced by one fake tensor.
    replaced = {value: wanted(value) for value in dict.fromkeys(state.values())}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    fakes_of_inputs = [fake(leaf) for leaf in _apart(leaves)]
    inputs, keyword_inputs = pytree.tree_unflatten(fakes_of_inputs, spec)
    fakes = {path: replaced[value] for path, value in state.items()}
    with (
        torch.nn.utils.stateless._reparametrize_module(module, fakes, stack_weights=True),
        scans_as_operators(module),
        _small_constants_known(),
        known_arguments(module, known) if known is not None else nullcontext(),
    ):
        yield inputs, keyword_inputs, mode


@contextmanager
def _small_constants_known() -> Iterator[None]:
    """While this lasts, code may read numbers from small tensors that it makes of numbers.

    Torch follows the values of such tensors through an export where they have one element. Sizes of
    images are a few numbers for each, which set the shapes of what follows.
    """
    with (
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", FOLLOWED_NUMBERS),
        patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", FOLLOWED_NUMBERS),
    ):
        yield


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    try:
        with _no_draws_on_the_host(module), _told_once():
            return torch.export.export(module, args, kwargs, strict=False)
    except ModelError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}{_place(error)}"
        if isinstance(error, _OF_DATA):
            text = (
                f"its code reads a number of its data{_place(error)}, which no plan can know: "
                "compute with tensors (torch.where for a choice), or pass a Python number"
            )
        raise ModelError(f"torch.export cannot capture {type(module).__name__}: {text}") from error


@contextmanager
def _no_draws_on_the_host(module: torch.nn.Module) -> Iterator[None]:
    """Refuse a module that draws numbers of Python or numpy, which every step would share."""
    python = random.getstate()
    of_numpy = _numpys_state()
    yield
    if random.getstate() != python or _numpys_state() != of_numpy:
        raise ModelError(
            f"{type(module).__name__} draws numbers by random or numpy.random in its forward pass: "
            "a program would have those of its export in every step. Draw by torch, or leave out "
            "what is drawn"
        )


@contextmanager
def _told_once() -> Iterator[None]:
    """While this lasts, torch does not log an error of an export beside raising it."""
    logs = [logging.getLogger(part.__name__) for part in (fake_tensor, symbolic_shapes)]
    disabled = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, before in zip(logs, disabled, strict=True):
            log.disabled = before


def _numpys_state() -> tuple[bytes, int]:
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


def _place(error: Exception) -> str:
    """The line of the model's own code in which an export has failed, if there is one."""
    machinery = (str(Path(torch.__file__).parent), str(Path(__file__).parent), _CONTEXTS)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(machinery)]
    if not own or not own[-1].line:
        return ""
    return f" (`{own[-1].line}`, {Path(own[-1].filename).name}:{own[-1].lineno})"


def _like(value: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Make `fresh` a parameter if `value` is one."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, value.requires_grad)
    return fresh


def _apart(leaves: list[Any]) -> list[Any]:
    """Copy a tensor that is given for several inputs: it stands for as many tensors."""
    seen: set[torch.Tensor] = set()
    apart = []
    for leaf in leaves:
        repeated = isinstance(leaf, torch.Tensor) and leaf in seen
        apart.append(leaf.clone() if repeated else leaf)
        if isinstance(leaf, torch.Tensor):
            seen.add(leaf)
    return apart
