"""Differences of torch by version, from 2.11 on: handled, or refused by name.

Torch is asked for what it does, not for its number, wherever it can be asked.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch.distributed.tensor import _dtensor_spec

from autopar.errors import PlanError

HOLDS_PARTS = hasattr(_dtensor_spec, "_StridedShardNotDecodableError")
"""Whether a DTensor may be split within parts, as S0/3 is.

Torch 2.11 cannot put such a tensor together, and loads a checkpoint into it wrongly: there the
results of a subclass of DTensor, which could tell its pieces, are plain DTensors.
"""


def stash(key: str, state: object) -> None:
    """Put an object into torch's thread-local storage, which owns a reference to it.

    Torch 2.11 forgets to take that reference: the object would be freed under its reader.
    """
    before = sys.getrefcount(state)
    torch._C._stash_obj_in_tls(key, state)
    if sys.getrefcount(state) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state))


def require_parts(layout: str) -> None:
    """Refuse a parameter split within parts where torch cannot hold it."""
    if not HOLDS_PARTS:
        raise PlanError(
            f"torch {torch.__version__} holds no parameter that lies as [{layout}], split within "
            "parts: install torch 2.13 or newer, or choose another plan with --scheme or --pin"
        )
