"""The cost of planning: CPU seconds and memory of whole runs, by phase, and the plans found.

    benchmarks/planning.py [--quick] [--json] [--only NAME ...]

    CPU seconds = start of Python + import + graph (an ONNX file read, a module exported, or made from a shape)
                + plan (`search_plan`) + write (the plan's JSON)

GPT-2 small is an ONNX file. Its CPU seconds are those of the whole command `autopar plan`, with the known schemes
priced too, as by default, and without them (`uncompared_s`). Llama-3-8B is exported from PyTorch on the meta device,
and also made from its shape alone, like the larger models. Every run is a process of its own with one thread of
arithmetic, so its CPU seconds and peak memory (resident, with Python and imports) are its own. Steps and gaps are
predictions.
"""

from __future__ import annotations

import argparse
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from autopar.ir import Graph
    from autopar.plan import Plan
    from autopar.planning.request import Request

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("import", "graph", "plan", "write")
IMPORTS = {
    "onnx": ("autopar.frontends.load",),
    "torch": ("torch", "transformers", "autopar.frontends.torch", "benchmarks.searching.models"),
    "shape": ("benchmarks.searching.models",),
}
"""Modules to import, besides the planner, before a model is read."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SEQUENCE = 1024
"""Tokens of GPT-2."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, with a shape of `benchmarks.searching.models`, and its cluster.

    `layers`: their number (None: all). `pinned`: stages, and the sizes of a stage's mesh. `targets`: upper limits of
    figures of the row. `no_slower`: the name of the case whose step must not be exceeded.
    """

    name: str
    shape: str = ""
    source: str = "shape"
    layers: int | None = None
    batch: int
    cluster: str = "dgx-h100"
    devices: int
    pinned: tuple[int, tuple[int, ...]] | None = None
    quick: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    no_slower: str = ""


CASES = (
    Case(name="gpt2-small", source="onnx", batch=8, devices=8, quick=True, targets={"cpu_s": 1.5, "uncompared_s": 1.5}),
    Case(name="llama3-8b-4-exported", shape="llama3_8b", source="torch", layers=4, batch=64, devices=64, quick=True),
    Case(name="llama3-8b-exported", shape="llama3_8b", source="torch", batch=64, devices=64),
    Case(name="llama3-8b", shape="llama3_8b", batch=64, devices=64, quick=True, targets={"plan_s": 3.0}),
    Case(
        name="gpt3-175b", shape="gpt3_175b", batch=1536, cluster="dgx-a100-80g", devices=3072, targets={"plan_s": 5.0},
        no_slower="gpt3-175b-64x6x8",
    ),
    Case(name="gpt3-175b-64x6x8", shape="gpt3_175b", batch=1536, cluster="dgx-a100-80g", devices=3072, pinned=(64, (6, 8))),
    Case(name="llama3-405b", shape="llama3_405b", batch=2048, devices=16384, targets={"plan_s": 10.0}),
    Case(name="moe-1t", shape="moe_1t", batch=16384, devices=131072, targets={"plan_s": 30.0, "peak_gb": 1.0}),
)  # fmt: skip
CASES_BY_NAME = {case.name: case for case in CASES}


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


def planned(case: Case, path: str) -> dict[str, Any]:
    """The phases of one run and its plan; `path`: of the ONNX file."""
    from autopar.errors import AutoparError

    warnings.filterwarnings("ignore")
    watch = Stopwatch()
    watch("import", lambda: [importlib.import_module(name) for name in ("autopar.planning.planner", *IMPORTS[case.source])])
    graph = watch("graph", lambda: graph_of(case, path))
    from autopar.planning.planner import search_plan

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    row: dict[str, Any] = {"phases": watch.seconds, "graph_gb": before, "operators": len(graph.operators)}
    request = request_of(case)
    try:
        plan = watch("plan", lambda: search_plan(graph, request))
    except AutoparError as error:
        return {**row, "note": str(error)}
    text = watch("write", plan.to_json)
    return {**row, "step_s": plan.predicted.step, "gap": plan.provenance.gap, "found": found(plan), "plan_mb": len(text) / 1e6}


def graph_of(case: Case, path: str) -> Graph:
    """The training step of a case."""
    if case.source == "onnx":
        from autopar.frontends.load import ModelOptions, load_model

        return load_model(path, ModelOptions(batch=case.batch, dims={"sequence": SEQUENCE})).graph
    from benchmarks.searching import models

    make = getattr(models, case.shape)
    shape = make() if case.layers is None else make(case.layers)
    return models.exported_llama(shape, case.batch) if case.source == "torch" else models.shaped(shape, case.batch)


def request_of(case: Case) -> Request:
    """The request of a case."""
    from autopar.costmodel import load_cluster
    from autopar.planning.request import Request
    from autopar.schemes.pinning import stage_mesh

    cluster = load_cluster(case.cluster).sized(case.devices)
    if case.pinned is None:
        return Request(cluster=cluster)
    stages, sizes = case.pinned
    return Request(cluster=cluster, stages=stages, mesh=stage_mesh(cluster, sizes, stages))


def found(plan: Plan) -> dict[str, Any]:
    """The plan in a few words."""
    schedule = plan.schedule
    stages = len(plan.stages) // schedule.interleave or 1
    return {
        "stages": stages, "mesh": "x".join(str(axis.size) for axis in plan.mesh) or "1", "micro_batches": schedule.micro_batches,
        "schedule": schedule.pipeline if stages > 1 else "none", "chunks": schedule.interleave, "recompute": bool(schedule.recompute),
        "gathered": schedule.gathered, "accumulated": schedule.accumulated, "unused": plan.unused,
    }  # fmt: skip


def measured(command: Sequence[str]) -> tuple[dict[str, float], str]:
    """CPU seconds, wall seconds and peak memory of a process, and its output.

    The peak is at least the memory of the asking process, which imports next to nothing.
    """
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, env=environment, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {os.waitstatus_to_exitcode(status)}")
    cpu = usage.ru_utime + usage.ru_stime
    return {"cpu_s": cpu, "wall_s": time.perf_counter() - start, "peak_gb": usage.ru_maxrss * 1024 / 1e9}, text


def run(case: Case) -> dict[str, Any]:
    """The row of a case."""
    head = {"model": case.name, "source": case.source, "batch": case.batch, "cluster": case.cluster, "devices": case.devices}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        if case.source == "onnx":
            measured([sys.executable, str(ROOT / "examples" / "gpt2_onnx.py"), str(path)])
        figures, text = measured([sys.executable, str(Path(__file__).resolve()), "--worker", case.name, str(path)])
        row = {**head, **figures, **json.loads(text.splitlines()[-1])}
        if case.source == "onnx":
            asked = f"--cluster {case.cluster} --devices {case.devices} --batch {case.batch} --dim sequence={SEQUENCE}"
            command = [sys.executable, "-m", "autopar.cli", "plan", str(path), *asked.split(), "-o", str(Path(folder) / "plan.json")]
            row |= {**measured(command)[0], "uncompared_s": measured([*command, "--no-compare"])[0]["cpu_s"]}
    return {**row, "plan_s": row["phases"]["plan"]}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every target of the rows that are there, and whether it is met; where no plan was found, no target is."""
    steps = {row["model"]: row.get("step_s") for row in rows}
    told = []
    for row in rows:
        case = CASES_BY_NAME[row["model"]]
        limits: dict[str, float | None] = {**case.targets, **({"step_s": steps[case.no_slower]} if case.no_slower in steps else {})}
        for figure, most in limits.items():
            value = row.get(figure)
            met = "note" not in row and value is not None and (most is None or value <= most)
            told.append({"model": case.name, "figure": figure, "value": value, "most": most, "met": met})
    return told


def show_row(row: dict[str, Any]) -> None:
    """Print one line of figures, and one of the plan found."""
    phases = " ".join(f"{row['phases'][phase]:7.2f}" if phase in row["phases"] else f"{'-':>7}" for phase in PHASES)
    figures = f"{row['step_s']:9.4f} {row['gap']:7.2%}" if "step_s" in row else f"{'-':>9} {'-':>7}"
    print(f"{row['model']:22} {row['devices']:7d} {row['cpu_s']:7.2f} {row['peak_gb']:8.2f} {phases} {figures}")
    print(" " * 23 + (row.get("note") or ", ".join(f"{name} {value}" for name, value in row["found"].items())), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="GPT-2, Llama-3-8B, and four exported layers of it: within a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES_BY_NAME, help="only the cases of these names")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        print(json.dumps(planned(CASES_BY_NAME[chosen.worker[0]], chosen.worker[1])))
        return
    cases = [case for case in CASES if (case.name in chosen.only if chosen.only else case.quick or not chosen.quick)]
    if not chosen.json:
        columns = " ".join(f"{phase:>7}" for phase in PHASES)
        print(f"{'model':22} {'devices':>7} {'CPU s':>7} {'peak GB':>8} {columns} {'step s':>9} {'gap':>7}")
    rows = []
    for case in cases:
        rows.append(run(case))
        if not chosen.json:
            show_row(rows[-1])
    targets = verdicts(rows)
    if chosen.json:
        print(json.dumps({"rows": rows, "targets": targets}))
        return
    for told in targets:
        words = " ".join("-" if value is None else f"{value:.2f}" for value in (told["value"], told["most"]))
        print(f"{told['model']}: {told['figure']} {words.replace(' ', ', at most ')}: {'met' if told['met'] else 'missed'}")


if __name__ == "__main__":
    main()
