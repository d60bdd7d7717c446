"""A table of plans for a folder of public model configurations, with the cost of planning each.

    benchmarks/configurations.py FOLDER [--devices 1024] [--cluster dgx-h100] [--batch 1024]
                                 [--seq 4096] [--only NAME ...] [--jobs 2] [--page FILE] [--json]
    benchmarks/configurations.py FOLDER --training [--only NAME ...]

Every row is the whole command `autopar plan hf:FOLDER/NAME/config.json` in a process of its own
with one thread of arithmetic; its CPU seconds and peak memory are those of that process. Files that
describe the same model with weights stored otherwise are one row: what is trained is the same.
`--training`: a few of the models at a training's batch instead, each on devices of its own number,
with the parts of their gaps. One of them is a file of the folder with more and wider layers.
The parameters are those of the module that transformers itself makes of the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planning import measured

STORED = {
    "_name_or_path",
    "compression_config",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields of a configuration that say how weights are stored, not what the model computes."""
AUTOPAR = (sys.executable, "-m", "autopar")
TRAINING = (
    ("Meta-Llama-3.1-8B", 8, 8),
    ("Meta-Llama-3.1-8B", 64, 8),
    ("Meta-Llama-3.1-70B", 256, 4),
    ("Meta-Llama-3.1-405B", 16384, 1),
    ("dense-1T", 131072, 1),
    ("Qwen3-30B-A3B", 64, 8),
    ("gpt-oss-120b", 64, 8),
    ("gpt-oss-120b", 1024, 8),
    ("Qwen3-235B-A22B", 256, 8),
    ("DeepSeek-V3", 1024, 8),
)
"""Models with a number of devices, and the sequences of 4,096 tokens for each device."""
LARGER = {
    "dense-1T": (
        "Meta-Llama-3.1-405B",
        {
            "num_hidden_layers": 200,
            "hidden_size": 20480,
            "intermediate_size": 66560,
            "num_attention_heads": 160,
        },
    )
}
"""Models that are those of a file but for some fields."""
HEAD = """# Plans of public models

Every model below is planned from its `config.json` alone, with all of its layers, on {devices:,}
devices of the cluster `{cluster}`: {batch:,} sequences of {seq:,} tokens a step, AdamW, bfloat16.
Parameters are those of transformers' own module, each one of them. Steps, memory and gaps are
predictions ([what they are worth](published-runs.md)); CPU seconds are of the whole command on one
core of a small cloud machine, with reading and exporting the model.
`benchmarks/configurations.py FOLDER --page docs/public-models.md` makes this page.

"""
COLUMNS = (
    ("model", "{name}"),
    ("type", "{kind}"),
    ("parameters", "{billions:.2f} B"),
    ("active", "{active:.2f} B"),
    ("step", "{step:.3g} s"),
    ("tokens/s/device", "{tokens:,.0f}"),
    ("MFU", "{mfu:.1f} %"),
    ("memory", "{memory:.1f} GiB"),
    ("gap", "{gap:.0f} %"),
    ("CPU", "{cpu_s:.0f} s"),
)


BRIEF = (
    ("model", "{name}"),
    ("devices", "{devices:,}"),
    ("batch", "{batch:,}"),
    ("step", "{step:.3g} s"),
    ("gap", "{gap:.1f} %"),
    ("of it", "{parts}"),
    ("CPU", "{cpu_s:.0f} s"),
)
"""The columns of `TRAINING`."""


def models(folder: Path, only: Sequence[str]) -> Iterator[tuple[Path, list[str]]]:
    """A folder of each distinct model, and the names of all that describe it."""
    alike: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/config.json")):
        if only and path.parent.name not in only:
            continue
        described = json.loads(path.read_text())
        alike.setdefault(json.dumps(without_stored(described), sort_keys=True), []).append(path)
    for paths in alike.values():
        first = min(paths, key=lambda path: len(path.parent.name))
        yield first, sorted(path.parent.name for path in paths)


def without_stored(described: Any) -> Any:
    """A configuration, nested ones too, without the fields that say how weights are stored."""
    if not isinstance(described, Mapping):
        return described
    return {
        field: without_stored(value) for field, value in described.items() if field not in STORED
    }


def row(
    path: Path, names: Sequence[str], options: argparse.Namespace, plan: Path | None = None
) -> dict[str, Any]:
    """The row of a configuration; `plan`: where its plan is saved."""
    described = json.loads(measured((*AUTOPAR, "models", "--json", f"{path}"))[1])
    saved = ("-o", f"{plan}") if plan else ()
    command = (*AUTOPAR, "plan", f"hf:{path}", "--no-compare", "--json", *saved)
    sizes = ("--devices", options.devices, "--batch", options.batch, "--seq", options.seq)
    cost, text = measured((*command, "--cluster", options.cluster, *map(str, sizes)))
    summary = json.loads(text)["summary"]
    return {
        "name": ", ".join(names),
        "kind": described["kind"],
        "devices": options.devices,
        "batch": options.batch,
        "parameters": described["parameters"],
        "billions": described["parameters"] / 1e9,
        "active": described["active"] / 1e9,
        "step": summary["step"],
        "tokens": summary["tokens_per_second_per_device"],
        "mfu": 100 * summary["mfu"],
        "memory": summary["memory"] / 2**30,
        "gap": 100 * summary["gap"],
        "plan": summary["sentence"],
        "notes": summary["notes"],
        **cost,
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]] = COLUMNS) -> str:
    """The rows in Markdown."""
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(text.format(**measures) for _, text in columns) + " |"
        for measures in rows
    ]
    return "\n".join(lines) + "\n"


def at_training_batches(options: argparse.Namespace) -> None:
    """Print the rows of `TRAINING`."""
    for name, devices, sequences in TRAINING:
        if options.only and name not in options.only:
            continue
        sized = {"devices": devices, "batch": devices * sequences, "seq": 4096}
        asked = argparse.Namespace(**{**vars(options), **sized})
        with tempfile.TemporaryDirectory() as scratch:
            path = configuration(options.folder.resolve(), name, Path(scratch))
            plan = Path(scratch) / "plan.json"
            made = row(path, [name], asked, plan)
            made["parts"] = parts_of_gap(plan, path)
        text = table([made], BRIEF).splitlines()[-1]
        print(json.dumps(made) if options.json else text, flush=True)


def configuration(folder: Path, name: str, scratch: Path) -> Path:
    """The file of a model; that of one in `LARGER` is written to `scratch`."""
    if name not in LARGER:
        return folder / name / "config.json"
    like, fields = LARGER[name]
    path = scratch / "config.json"
    path.write_text(json.dumps(json.loads((folder / like / "config.json").read_text()) | fields))
    return path


def parts_of_gap(plan: Path, path: Path) -> str:
    """The parts of a plan's gap that are 0.05 % of its bound or more, as shares of it."""
    command = (*AUTOPAR, "explain", f"{plan}", "--model", f"hf:{path}", "--gap", "--json")
    gap = json.loads(measured(command)[1])["gap"]
    shares = {part: 100 * seconds / gap["bound"] for part, seconds in gap["seconds"].items()}
    return ", ".join(f"{part} {share:.1f}" for part, share in shares.items() if share >= 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="rows made at the same time")
    parser.add_argument("--page", type=Path, help="write the page of the documents")
    parser.add_argument("--json", action="store_true", help="print an object for each row")
    parser.add_argument("--training", action="store_true", help="models at a training's batch")
    options = parser.parse_args()
    if options.training:
        at_training_batches(options)
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = []
        chosen = models(options.folder.resolve(), options.only)
        for made in pool.map(lambda model: row(*model, options), chosen):
            rows.append(made)
            print(json.dumps(made) if options.json else table([made]).splitlines()[-1], flush=True)
    if options.page:
        options.page.write_text(HEAD.format(**vars(options)) + table(rows))


if __name__ == "__main__":
    main()
