"""Whole planning commands of this tree beside those of another one.

    benchmarks/commands.py --configs DIR --models DIR [--beside TREE] [--only NAME ...] [--json]

The cases stand in `benchmarks/cases.toml`. Every command is a process of its own with one thread of
arithmetic and nothing remembered; known schemes and the proof of the import are left out.

    CPU        CPU seconds of the command, with the start of Python
    operators  of the largest layer in the plan's file, where its names tell layers
    step       predicted, and the certificate's bound; `above`: bound / published step, where one is

Ratios are this tree's over the other's; the last line has their geometric mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LAYER = re.compile(r"^(.*?\b\w*(?:layers?|blocks?|h|resnets|attentions)[._]\d+)\b")
"""The name of a layer at the beginning of an operator's."""


def command(case: dict[str, Any], configs: Path, models: Path, out: Path) -> list[str]:
    """The words after `autopar` of a case, whose plan is written to `out`."""
    if "config" in case:
        model = f"hf:{configs / case['config'] / 'config.json'}"
    else:
        model = str(models / case["onnx"])
    said = ["plan", model, "--cluster", "dgx-h100", "--devices", str(case["devices"])]
    said += ["--batch", str(case["batch"]), "-o", str(out)]
    if "sequence" in case:
        said += ["--dim", f"sequence={case['sequence']}"]
    return said


def run(tree: Path, words: Sequence[str], out: Path) -> dict[str, Any]:
    """CPU seconds, step, bound and operators of a layer of one command of a tree."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(tree), "AUTOPAR_CACHE": ""}
    asked = [sys.executable, "-m", "autopar", "plan", "--help"]
    options = subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=tree)
    # An older tree has no proof to leave out.
    without = [word for word in ("--no-compare", "--no-proof") if word in options.stdout]
    process = subprocess.Popen(
        [sys.executable, "-m", "autopar", *words, *without],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=tree,
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{tree}: autopar {' '.join(words)} failed:\n{said[-2000:]}")
    plan = json.loads(out.read_text())
    layers = Counter(match[1] for name in plan["operators"] if (match := LAYER.match(name)))
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "step_s": plan["predicted"]["step"],
        "bound_s": plan["provenance"]["lower_bound"],
        "operators": max(layers.values(), default=None),
    }


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of each case, printed as soon as it is there."""
    cases = tomllib.loads((ROOT / "benchmarks" / "cases.toml").read_text())["case"]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        gpt2 = Path(scratch) / "gpt2.onnx"
        for case in cases:
            if arguments.only and case["name"] not in arguments.only:
                continue
            if case.get("onnx") == "gpt2":
                example = str(ROOT / "examples" / "gpt2_onnx.py")
                made = [sys.executable, example, str(gpt2)]
                subprocess.run(made, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
                case = case | {"onnx": str(gpt2)}
            out = Path(scratch) / "plan.json"
            words = command(case, arguments.configs, arguments.models, out)
            row = {"case": case["name"], **run(ROOT, words, out)}
            if "measured" in case:
                row["above"] = row["bound_s"] / case["measured"]
            if arguments.beside:
                other = run(arguments.beside, words, out)
                row |= {f"rival_{name}": value for name, value in other.items()}
                row |= {f"{name}_ratio": row[name] / other[name] for name in ("cpu_s", "step_s")}
            rows.append(row)
            if not arguments.json:
                print(text(row), flush=True)
    return rows


def text(row: dict[str, Any]) -> str:
    """A row as a line."""
    layer = f"{row['operators'] or '-':>4} operators a layer"
    line = (
        f"{row['case']:32} {row['cpu_s']:7.1f} s CPU  {layer}  "
        f"step {row['step_s']:8.4g} s  bound {row['bound_s']:8.4g} s"
    )
    if "above" in row:
        line += f"  bound / published step {row['above']:.2f}"
    if "cpu_s_ratio" in row:
        line += (
            f"  CPU {row['cpu_s_ratio']:.2f} x, step {row['step_s_ratio']:.4f} x, "
            f"operators {row['rival_operators']}"
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", type=Path, required=True, help="folder of configurations")
    parser.add_argument("--models", type=Path, required=True, help="folder of ONNX files")
    parser.add_argument("--beside", type=Path, help="another tree of this project")
    parser.add_argument("--only", nargs="*", default=(), help="names of cases")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    told = rows(arguments)
    ratios = [row["cpu_s_ratio"] for row in told if "cpu_s_ratio" in row]
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
    if arguments.json:
        print(json.dumps({"rows": told, "cpu_ratio": mean}))
    elif mean is not None:
        print(f"geometric mean of {len(ratios)} cases: {mean:.2f} x the CPU seconds")


if __name__ == "__main__":
    main()
