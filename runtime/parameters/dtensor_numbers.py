"""Numbers that the host reads of DTensors (`.item()`, `float()`, `if`): never those of a part.

Torch reads the local part: of a norm over shards each rank would get another number, and decide by
it. Putting the parts together is a collective, and scripts read numbers on one rank alone. So the
parts must have been put together before, on every rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError


def refuse_numbers_of_parts() -> None:
    """Let the host read no number of a DTensor that has parts, in this process from now on."""
    handlers = cast(dict[Any, Any], DTensor._op_dispatcher._custom_op_handlers)
    handlers[torch.ops.aten._local_scalar_dense.default] = _number


def _number(read: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The number of a DTensor with one element."""
    value: DTensor = args[0]
    if not all(placement.is_replicate() for placement in value.placements):
        raise PlanError(
            "this number is a part: each rank has another, of its own shards. Call .full_tensor() "
            "on every rank before it is read (.item(), float(), print, if), or let the planned "
            "module clip (module.clip_grad_norm_), whose norm is whole"
        )
    return read(value._local_tensor, *args[1:], **kwargs)
