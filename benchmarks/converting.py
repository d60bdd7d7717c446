"""Plans of twenty public models as other projects' configurations.

Written, read back and run, or refused with reason.

    benchmarks/converting.py [--quick] [--json] [--run] [--model NAME ...] [--plan NAME ...]
    benchmarks/converting.py --within [--quick] [--json] [--model NAME ...]

Every model is planned by known schemes on four devices, and each plan is converted to all targets.
Formats that `autopar import` reads are read back and planned again: the plan must be the same, or
the losses named. With `--run`, the Python of dtensor, fsdp2 and pipelining runs on four ranks and
on one device, in evaluation mode, and differences of outputs and gradients are shown.

With `--within`, twelve models are planned for each target instead (`autopar plan --for TARGET`): a
cell says whether the target's file of that plan loads, or why there is none. Files for torch and
transformers are executed, so that these make their own objects; others are read or compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIXED = {"stages": 1, "recompute": "none", "micro_batches": 1, "zero": 0}
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({**FIXED, "scheme": "data"}, 4),
    "zero3": ({**FIXED, "scheme": "zero3", "zero": None}, 4),
    "tensor": ({**FIXED, "scheme": "data 2 x megatron 2"}, 2),
    "pipeline": (
        {
            "scheme": "pipeline-1f1b 2 x data 2",
            "stages": 2,
            "micro_batches": 2,
            "recompute": "none",
            "offload": "none",
        },
        2,
    ),
}
"""Arguments of the plan, and the number of the ranks' shares of the batch."""
WITHIN = (
    "gpt2",
    "llama",
    "qwen3",
    "gemma",
    "mixtral",
    "qwen3_moe",
    "mamba2",
    "bert",
    "t5",
    "vit",
    "swin",
    "clip",
)
"""The models that are planned for each target."""
VERSIONS = {"torchtitan": "0.2"}
"""Versions whose files are read back: later ones of torchtitan take Python."""
EXECUTED = ("dtensor", "fsdp2", "pipelining", "transformers")
"""Targets whose files import what is installed here."""
SUFFIXES = {"torchtitan": ".toml", "megatron": ".sh", "deepspeed": ".json", "hf-tp-plan": ".json"}
QUICK = ("llama", "resnet")
GIVEN: dict[str, Any] = {"devices": 4, "cluster": "dgx-h100", "memory": 70 * 2**30}


def rows(models: list[str], plans: list[str], run: bool) -> Iterator[dict[str, Any]]:
    """A row for each model, plan and target."""
    import autopar
    from autopar.errors import AutoparError
    from autopar.integrations.convert import TARGETS, convert
    from benchmarks.convertible.executed import FUNCTIONS, difference
    from benchmarks.convertible.models import build

    for model in models:
        module, inputs = build(model)
        for name in plans:
            asked, shares = PLANS[name]
            row = {"model": model, "plan": name}
            try:
                plan = autopar.plan(module, inputs, **GIVEN, **asked)
            except AutoparError as error:
                yield {**row, "target": "", "outcome": "no such plan", "why": str(error)}
                continue
            for target in TARGETS:
                try:
                    converted = convert(plan, target, VERSIONS.get(target))
                except AutoparError as error:
                    yield {
                        **row,
                        "target": target,
                        "outcome": "refused",
                        "why": str(error).partition(": ")[2],
                    }
                    continue
                done = {**row, "target": target, "outcome": "ok", "lost": list(converted.lost)}
                if target in SUFFIXES:
                    done["back"] = _back(plan, converted, target, module, inputs)
                if run and target in FUNCTIONS:
                    try:
                        done["difference"] = difference(model, target, converted.text, shares)
                    except AutoparError as error:
                        done["failed"] = str(error).strip().splitlines()[-1]
                yield done


def within(models: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each model and target: its plan within the target's reach, and its file."""
    import autopar
    from autopar.errors import AutoparError
    from autopar.integrations.convert import TARGETS, convert
    from benchmarks.convertible.models import build

    for model in models:
        module, inputs = build(model)
        for target in TARGETS:
            row = {"model": model, "target": target}
            try:
                plan = autopar.plan(module, inputs, **GIVEN, target=target)
                converted = convert(plan, target)
                _load(target, converted.text)
            except (AutoparError, SyntaxError, ImportError, ValueError, TypeError) as error:
                yield {**row, "outcome": "refused", "why": str(error).splitlines()[0]}
                continue
            mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh)
            yield {**row, "outcome": "loads", "mesh": mesh, "stages": len(plan.stages) or 1}


def _load(target: str, text: str) -> None:
    """Read a file of a target, or compile it where it is Python; raises where neither can be."""
    from autopar.integrations.importing import read_configuration

    suffixes = {**SUFFIXES, "accelerate": ".yaml"}
    if target in EXECUTED:
        exec(compile(text, target, "exec"), {})
        return
    if target in VERSIONS or target not in suffixes:
        compile(text, target, "exec")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{suffixes[target]}"
        path.write_text(text)
        read_configuration(path, target)


def _print_within(table: list[dict[str, Any]]) -> None:
    targets = list(dict.fromkeys(row["target"] for row in table))
    cells = {(row["model"], row["target"]): row["outcome"] for row in table}
    print(f"{'':10}" + "".join(f"{target:>16}" for target in targets))
    for model in dict.fromkeys(row["model"] for row in table):
        print(f"{model:10}" + "".join(f"{cells[model, target]:>16}" for target in targets))
    for row in table:
        if "why" in row:
            print(f"{row['model']}, {row['target']}: {row['why']}")


def _back(plan: Any, converted: Any, target: str, module: Any, inputs: Any) -> str:
    """Say how a plan comes back from its conversion.

    "same" if the same plan comes back, the losses if they are named, else "another", which is a
    fault.
    """
    from autopar.errors import AutoparError
    from autopar.frontends.load import ModelOptions, load_model
    from autopar.integrations.importing import Hardware, import_configuration, read_configuration

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{SUFFIXES[target]}"
        path.write_text(converted.text)
        read = read_configuration(path, target)
    try:
        back = import_configuration(
            read, load_model(module, ModelOptions(), inputs), Hardware(**GIVEN), compare=False
        ).planned.plan
    except AutoparError as error:
        return f"refused: {error}"
    if (back.operators, back.mesh, back.schedule, back.stages) == (
        plan.operators,
        plan.mesh,
        plan.schedule,
        plan.stages,
    ):
        return "same"
    return "named" if converted.lost or read.lost else "another"


def _print(table: list[dict[str, Any]]) -> None:
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in table:
        text = (
            row["outcome"]
            + (f": {row['why']}" if "why" in row else "")
            + (f", read back: {row['back']}" if "back" in row else "")
        )
        if "difference" in row:
            text += ", run: " + (
                "equal" if row["difference"] < 1e-5 else f"differs by {row['difference']:.1e}"
            )
        text += f", run: failed: {row['failed']}" if "failed" in row else ""
        reasons[row["plan"], row["target"], text].append(row["model"])
    for (plan, target, text), models in reasons.items():
        print(f"{plan:9} {target:10} {len(models):3}  {text[:200]}\n{'':26}{' '.join(models)}")


def main() -> None:
    """Print the table."""
    from benchmarks.convertible.models import MODELS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--run", action="store_true", help="run the Python on four ranks")
    parser.add_argument(
        "--model",
        action="append",
        choices=MODELS,
        help="one of the models; repeatable (default: all)",
    )
    parser.add_argument(
        "--plan",
        action="append",
        choices=tuple(PLANS),
        help="one of the plans; repeatable (default: all)",
    )
    parser.add_argument("--within", action="store_true", help="plans for each target instead")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    every = WITHIN if args.within else MODELS
    models = args.model or list(QUICK if args.quick else every)
    table = list(
        within(models) if args.within else rows(models, args.plan or list(PLANS), args.run)
    )
    if args.json:
        print(json.dumps({"rows": table}, indent=1))
    elif args.within:
        _print_within(table)
    else:
        _print(table)


if __name__ == "__main__":
    main()
