"""Differences of torch by version, from 2.11 on: handled, or refused by name.

Torch is asked for what it does, not for its number, wherever it can be asked.
"""

from __future__ import annotations

import ctypes
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.tensor import _dtensor_spec
from torch.torch_version import TorchVersion

from autopar.errors import PlanError, RunError

HOLDS_PARTS = hasattr(_dtensor_spec, "_StridedShardNotDecodableError")
"""Whether a DTensor may be split within parts, as S0/3 is.

Torch 2.11 cannot put such a tensor together, and loads a checkpoint into it wrongly: there the
results of a subclass of DTensor, which could tell its pieces, are plain DTensors.
"""

CHECKS_COLLECTIVES = TorchVersion(torch.__version__) >= "2.12"
"""Whether TORCH_DISTRIBUTED_DEBUG=DETAIL knows all collectives: not in 2.11."""

WITHOUT_DERIVATIVE: frozenset[str] = frozenset(
    kind
    for kind, result in {
        "aten.aminmax.default": torch.aminmax(torch.ones(1, requires_grad=True)).min
    }.items()
    if "NotImplemented" in repr(result.grad_fn)
)
"""Operators whose backward pass is torch's own error in this version, and not in all."""

# Torch 2.11 knows these by their older names alone.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _stash_owns() -> bool:
    """Whether torch's thread-local storage takes a reference to what is put there."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("autopar.probe", probe)
    owns = sys.getrefcount(probe) > before
    if not owns:
        # The storage gives up a reference at its end, whether it has taken one or not.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return owns


_STASH_OWNS = _stash_owns()


def stash(key: str, state: object) -> None:
    """Put an object into torch's thread-local storage, which owns a reference to it.

    Torch 2.11 forgets to take that reference: the object would be freed under its reader.
    """
    if not _STASH_OWNS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))
    torch._C._stash_obj_in_tls(key, state)


def require_parts(layout: str) -> None:
    """Refuse a parameter split within parts where torch cannot hold it."""
    if not HOLDS_PARTS:
        raise PlanError(
            f"torch {torch.__version__} holds no parameter that lies as [{layout}], split within "
            "parts: install torch 2.13 or newer, or choose another plan with --scheme or --pin"
        )


def require_checked() -> None:
    """Refuse torch's own checks of collectives where they would stop a reduce-scatter."""
    if not CHECKS_COLLECTIVES and get_debug_level() == DebugLevel.DETAIL:
        raise RunError(
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL of torch {torch.__version__} knows no reduce-scatter: "
            "unset it, or install torch 2.13 or newer"
        )
