"""Planners of others beside ours: CPU seconds for the same model on the same devices.

CPU seconds of whole processes, on one thread.

    benchmarks/planners.py [--simumax DIR] [--galvatron DIR] [--python FILE] [--json]

DIR: a checkout of MooreThreads/SimuMax or of PKU-DAIR/Hetu-Galvatron (its `galvatron_dp_core` built
in DIR, as its setup.py has it); FILE: the Python that has what they import (default: this one).
Each runs its own search, unchanged, over its own figures of the machine:

    simumax      `search_best_parallel_strategy`, micro-batches of one sample, no recompute, tensor
                 degrees up to 8, any pipeline degree
    galvatron    `models/gpt/search_dist.py` for Llama-2-7B with the profiles that it ships
                 (sequences of 2,048, 38 GB, 8 A100)

and ours plans the same shape and batch with everything open. Steps are each planner's own
predictions, which differ in what they count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 1800.0
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A Llama on a preset with a global batch.

    `memory`: bytes of a device, where a rival is told them.
    """

    name: str
    model: str
    cluster: str
    devices: int
    batch: int
    memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """CPU seconds of both planners, imports included, and the steps that they predict."""

    case: str
    rival: str
    ours_s: float
    rival_s: float
    ours_step_s: float
    rival_step_s: float

    @property
    def ratio(self) -> float:
        """Our CPU seconds for each of the rival's."""
        return self.ours_s / self.rival_s


SIMUMAX = (
    Case(name="llama3-8b", model="llama3-8b", cluster="dgx-b200", devices=8, batch=64),
    Case(name="llama3-70b", model="llama3-70b", cluster="dgx-b200", devices=64, batch=256),
)
GALVATRON = Case(
    name="llama2-7b", model="llama2-7b", cluster="dgx-a100", devices=8, batch=64, memory=38 * GIB
)

_SIMUMAX = """
import contextlib, io, json, sys
sys.path.insert(0, ".")
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM

strategy = StrategyConfig.read_json_file("configs/strategy/tp1_pp2_dp4_mbs1.json")
strategy.update(
    enable_recompute=False,
    recompute_granularity=None,
    recompute_layer_num=0,
    world_size={devices},
)
planner = PerfLLM()
planner.configure(
    strategy_config=StrategyConfig.init_from_dict(strategy),
    model_config=ModelConfig.init_from_config_file("configs/models/{model}.json"),
    system_config=SystemConfig.init_from_config_file("configs/system/b200_bf16_ceperm.json"),
)
with contextlib.redirect_stdout(io.StringIO()):
    best = planner.search_best_parallel_strategy(
        world_size={devices},
        gmi_error=6,
        micro_batch_size=1,
        global_batch_size={batch},
        all_search_result=dict(),
        verbose=False,
    )
print("STEP", best["iter_time"].split()[0])
"""
# The package of its runtime imports Triton, of which a search has no need: an empty one is put in
# its place.
_GALVATRON = """
import os, runpy, sys, types
root = os.getcwd()
sys.path.insert(0, root)
import galvatron.core
for name in ("runtime", "profiler"):
    empty = types.ModuleType("galvatron.core." + name)
    empty.__path__ = [os.path.join(root, "galvatron", "core", name)]
    sys.modules[empty.__name__] = empty
os.chdir("galvatron/models/gpt")
sys.argv = [
    "search_dist.py",
    "scripts/search_dist.yaml",
    "SEQ_LENGTH=2048",
    "search_engine.profiling_info.time_profile_mode=static",
]
runpy.run_path("search_dist.py", run_name="__main__")
"""
OURS = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.planners import plan_case, CASES
print("STEP", plan_case(CASES[{name!r}]))
"""
CASES: Mapping[str, Case] = {case.name: case for case in (*SIMUMAX, GALVATRON)}


def plan_case(case: Case) -> float:
    """Seconds of a step of the plan that we find."""
    from autopar.costmodel import load_cluster
    from autopar.costmodel.known.transformer import transformer
    from autopar.planning.model.request import Request
    from autopar.planning.planner import search_plan
    from benchmarks.searching.models import llama3_8b

    shapes = {
        "llama3-8b": replace(llama3_8b(), sequence=4096),
        "llama3-70b": replace(llama3_8b(80), hidden=8192, heads=64, ffn=28672, sequence=4096),
        "llama2-7b": replace(llama3_8b(), kv_heads=32, ffn=11008, vocab=32000, sequence=2048),
    }
    graph = transformer(shapes[case.model], batch=case.batch, dtype="bfloat16").graph
    return search_plan(
        graph, Request(cluster=load_cluster(case.cluster).sized(case.devices), memory=case.memory)
    ).predicted.step


def run(python: str, code: str, where: Path, pattern: str) -> tuple[float, float]:
    """CPU seconds of a process, and the last number that its output has after `pattern`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    matches = re.findall(pattern + r"\s*([0-9.eE+-]+)", done.stdout)
    if done.returncode or not matches:
        raise SystemExit(f"the planner in {where} failed:\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, float(matches[-1])


def rows(simumax: Path | None, galvatron: Path | None, python: str) -> Iterator[Row]:
    """Every case whose rival is there."""
    asked = [
        (case, "simumax", simumax, _SIMUMAX.format(**asdict(case)), "STEP") for case in SIMUMAX
    ]
    asked.append((GALVATRON, "galvatron", galvatron, _GALVATRON, "Minized timecost ="))
    for case, rival, where, code, pattern in asked:
        if where is not None:
            ours_s, ours = run(
                sys.executable, OURS.format(root=str(ROOT), name=case.name), ROOT, "STEP"
            )
            rival_s, theirs = run(python, code, where, pattern)
            steps = {"ours_step_s": ours, "rival_step_s": theirs}
            yield Row(
                case=f"{case.name} on {case.devices}",
                rival=rival,
                ours_s=ours_s,
                rival_s=rival_s,
                **steps,
            )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simumax", type=Path, metavar="DIR", help="a checkout of SimuMax")
    parser.add_argument(
        "--galvatron", type=Path, metavar="DIR", help="a checkout of Hetu-Galvatron"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="the Python that runs them"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    if not (args.simumax or args.galvatron):
        parser.error("give --simumax DIR or --galvatron DIR")
    table = list(rows(args.simumax, args.galvatron, args.python))
    if args.json:
        print(json.dumps({"rows": [asdict(row) | {"ratio": row.ratio} for row in table]}))
        return 0
    print(
        f"{'case':18} {'rival':10} {'ours':>9} {'rival':>9} {'ratio':>7} {'our step':>10} "
        f"{'its step':>10}"
    )
    for row in table:
        times = (
            f"{row.ours_s:8.1f}s {row.rival_s:8.1f}s {row.ratio:7.3f} {row.ours_step_s:9.3f}s "
            f"{row.rival_step_s:9.3f}s"
        )
        print(f"{row.case:18} {row.rival:10} {times}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
