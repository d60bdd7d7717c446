"""The backends of torch.distributed: which are valid, which this machine has, and their devices."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist

from autopar.errors import RunError, UsageError, unknown

NAMES = ("nccl", "gloo", "hccl", "mpi")
"""NVIDIA GPUs; CPUs; Ascend devices; ranks that MPI has started."""
_DEVICES = {"nccl": "cuda", "hccl": "npu"}


def default_backend() -> str:
    """The backend of the devices at hand: nccl, else hccl, else gloo."""
    if torch.cuda.is_available():
        return "nccl"
    return "hccl" if _has_npu() else "gloo"


def require_known(name: str) -> None:
    """Refuse a backend that nobody knows; those that a program has registered are valid, too."""
    valid = (*NAMES, *map(str.lower, dist.Backend._plugins))
    if name not in valid:
        raise UsageError(unknown("backend", name, valid))


def require_backend(name: str) -> None:
    """Refuse a backend that is unknown, or that this machine lacks."""
    require_known(name)
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    lacking = {
        "nccl": None if cuda else "needs CUDA, which torch does not find here",
        "hccl": None if _has_npu() else "needs Ascend devices and the package torch_npu",
        "mpi": None if dist.is_mpi_available() else "needs a torch that was built with MPI",
    }.get(name)
    if lacking:
        raise RunError(f"the backend {name} {lacking}; use the backend {default_backend()}")


def device_type(backend: str) -> str:
    """The type of the devices whose tensors a backend carries: "cpu", "cuda", "npu", ...

    `backend`: a name, or one for each type of device.

    >>> device_type("gloo"), device_type("cpu:gloo,cuda:nccl")
    ('cpu', 'cuda')
    """
    if ":" in backend:
        types = [pair.partition(":")[0] for pair in backend.split(",")]
        return next((kind for kind in types if kind != "cpu"), "cpu")
    types = dist.Backend.backend_capability.get(backend, [_DEVICES.get(backend, "cpu")])
    return "cpu" if "cpu" in types else types[0]


def _has_npu() -> bool:
    return find_spec("torch_npu") is not None
