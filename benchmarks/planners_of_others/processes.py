"""Processes that are measured: CPU seconds, peak memory, and what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
POLL = 0.1
"""Seconds between two looks at a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A process that ended, with those that it started and waited for.

    `seconds`: of CPU. `memory`: peak bytes of the largest of its processes. `why`: how it failed
    ("": it did not).
    """

    seconds: float
    memory: float
    said: str
    why: str = ""

    def number(self, pattern: str) -> float | None:
        """The last number behind `pattern`."""
        matches = re.findall(pattern + r"\s*([0-9][0-9.eE+-]*)", self.said)
        return float(matches[-1].rstrip(".")) if matches else None


def measured(command: Sequence[str], where: Path, limit: float) -> Measured:
    """Run a command on one thread; it is killed after `limit` seconds of time."""
    environment = os.environ | ONE_THREAD | {"AUTOPAR_CACHE": ""}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            command,
            cwd=where,
            env=environment,
            stdout=said,
            stderr=complained,
            start_new_session=True,
        )
        end = time.monotonic() + limit
        is_late = False
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > end and not is_late:
                is_late = True
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(POLL)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (said, complained):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    why = ""
    if is_late:
        why = f"stopped after {limit:.0f} s"
    elif process.returncode:
        lines = texts[1].strip().splitlines()
        why = lines[-1] if lines else f"exit status {process.returncode}"
    return Measured(
        seconds=usage.ru_utime + usage.ru_stime,
        memory=usage.ru_maxrss * 1024.0,
        said="\n".join(texts),
        why=why,
    )
