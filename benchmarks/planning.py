"""What planning costs: CPU seconds and memory of whole `autopar plan` runs, and where they go.

    total = import + read + analyse + the sum over meshes of (tables + solve) + decode of the best

GPT-2 small comes as an ONNX file and is planned for 8 devices; Llama-3-8B is exported from PyTorch on meta weights and planned for
64. Every run is a process of its own, so that its CPU seconds and its peak memory are all its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"gpt2-small": {"cpu_s": 1.5}, "llama3-8b": {"search_s": 2.0, "peak_gb": 3.0}}
PHASES = ("import", "read", "export", "analyse", "tables", "solve", "decode")
T = TypeVar("T")


class Stopwatch:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, work: Callable[[], T]) -> T:
        """Do `work`, and add what it took to `phase`."""
        start = time.process_time()
        result = work()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start
        return result


def plan_phases(watch: Stopwatch, graph: Any, devices: int) -> dict[str, Any]:
    """Every mesh's tables and solution, and the decoded plans of the best; the parts of `autopar.planner.search_plan`."""
    from autopar.costmodel import load_cluster
    from autopar.costmodel.pricing import MeshPrices
    from autopar.planner import EVALUATED, evaluate, meshes
    from autopar.search import Infeasible, solve
    from autopar.sharding.analysis import analyse
    from autopar.tables import build_tables

    analysis = watch("analyse", lambda: analyse(graph, train=True))
    cluster = load_cluster("dgx-h100").sized(devices)
    limit = cluster.device.usable_memory
    solved: list[Any] = []
    candidates = meshes(cluster)
    for mesh in candidates:
        prices = MeshPrices(cluster=cluster, mesh=mesh)
        tables = watch("tables", partial(build_tables, analysis, prices, optimizer="adamw"))
        try:
            solution = watch("solve", partial(solve, tables.graph, memory_limit=limit))
        except Infeasible:
            continue
        solved = sorted([*solved, (solution.cost, mesh.shape, tables, solution)])[:EVALUATED]
    found = [watch("decode", partial(evaluate, tables, solution)) for _, _, tables, solution in solved]
    best = min(found, key=lambda f: f.rank)
    return {
        "meshes": len(candidates), "variables": len(best.tables.graph.sizes), "step_s": best.estimate.step, "gap": best.solution.gap,
    }  # fmt: skip


def work_onnx(path: str, devices: int) -> dict[str, Any]:
    """The phases of planning an ONNX file."""
    watch = Stopwatch()
    watch("import", lambda: __import__("autopar.api"))
    from autopar.frontends.load import ModelOptions, load_model

    loaded = watch("read", lambda: load_model(path, ModelOptions(batch=8, dims={"batch": 8, "sequence": 1024})))
    return {"phases": watch.seconds, **plan_phases(watch, loaded.graph, devices)}


def work_llama(layers: int, batch: int, sequence: int, devices: int) -> dict[str, Any]:
    """The phases of planning Llama-3-8B with its weights on the meta device."""
    warnings.filterwarnings("ignore")
    watch = Stopwatch()
    watch("import", lambda: (__import__("torch"), __import__("transformers"), __import__("autopar.api")))
    graph = watch("export", lambda: export_llama(layers, batch, sequence))
    return {"phases": watch.seconds, **plan_phases(watch, graph, devices)}


def export_llama(layers: int, batch: int, sequence: int) -> Any:
    """The graph of Llama-3-8B with that many layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autopar.frontends.torch import import_torch
    from autopar.ir import with_loss

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip

    class Logits(torch.nn.Module):
        """The model from token numbers to logits."""

        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(input_ids=tokens, use_cache=False).logits

    with torch.device("meta"):
        model = Logits().to(torch.bfloat16).eval()
        tokens = torch.zeros((batch, sequence), dtype=torch.int64)
    return with_loss(import_torch(model, (tokens,)).graph)


def measured(command: list[str]) -> tuple[dict[str, Any], str]:
    """CPU seconds, wall seconds and peak memory of a process, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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


def worker(*arguments: object) -> dict[str, Any]:
    """A row: the phases of one run, in a process of its own."""
    figures, text = measured([sys.executable, str(Path(__file__).resolve()), "--worker", *map(str, arguments)])
    row = {**figures, **json.loads(text.splitlines()[-1])}
    phases = row["phases"]
    return {**row, "search_s": phases["tables"] + phases["solve"] + phases["decode"]}


def run(*, quick: bool) -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.onnx"
        measured([sys.executable, str(ROOT / "examples" / "gpt2_onnx.py"), str(path)])
        plan = [
            sys.executable,
            "-m",
            "autopar.cli",
            "plan",
            str(path),
            "--devices",
            "8",
            "--cluster",
            "dgx-h100",
            "-o",
            str(Path(folder) / "p.json"),
        ]
        plan += ["--batch", "8", "--dim", "sequence=1024"]
        row = worker("onnx", path, 8)
        rows.append({"model": "gpt2-small", "devices": 8, **row, **measured(plan)[0]})
    for layers, batch in ((4, 1),) if quick else ((32, 1), (32, 16)):
        name = "llama3-8b" if layers == 32 else f"llama3-8b/{layers} layers"
        rows.append({"model": name, "devices": 64, "batch": batch, **worker("llama", layers, batch, 4096, 64)})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'model':20} {'devices':>7} {'CPU s':>7} {'peak GB':>8} {'search s':>9}   " + " ".join(f"{phase:>8}" for phase in PHASES))
    for row in rows:
        phases = " ".join(f"{row['phases'][phase]:8.2f}" if phase in row["phases"] else f"{'-':>8}" for phase in PHASES)
        print(f"{row['model']:20} {row['devices']:7d} {row['cpu_s']:7.2f} {row['peak_gb']:8.2f} {row['search_s']:9.2f}   {phases}")
        for figure, target in TARGETS.get(row["model"], {}).items():
            print(f"{'':20} {figure} {row[figure]:.2f}, target {target:.2f}: {'met' if row[figure] <= target else 'missed'}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four layers of the large model instead of all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, *rest = arguments.worker
        found = work_onnx(rest[0], int(rest[1])) if kind == "onnx" else work_llama(*map(int, rest))
        print(json.dumps(found))
        return
    rows = run(quick=arguments.quick)
    if arguments.json:
        print(json.dumps({"rows": rows, "targets": TARGETS}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
