"""The default cluster: the GPUs of this machine, asked without torch, or else one DGX H100."""

from __future__ import annotations

import re
import shutil
import subprocess

from .cluster import Cluster
from .reading import load_cluster

DEFAULT = "dgx-h100"
# A word in the GPU's name, the least memory in bytes, and the preset; the first row that fits is
# taken.
_PRESETS = (
    ("GB300", 0.0, "gb300-nvl72"),
    ("GB200", 0.0, "gb200-nvl72"),
    ("B300", 0.0, "dgx-b300"),
    ("B200", 0.0, "dgx-b200"),
    ("H200", 0.0, "hgx-h200"),
    ("H100", 0.0, "dgx-h100"),
    ("A100", 60e9, "dgx-a100-80g"),
    ("A100", 0.0, "dgx-a100"),
    ("V100", 0.0, "p3.16xlarge"),
    ("RTX 4090", 0.0, "rtx4090"),
    ("L40S", 0.0, "l40s"),
    ("L4", 0.0, "l4"),
    ("A10G", 0.0, "g5"),
    ("RTX PRO 6000", 0.0, "rtx-pro-6000"),
)
_QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 5.0


def local_gpus() -> tuple[tuple[str, float], ...]:
    """Return name and memory (bytes) of each GPU of this machine.

    There are none without a driver or without an answer within 5 s.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.rpartition(",") for line in done.stdout.splitlines())
    return tuple(
        (name.strip(), float(mebibytes) * 2**20)
        for name, _, mebibytes in rows
        if mebibytes.strip().isdecimal()
    )


def default_cluster() -> tuple[Cluster, str]:
    """The cluster to assume, and the sentence that says which it is and why."""
    gpus = local_gpus()
    if not gpus:
        cluster = load_cluster(DEFAULT)
        return (
            cluster,
            f"no GPU was found on this machine: the cluster is assumed to be {DEFAULT} "
            f"({cluster.device.name})",
        )
    # The GPUs of one machine are taken to be alike.
    name, memory = gpus[0]
    gpus_here = f"this machine's {len(gpus)} x {name}"
    for word, least, preset in _PRESETS:
        # Whole words only, since B200 is a part of GB200, and L4 of L40S.
        if re.search(rf"\b{word}\b", name) and memory >= least:
            return load_cluster(preset).sized(
                len(gpus)
            ), f"the cluster is assumed to be {gpus_here} (preset {preset})"
    return load_cluster(DEFAULT).sized(
        len(gpus)
    ), f"no preset describes {gpus_here}: {DEFAULT} is assumed in its place"
