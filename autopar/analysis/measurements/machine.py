"""A machine by its own account: versions, backends, devices, links and topology."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "autopar",
    "torch",
    "numpy",
    "onnx",
    "pydantic",
    "safetensors",
    "cloudpickle",
    "transformers",
    "triton",
    "nvidia-nccl-cu12",
)
# FI_ is for libfabric and UCX_ for UCX, over which collectives may run between machines.
VARIABLES = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_NUM_THREADS", "MASTER_", "FI_", "UCX_")
"""Prefixes of the environment variables that change how ranks run."""
TIMEOUT = 10.0


def versions() -> dict[str, str]:
    """The versions of Python, the system and the relevant packages, if installed."""
    names = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            names[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return names


def backends() -> dict[str, str]:
    """The communication libraries, and the platforms that torch was built for."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"torch.distributed": "not built in"}
    available = {
        "gloo": "yes" if dist.is_gloo_available() else "no",
        "nccl": "yes" if dist.is_nccl_available() else "no",
    }
    if torch.version.cuda is not None:
        available["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        available["nccl"] = ".".join(map(str, numbers))
        available["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return available


def devices() -> list[dict[str, Any]]:
    """The GPUs, or else the processor."""
    import torch

    if not torch.cuda.is_available():
        return [
            {
                "name": _processor(),
                "cores": os.cpu_count() or 1,
                "memory": _memory(),
                "threads": torch.get_num_threads(),
            }
        ]
    properties = []
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        free, _ = torch.cuda.mem_get_info(number)
        properties.append(
            {
                "name": one.name,
                "memory": one.total_memory,
                "free": free,
                "capability": f"{one.major}.{one.minor}",
                "processors": one.multi_processor_count,
            }
        )
    return properties


def links() -> dict[str, str]:
    """The links of GPUs in NVML's words, and the network interfaces with their speeds."""
    texts = {}
    for name, words in (
        ("driver", ("--query-gpu=driver_version,power.limit", "--format=csv,noheader")),
        ("topology", ("topo", "-m")),
    ):
        if text := told_by("nvidia-smi", *words):
            texts[name] = text
    for path in sorted(Path("/sys/class/net").glob("*")) if Path("/sys/class/net").is_dir() else ():
        try:
            speed = int((path / "speed").read_text(encoding="ascii"))
            state = (path / "operstate").read_text(encoding="ascii").strip()
        except (OSError, ValueError):  # loopback and the like have no speed
            continue
        if speed > 0:
            texts[f"network {path.name}"] = f"{speed} Mbit/s, {state}"
    return texts


def environment() -> dict[str, str]:
    """The environment variables that change how ranks run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def told_by(tool: str, *words: str) -> str:
    """The output of a system tool; empty if it is missing or does not answer."""
    path = shutil.which(tool)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *words], capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
