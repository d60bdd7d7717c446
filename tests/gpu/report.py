"""A report of this machine's GPUs, of everything that they can run: `make gpu`.

Every part runs in a process of its own, so that one that crashes or hangs leaves the others their
turn. Only torch, numpy and pydantic are needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "pydantic")
NONE = "this machine has no GPU: nothing was run, and no report was written"
GLOO_RANKS = 2
SECONDS = 900.0
"""The most that a part may take."""
TAIL = 15
"""Lines of a failed part's output in the report."""
FAILED = 6
TITLES = {
    "kernels": "Kernels of a calibration on one GPU, beside the preset's prices",
    "one device": "A plan on one GPU, beside the predictions",
    "gloo": "Ranks over Gloo with tensors on one GPU",
    "nccl": "Ranks over NCCL, beside the predictions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the report: its rows, or why there are none. `ranks`: 0 if none are launched."""

    name: str
    ranks: int
    rows: Sequence[dict[str, Any]]
    failure: str

    @property
    def ok(self) -> bool:
        """Whether everything in it is right."""
        return not self.failure and all(row["ok"] for row in self.rows)


def run_part(name: str, ranks: int, device: str, seconds: float = SECONDS) -> Part:
    """Run a part in processes of its own; `ranks`: how many torchrun starts, 0 for none."""
    from autopar.runtime.launch.rank_process import die_with

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = [*(launcher if ranks else ()), "-m", "tests.gpu.sections", name, device, str(path)]
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A report that is killed leaves nothing behind; ranks end with torchrun.
            preexec_fn=partial(die_with, os.getpid()),
        )
        failure = ""
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            failure = f"not finished after {seconds:g} s\n"
        finally:
            _kill(process)
        if process.returncode or failure:
            tail = "\n".join(output.strip().splitlines()[-TAIL:])
            failure = f"{failure or f'exit code {process.returncode}'}\n{tail}".strip()
        rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return Part(name=name, ranks=ranks, rows=rows, failure=failure)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a part with the ranks of its torchrun, which are in its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def written(parts: Sequence[Part]) -> str:
    """The report as a page of Markdown."""
    from autopar.analysis.measurements import machine

    lines = ["# What ran on this machine's GPUs", ""]
    for facts in (machine.versions(), machine.backends(), machine.environment()):
        lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [f"- device {number}: {one}" for number, one in enumerate(machine.devices())]
    for part in parts:
        lines += ["", f"## {TITLES[part.name]}", "", _verdict(part), ""]
        if part.rows:
            lines += ["| | right | measured | predicted | |", "|---|---|---|---|---|"]
            lines += [_line(row) for row in part.rows]
        if part.failure:
            lines += ["", *(f"    {line}" for line in part.failure.splitlines())]
    return "\n".join(lines) + "\n"


def _verdict(part: Part) -> str:
    ranks = f"{part.ranks} rank" + ("s" if part.ranks > 1 else "") if part.ranks else "One process"
    return f"{ranks}: {'all right' if part.ok else 'NOT all right'}."


def _line(row: dict[str, Any]) -> str:
    figures = [_figure(row[name], row["unit"]) for name in ("measured", "predicted")]
    said = str(row["said"]).replace("|", "/")
    return f"| {row['what']} | {'yes' if row['ok'] else 'NO'} | {' | '.join(figures)} | {said} |"


def _figure(value: float | None, unit: str) -> str:
    from autopar.units import bytes_text, seconds_text

    if value is None:
        return ""
    return bytes_text(value) if unit == "bytes" else seconds_text(value)


def gpus() -> int:
    """The number of GPUs that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything that this machine's GPUs allow; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.report", description=__doc__)
    parser.add_argument("-o", "--output", default="build/gpu-report.md", metavar="FILE")
    path = Path(parser.parse_args(arguments).output)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    # Without torch the driver's own tool tells whether there is a GPU.
    if missing and shutil.which("nvidia-smi") is None:
        print(NONE)
        return 0
    if missing:
        print(
            f"{sys.executable} has no {', no '.join(missing)}: make gpu GPU_PYTHON=... takes "
            "another Python, and PYTHONPATH may name a folder with what is missing"
        )
        return 2
    count = gpus()
    if not count:
        print(NONE)
        return 0
    parts = []
    for name, ranks in (("kernels", 0), ("one device", 0), ("gloo", GLOO_RANKS), ("nccl", count)):
        print(f"{TITLES[name]} ...", flush=True)
        parts.append(run_part(name, ranks, "cuda"))
        print(_verdict(parts[-1]), flush=True)
        # Written after every part: a machine that is lost meanwhile has told something.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written(parts), encoding="utf-8")
    print(f"the report is in {path}")
    return 0 if all(part.ok for part in parts) else FAILED


if __name__ == "__main__":
    sys.exit(main())
