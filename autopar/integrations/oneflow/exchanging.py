"""Global tensors out of torch's DTensors, with their histories."""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.errors import PlanError, UsageError
from autopar.runtime.parameters.torch_layouts import layout_of

from .placement import placement
from .tensor import GlobalTensor


def from_dtensor(value: DTensor) -> GlobalTensor:
    """A DTensor as a global tensor on its mesh's ranks.

    `UsageError` with alternatives if it has no such layout.
    """
    if not isinstance(value, DTensor):
        raise UsageError(f"from_dtensor takes a DTensor, not {type(value).__name__}")
    mesh = value.device_mesh
    where = placement(mesh.device_type, mesh.mesh.tolist())
    kinds = layout_of(value.placements)
    whole = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
    part = value.to_local(grad_placements=whole)
    sizes = where.mesh.shape
    for dim, size in enumerate(value.shape):
        if size % math.prod(sizes[axis] for axis, kind in enumerate(kinds) if kind.dim == dim):
            raise PlanError(
                f"dim {dim} of size {size} lies in uneven parts; redistribute() it to Replicate "
                "first"
            )
    return GlobalTensor(part, kinds, where, value.shape)
