"""The seconds by which steps of 24 plans are longer than their computation, by reason.

    benchmarks/stalls.py [--only NAME ...] [--plans DIR] [--json]

    computation + sum over the reasons = step        (milliseconds; with stages their mean)

Computation is a share of the step; reasons of less than 0.05 % are left out. Dense models and
mixtures of experts, small and large batches, 8 to 1,024 devices of two clusters. The last column is
the change of the step if every gather begins twice as many visits ahead, which is another order of
issue of the same plan (not known of stages). `--plans` names a folder of plan files, CASE.json:
those that are there are read, the others are made and written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.analysis.program.stalls import stalls_of
from autopar.analysis.program.step_parts import stepping_of
from autopar.costmodel.step.estimate import timeline
from autopar.costmodel.step.reasons import Reason
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.planned.cases import Case, graph_of, request_of
from benchmarks.planning import choices

H100 = "dgx-h100"
A100 = "dgx-a100-80g"
LEAST = 5e-4
"""The share of a step below which a reason is not printed."""
SIZES = (
    ("gpt2", A100, 8, 8),
    ("gpt2", A100, 64, 64),
    ("gpt2", H100, 8, 512),
    ("llama3_8b", H100, 8, 16),
    ("llama3_8b", H100, 8, 256),
    ("llama3_8b", H100, 64, 64),
    ("llama3_8b", A100, 64, 64),
    ("llama3_8b", H100, 64, 1024),
    ("llama3_8b", H100, 512, 512),
    ("llama3_70b", H100, 64, 64),
    ("llama3_70b", A100, 64, 512),
    ("llama3_70b", H100, 256, 256),
    ("llama3_70b", H100, 256, 2048),
    ("llama3_405b", H100, 512, 512),
    ("llama3_405b", H100, 1024, 1024),
    ("llama3_405b", A100, 1024, 2048),
    ("mixtral_8x7b", H100, 64, 64),
    ("mixtral_8x7b", A100, 64, 1024),
    ("mixtral_8x7b", H100, 256, 1024),
    ("moe_1t", H100, 512, 512),
    ("moe_1t", H100, 1024, 4096),
    ("qwen3_30b_a3b", H100, 64, 256),
    ("qwen3_30b_a3b", H100, 64, 1024),
    ("qwen3_30b_a3b", A100, 256, 512),
)
CASES = tuple(
    Case(
        name=f"{model}-{cluster}-{devices}-{batch}",
        model=model,
        cluster=cluster,
        devices=devices,
        batch=batch,
    )
    for model, cluster, devices, batch in SIZES
)
CASES_BY_NAME = {case.name: case for case in CASES}


def row(case: Case, folder: Path | None) -> dict[str, Any]:
    """The figures of a case; `folder`: of plan files."""
    graph = graph_of(case, Path())
    path = None if folder is None else folder / f"{case.name}.json"
    if path is not None and path.exists():
        plan = Plan.load(path)
    else:
        plan = search_plan(graph, request_of(case, graph))
        if path is not None:
            path.write_text(plan.to_json(), encoding="utf-8")
    analysis = analyse(graph, train=True)
    told = stalls_of(plan, analysis, cluster_of_plan(plan, None))
    first = told.waits[0] if told.waits else None
    return {
        "case": case.name,
        "found": choices(plan),
        "step": told.step,
        "computation": told.computation,
        **{reason.value: told.reasons[reason] for reason in Reason},
        "largest": f"{first.name} {first.kind}".strip() if first else "",
        "earlier": _earlier(plan, analysis),
    }


def _earlier(plan: Plan, analysis: Analysis) -> float | None:
    """The seconds of the step with gathers twice as many visits ahead; None with stages."""
    if plan.stages:
        return None
    stepping = stepping_of(plan, analysis)
    schedule = replace(stepping.micro.schedule, prefetch=2 * stepping.micro.schedule.prefetch)
    prices = stepping.prices(cluster_of_plan(plan, None))
    ahead = replace(stepping.micro, schedule=schedule)
    return timeline(ahead, stepping.part, prices, optimizer=plan.model.optimizer).step


def line(told: dict[str, Any]) -> str:
    """A row of the table."""
    chosen = told["found"]
    plan = f"{chosen['stages']} x {chosen['mesh']}, {chosen['micro_batches']} micro"
    step = told["step"]
    cells = [
        _milliseconds(told[reason]) if told[reason] >= LEAST * step else "" for reason in _REASONS
    ]
    whole = (_milliseconds(step), f"{told['computation'] / step:.1%}")
    earlier = "" if told["earlier"] is None else f"{told['earlier'] / step - 1:+.1%}"
    return f"| {' | '.join([told['case'], plan, *whole, *cells, earlier])} |"


def _milliseconds(seconds: float) -> str:
    """Milliseconds with three digits or more."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


_REASONS = tuple(reason.value for reason in Reason)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", choices=CASES_BY_NAME, help="only these cases")
    add("--plans", type=Path, metavar="DIR", help="a folder of plan files to read or write")
    add("--json", action="store_true", help="print a JSON object for each case")
    chosen = parser.parse_args(arguments)
    columns = ("model-cluster-devices-batch", "stages x mesh", "step ms", "computation", *_REASONS)
    if not chosen.json:
        print(f"| {' | '.join([*columns, 'gathers earlier'])} |")
        print(f"|{'---|' * (len(columns) + 1)}")
    for name in chosen.only or CASES_BY_NAME:
        told = row(CASES_BY_NAME[name], chosen.plans)
        print(json.dumps(told) if chosen.json else line(told), flush=True)


if __name__ == "__main__":
    main()
