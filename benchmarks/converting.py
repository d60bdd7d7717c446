"""Plans of twenty public models as other projects' configurations.

Written, read back and run, or refused with reason.

    benchmarks/converting.py [--quick] [--json] [--run] [--model NAME ...] [--plan NAME ...]
    benchmarks/converting.py --within [--quick] [--json] [--model NAME ...] [--plans FOLDER]
                             [--page FILE]

Every model is planned by known schemes on four devices, and each plan is converted to all targets.
Formats that `autopar import` reads are read back and planned again: the plan must be the same, or
the losses named. With `--run`, the Python of dtensor, fsdp2 and pipelining runs on four ranks and
on one device, in evaluation mode, and differences of outputs and gradients are shown.

With `--within`, twelve models are planned for each target instead (`autopar plan --target
TARGET`), on all four devices, and a cell says what becomes of the target's file of that plan, or
why there is none: files for torch and transformers run on four ranks and are compared with one
device, others are read back and planned again. `--plans` stores the plans, so that another run
takes them from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.convertible.cells import Cell

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIXED = {"stages": 1, "recompute": "none", "micro_batches": 1, "zero": 0}
PLANS: dict[str, dict[str, Any]] = {
    "data": {**FIXED, "scheme": "data"},
    "zero3": {**FIXED, "scheme": "zero3", "zero": None},
    "tensor": {**FIXED, "scheme": "data 2 x megatron 2"},
    "pipeline": {
        "scheme": "pipeline-1f1b 2 x data 2",
        "stages": 2,
        "micro_batches": 2,
        "recompute": "none",
        "offload": "none",
    },
}
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
QUICK = ("llama", "resnet")
GIVEN: dict[str, Any] = {"devices": 4, "cluster": "dgx-h100", "memory": 70 * 2**30}


def rows(models: list[str], plans: list[str], run: bool) -> Iterator[dict[str, Any]]:
    """A row for each model, plan and target."""
    import autopar
    from autopar.errors import AutoparError
    from autopar.frontends.load import ModelOptions, load_model
    from autopar.integrations.convert import TARGETS, convert
    from autopar.integrations.importing import Hardware
    from benchmarks.convertible.executed import FUNCTIONS, difference, executed
    from benchmarks.convertible.models import build
    from benchmarks.convertible.read_back import SUFFIXES, read_back

    hardware = Hardware(**GIVEN)
    for model in models:
        module, inputs = build(model)
        loaded = load_model(module, ModelOptions(), inputs)
        for name in plans:
            asked = PLANS[name]
            row = {"model": model, "plan": name}
            try:
                plan = autopar.plan(module, inputs, **GIVEN, **asked)
            except AutoparError as error:
                yield {**row, "target": "", "outcome": "no such plan", "why": str(error)}
                continue
            for target in TARGETS:
                try:
                    converted = convert(plan, target)
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
                    done["back"] = read_back(plan, converted, target, loaded, hardware)
                if run and target in FUNCTIONS:
                    try:
                        given = executed(model, target, converted.text, plan)
                        done["difference"] = difference(given)
                    except AutoparError as error:
                        done["failed"] = str(error).strip().splitlines()[-1]
                yield done


def _print_within(table: Sequence[Cell]) -> None:
    targets = list(dict.fromkeys(cell.target for cell in table))
    outcomes = {(cell.model, cell.target): cell.outcome for cell in table}
    print(f"{'':10}" + "".join(f"{target:>16}" for target in targets))
    for model in dict.fromkeys(cell.model for cell in table):
        print(f"{model:10}" + "".join(f"{outcomes[model, target]:>16}" for target in targets))
    for cell in table:
        if cell.why:
            print(f"{cell.model}, {cell.target}: {cell.why}")


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
    parser.add_argument("--plans", type=Path, help="a folder for these plans, read where they are")
    parser.add_argument("--page", type=Path, help="write the page of the documents, with --within")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.within:
        _within(args)
        return
    models = args.model or list(QUICK if args.quick else MODELS)
    table = list(rows(models, args.plan or list(PLANS), args.run))
    if args.json:
        print(json.dumps({"rows": table}, indent=1))
    else:
        _print(table)


def _within(args: argparse.Namespace) -> None:
    """The table of plans within what each target can say."""
    from benchmarks.convertible.cells import cells
    from benchmarks.convertible.page import page

    table = list(cells(args.model or (QUICK if args.quick else WITHIN), GIVEN, args.plans))
    if args.page:
        args.page.write_text(page(table))
    if args.json:
        print(json.dumps({"rows": [asdict(cell) for cell in table]}, indent=1))
    else:
        _print_within(table)


if __name__ == "__main__":
    main()
