"""The cost of planning: CPU seconds and memory of whole runs, by phase, and the plans found.

    benchmarks/planning.py [--quick] [--json] [--only NAME ...] [--models DIR]

    CPU seconds = start of Python + import + graph (an ONNX file read, a module exported, or made
    from a shape)
                + plan (`search_plan`) + write (the plan's JSON)

    gap = (step / sum of the plan's tables) (that sum / least bound) - 1

The CPU seconds of an ONNX file are those of the whole command `autopar plan`. Other models
are exported from PyTorch on the meta device, or made from their shapes alone. `--models` takes a
folder with public models, for the cases that need one. Every run is a process of its own with one
thread of arithmetic, so its CPU seconds and peak memory (resident, with Python and imports) are its
own. The code is compiled before, as that of an installed package is. Steps and gaps are
predictions; the candidate that holds the least bound is named.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planned.cases import (
    CASES,
    CASES_BY_NAME,
    FILES,
    IMPORTS,
    SEQUENCE,
    Case,
    graph_of,
    request_of,
)

if TYPE_CHECKING:
    from autopar.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("autopar", "costmodel", "runtime", "search", "benchmarks")
PHASES = ("import", "graph", "plan", "write")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
T = TypeVar("T")


class Stopwatch:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, work: Callable[[], T]) -> T:
        """Do `work`, and record its seconds."""
        start = time.process_time()
        try:
            return work()
        finally:
            self.seconds[phase] = time.process_time() - start


def planned(case: Case, path: Path) -> dict[str, Any]:
    """The phases of one run and its plan; `path`: of the ONNX file, or the folder of models."""
    from autopar.errors import AutoparError

    warnings.filterwarnings("ignore")
    watch = Stopwatch()
    watch(
        "import",
        lambda: [
            importlib.import_module(name)
            for name in ("autopar.planning.planner", *IMPORTS[case.source])
        ],
    )
    graph = watch("graph", lambda: graph_of(case, path))
    from autopar.planning.planner import search_plan

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    row: dict[str, Any] = {
        "phases": watch.seconds,
        "graph_gb": before,
        "operators": len(graph.operators),
    }
    request = request_of(case, graph)
    try:
        plan = watch("plan", lambda: search_plan(graph, request))
    except AutoparError as error:
        return {**row, "note": str(error)}
    text = watch("write", plan.to_json)
    return {
        **row,
        "step_s": plan.predicted.step,
        "gap": plan.provenance.gap,
        "gap_parts": gap_parts(plan),
        "bound_of": plan.provenance.bound_of,
        "found": choices(plan),
        "plan_mb": len(text) / 1e6,
    }


def gap_parts(plan: Plan) -> dict[str, float]:
    """The excess of the step over the plan's tables, and that of these over the least bound."""
    told = plan.provenance
    if not told.lower_bound or not told.objective:
        return {}
    return {
        "tables": plan.predicted.step / told.objective - 1,
        "bound": told.objective / told.lower_bound - 1,
    }


def choices(plan: Plan) -> dict[str, Any]:
    """The plan in a few words."""
    schedule = plan.schedule
    stages = len(plan.stages) // schedule.interleave or 1
    return {
        "stages": stages,
        "mesh": "x".join(str(axis.size) for axis in plan.mesh) or "1",
        "micro_batches": schedule.micro_batches,
        "schedule": schedule.pipeline if stages > 1 else "none",
        "chunks": schedule.interleave,
        "recompute": bool(schedule.recompute),
        "gathered": schedule.gathered,
        "accumulated": schedule.accumulated,
        "unused": plan.unused,
    }


def environment() -> dict[str, str]:
    """The variables of what is measured: nothing is remembered but compiled code."""
    said = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE": ""}
    said.pop("PYTHONDONTWRITEBYTECODE", None)
    return said


@functools.cache
def compile_all() -> None:
    """Compile the code of this package where that was not done yet."""
    rooms = [str(ROOT / room) for room in ROOMS]
    command = [sys.executable, "-m", "compileall", "-q", *rooms]
    subprocess.run(command, env=environment(), check=True)


def measured(command: Sequence[str]) -> tuple[dict[str, float], str]:
    """CPU seconds, wall seconds and peak memory of a process, and its output.

    The peak is at least the memory of the asking process, which imports next to nothing.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, env=environment(), cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if status:
        raise SystemExit(
            f"{' '.join(command)} failed with status {os.waitstatus_to_exitcode(status)}"
        )
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "cpu_s": cpu,
        "wall_s": time.perf_counter() - start,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }, text


def run(case: Case, folder: Path | None) -> dict[str, Any]:
    """The row of a case; `folder`: of the public models."""
    compile_all()
    head = {
        "model": case.name,
        "source": case.source,
        "batch": case.batch,
        "cluster": case.cluster,
        "devices": case.devices,
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        if case.source == "gpt2":
            measured([sys.executable, str(ROOT / "examples" / "gpt2_onnx.py"), str(path)])
        elif folder is not None:
            path = folder / FILES / case.model if case.source == "file" else folder
        figures, text = measured(
            [sys.executable, str(Path(__file__).resolve()), "--worker", case.name, str(path)]
        )
        row = {**head, **figures, **json.loads(text.splitlines()[-1])}
        if case.is_file and "note" not in row:
            row |= commanded(case, path)
    return {**row, "plan_s": row["phases"]["plan"]}


def commanded(case: Case, path: Path) -> dict[str, float]:
    """The CPU seconds and memory of `autopar plan` in one process."""
    asked = f"--cluster {case.cluster} --devices {case.devices} --batch {case.batch}"
    asked += f" --dim sequence={SEQUENCE}" if case.source == "gpt2" else ""
    asked += f" --memory {case.memory:.0f}" if case.memory is not None else ""
    command = (sys.executable, "-m", "autopar", "plan", str(path))
    return measured((*command, *asked.split()))[0]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every target of the rows that are there, and whether it is met.

    Where no plan was found, no target is.
    """
    steps = {row["model"]: row.get("step_s") for row in rows}
    told = []
    for row in rows:
        case = CASES_BY_NAME[row["model"]]
        limits: dict[str, float | None] = {
            **case.targets,
            **({"step_s": steps[case.no_slower]} if case.no_slower in steps else {}),
        }
        for figure, most in limits.items():
            value = row.get(figure)
            met = "note" not in row and value is not None and (most is None or value <= most)
            told.append(
                {"model": case.name, "figure": figure, "value": value, "most": most, "met": met}
            )
    return told


def show_row(row: dict[str, Any]) -> None:
    """Print one line of figures, and one of the plan found."""
    phases = " ".join(
        f"{row['phases'][phase]:7.2f}" if phase in row["phases"] else f"{'-':>7}"
        for phase in PHASES
    )
    figures = f"{row['step_s']:9.4f} {row['gap']:7.2%}" if "step_s" in row else f"{'-':>9} {'-':>7}"
    print(
        f"{row['model']:22} {row['devices']:7d} {row['cpu_s']:7.2f} {row['peak_gb']:8.2f} {phases} "
        f"{figures}"
    )
    print(
        " " * 23
        + (row.get("note") or ", ".join(f"{name} {value}" for name, value in row["found"].items())),
        flush=True,
    )
    if row.get("gap_parts"):
        parts = ", ".join(f"{name} {share:.2%}" for name, share in row["gap_parts"].items())
        print(f"{'':23}gap: {parts}; the least bound is that of {row['bound_of']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="GPT-2, Llama-3-8B, and four exported layers of it: within a minute",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", type=Path, metavar="DIR", help="a folder with public models")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=CASES_BY_NAME,
        help="only the cases of these names",
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        print(json.dumps(planned(CASES_BY_NAME[chosen.worker[0]], Path(chosen.worker[1]))))
        return
    cases = [
        case
        for case in CASES
        if (case.name in chosen.only if chosen.only else case.quick or not chosen.quick)
    ]
    if chosen.models is None:
        if lacking := [case.name for case in cases if case.is_public and chosen.only]:
            raise SystemExit(f"--models DIR is needed for {', '.join(lacking)}")
        cases = [case for case in cases if not case.is_public]
    if not chosen.json:
        columns = " ".join(f"{phase:>7}" for phase in PHASES)
        print(
            f"{'model':22} {'devices':>7} {'CPU s':>7} {'peak GB':>8} {columns} {'step s':>9} "
            f"{'gap':>7}"
        )
    rows = []
    for case in cases:
        rows.append(run(case, chosen.models))
        if not chosen.json:
            show_row(rows[-1])
    targets = verdicts(rows)
    if chosen.json:
        print(json.dumps({"rows": rows, "targets": targets}))
        return
    for told in targets:
        words = " ".join(
            "-" if value is None else f"{value:.2f}" for value in (told["value"], told["most"])
        )
        print(
            f"{told['model']}: {told['figure']} {words.replace(' ', ', at most ')}: "
            f"{'met' if told['met'] else 'missed'}"
        )


if __name__ == "__main__":
    main()
