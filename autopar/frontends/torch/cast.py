"""A copy of a module in another floating-point type; the module itself is unchanged."""

from __future__ import annotations

import copy

import torch

from autopar.errors import ModelError


def recast(module: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """Cast all floats of a module to a type.

    It is the module itself where they are of that type already, else a copy with weights and
    buffers of its own.
    """
    state = (*module.parameters(), *module.buffers())
    floats = [value for value in state if value.is_floating_point()]
    if dtype is None or all(value.dtype == dtype for value in floats):
        return module
    # Tensors in deepcopy's memo, by id, are not first copied in their old type.
    memo: dict[int, object] = {id(value): _cast(value, dtype) for value in state}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever a module holds that cannot be copied
        name = str(dtype).removeprefix("torch.")
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ModelError(
            f"{type(module).__name__} cannot be copied to run in {name}: {why}; cast it first: "
            f"module.to({dtype})"
        ) from error


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wanted = dtype if value.is_floating_point() else value.dtype
    fresh = value.detach().to(wanted, copy=True)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, value.requires_grad)
    return fresh
