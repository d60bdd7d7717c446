"""Optimizers' states in the layouts of their parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.files.piece_tensors import in_pieces


def lying_as(value: Tensor, held: Tensor) -> Tensor:
    """A tensor of the shape of a parameter's shard that lies as the parameter does."""
    if not isinstance(value, DTensor):
        return held
    shape = value.shape
    stride = value.stride()
    state = DTensor.from_local(
        held, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
    )
    # `from_local` makes a view, but optimizers write to the very tensor that they hold.
    state._local_tensor = held
    return in_pieces(state)


def keep_integers(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore integers after torch's `load_state_dict`.

    torch casts all states to the type of their parameter, which would round integers.
    """
    numbers = itertools.chain.from_iterable(group["params"] for group in saved["param_groups"])
    values = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, value in zip(numbers, values, strict=True):
        for name, held in saved["state"].get(number, {}).items():
            if isinstance(held, Tensor) and not held.is_floating_point():
                optimizer.state[value][name] = held.to(value.device).clone()
