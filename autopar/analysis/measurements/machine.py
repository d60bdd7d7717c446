"""A machine by its own account: versions, backends, devices, links and topology."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from autopar.costmodel.cluster.local_memory import local_memory

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
    "nvidia-nccl-cu13",
)
_TOLD = {
    "": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE OMP_NUM_THREADS "
    "MPI_LOCALRANKID MPI_LOCALNRANKS HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
    "NVIDIA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME",
    "TORCHELASTIC_": "RESTART_COUNT MAX_RESTARTS USE_AGENT_STORE",
    "OMPI_COMM_WORLD_": "RANK SIZE LOCAL_RANK LOCAL_SIZE",
    "PMI_": "RANK SIZE",
    "SLURM_": "PROCID LOCALID NODEID NTASKS NNODES GPUS_ON_NODE STEP_NUM_TASKS STEP_NUM_NODES "
    "STEP_TASKS_PER_NODE",
    "CUDA_": "VISIBLE_DEVICES DEVICE_ORDER LAUNCH_BLOCKING DEVICE_MAX_CONNECTIONS",
    "NCCL_": "DEBUG DEBUG_SUBSYS SOCKET_IFNAME SOCKET_FAMILY IB_DISABLE IB_HCA IB_GID_INDEX "
    "IB_TIMEOUT P2P_DISABLE P2P_LEVEL SHM_DISABLE NET NET_GDR_LEVEL ALGO PROTO NVLS_ENABLE "
    "CUMEM_ENABLE BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS CROSS_NIC",
    "TORCH_": "DISTRIBUTED_DEBUG NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING "
    "NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_ENABLE_MONITORING NCCL_TRACE_BUFFER_SIZE "
    "NCCL_DUMP_ON_TIMEOUT NCCL_AVOID_RECORD_STREAMS NCCL_CUDA_EVENT_CACHE "
    "DISABLE_SHARE_RDZV_TCP_STORE",
    "FI_": "PROVIDER EFA_USE_DEVICE_RDMA",
    "UCX_": "TLS NET_DEVICES",
}
VARIABLES = frozenset(f"{begin}{name}" for begin, names in _TOLD.items() for name in names.split())
"""The environment variables that change how ranks run, and are told with their values."""
NAMED = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Variables of which only is told that they are set: the values name hosts or jobs."""
TIMEOUT = 10.0
SHORTEST = 2
"""Letters of a name that is taken out of a text, at least."""


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
                "memory": local_memory() or 0,
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
    """The variables of the environment that change how ranks run; no others are ever told."""
    values = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    values |= {name: "set" for name in NAMED if name in os.environ}
    return dict(sorted(values.items()))


def scrubbed(text: str) -> str:
    """A text without this machine's name, the user's name, and the user's folder."""
    private = {str(Path.home()): "~", socket.gethostname(): "HOST", _user(): "USER"}
    for word, instead in private.items():
        # Short words, such as a user `a`, would be found everywhere.
        if len(word) >= SHORTEST:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number without a name, as in containers
        return ""


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
