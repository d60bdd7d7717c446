"""A copy of a module in another floating-point type; the module itself is unchanged."""

from __future__ import annotations

import copy

import torch

from ..errors import ModelError


def recast(module: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """The module where all its floats are of that type already, else a copy with weights and buffers of its own."""
    state = {id(value): value for value in (*module.parameters(), *module.buffers())}
    if dtype is None or all(value.dtype == dtype for value in state.values() if value.is_floating_point()):
        return module
    # Tensors in the memo are not first copied in their old type.
    memo: dict[int, object] = {key: _cast(value, dtype) for key, value in state.items()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a module holds that cannot be copied
        name = str(dtype).removeprefix("torch.")
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ModelError(f"{type(module).__name__} cannot be copied to run in {name}: {why}; cast it first: module.to({dtype})") from error


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wanted = dtype if value.is_floating_point() else value.dtype
    fresh = value.detach().to(wanted, copy=True)
    return torch.nn.Parameter(fresh, value.requires_grad) if isinstance(value, torch.nn.Parameter) else fresh
