"""Groups of published training runs: every run priced, beside its work and what was measured.

    work of a device = (3 or, with full recompute, 4) x forward FLOPs of the layers + 3 x those of the head, over the devices;
                       selective recompute repeats the attention only
    forward FLOPs a token of a layer = 4 h^2 (1 + kv_heads / heads) + 2 m h f + 4 s h,  m = 3 matrices where gated, else 2

Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021), appendix, and V. Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (2022), appendix A. A causal mask is not counted as half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from autopar.costmodel.known.configuration import RECOMPUTE
from autopar.costmodel.known.step import Priced
from autopar.errors import AutoparError

from .frameworks import ATTENTION, FRAMEWORKS
from .rows import Row, Run
from .scores import Group, Sample
from .steps import DTYPES, predict

GIB = 2.0**30
Predict = Callable[[Row], Priced | None]
T = TypeVar("T")


def _model_and_length(run: Run) -> str:
    return f"{run.model.split()[-1]} {run.seq_len}"


DIVIDED: Mapping[str, Callable[[Run], str]] = {
    "alephalpha": _model_and_length,
    "korth_t5": lambda run: f"dp {run.dp}",  # its row of several replicas measures the reduction of gradients, not recompute
}
"""Groups that are also scored in parts, and what names the part of a row."""
NEEDED = ("layers", "hidden", "vocab", "seq_len", "global_batch", "micro_batch", "gpus", "tp", "pp", "dp")
"""Columns without which nothing can be priced."""
UNDERSTOOD: Mapping[str, Callable[[str], bool]] = {
    "framework": FRAMEWORKS.__contains__,
    "attn_impl": ATTENTION.__contains__,
    "precision": lambda cell: cell.startswith(tuple(DTYPES)),
    "recompute": lambda cell: cell.startswith(RECOMPUTE),
    "zero_stage": lambda cell: cell.startswith(("0", "1", "2", "3", "HSDP")),
}
"""Columns of words, and which words a configuration can be made of."""


def work(run: Run) -> float | None:
    """FLOPs a device in a step, or None where sizes are missing."""
    if not (run.layers and run.hidden and run.vocab and run.global_batch and run.seq_len and run.gpus):
        return None
    h, s = run.hidden, run.seq_len
    shared = run.kv_heads / run.heads if run.kv_heads and run.heads else 1.0
    attention = 4.0 * s * h
    layer = 4.0 * h * h * (1.0 + shared) + 2.0 * (3 if run.gated_mlp else 2) * h * (run.ffn or 4 * h) + attention
    again = layer if run.recompute.startswith("full") else attention if run.recompute.startswith("selective") else 0.0
    tokens = run.global_batch * s
    return tokens * (run.layers * (3.0 * layer + again) + 6.0 * h * run.vocab) / run.gpus


def reason(row: Row, run: Run) -> str | None:
    """Why a row cannot be scored before it is priced, or None."""
    if run.outcome not in ("ok", "OOM", ""):
        return f"its outcome is {run.outcome}"
    if run.seconds is None and run.outcome != "OOM":
        return "no step time given"
    missing = [name for name in NEEDED if not row[name]]
    if missing:
        return f"not given: {', '.join(missing)}"
    if row.get("experts", "") not in ("", "0", "1"):
        return "a mixture of experts"
    for column, known in UNDERSTOOD.items():
        if not known(row[column]):
            return f"{column} not described: {row[column] or 'empty'}"
    return None


def training_groups(rows: Sequence[tuple[Row, Run]], predicted: Predict = predict) -> list[Group]:
    """A group for each name in the rows, and after it the parts that it is divided in."""
    samples: dict[str, list[Sample]] = {}
    left_out: dict[str, Counter[str]] = {}
    parts: dict[str, list[str]] = {}
    for row, run in rows:
        names = [run.group]
        if run.group in DIVIDED:
            names.append(f"{run.group} {DIVIDED[run.group](run)}")
        for name in names:
            samples.setdefault(name, [])
            left_out.setdefault(name, Counter())
            members = parts.setdefault(run.group, [])
            if name not in members:
                members.append(name)
        outcome = sample(row, run, predicted)
        for name in names:
            if isinstance(outcome, str):
                left_out[name][outcome] += 1
            else:
                samples[name].append(outcome)
    ordered = [name for members in parts.values() for name in members]
    return [Group(name=name, samples=tuple(samples[name]), left_out=dict(left_out[name])) for name in ordered]


def label(run: Run) -> str:
    """The row's name, model and configuration, for people."""
    degrees = f"{run.gpus} GPUs, tp {run.tp}, pp {run.pp}, dp {run.dp}" + (f", cp {run.cp}" if (run.cp or 1) > 1 else "")
    rest = f"micro-batch {run.micro_batch} of {run.global_batch}, recompute {run.recompute}, {run.attn_impl}"
    return f"{run.id} {run.model}: {degrees}, {rest}"


def attempted(call: Callable[[], T]) -> T | str:
    """What the call returns, or why it failed: one row that cannot be priced must not hide the others, and is counted."""
    try:
        return call()
    except AutoparError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def priced(row: Row, run: Run, predicted: Predict) -> Priced | str:
    """The price of a row, or the reason why it has none."""
    found = reason(row, run)
    if found is not None:
        return found
    return attempted(lambda: predicted(row)) or "leaves open what was run"


def sample(row: Row, run: Run, predicted: Predict) -> Sample | str:
    """The row priced, or the reason why it is left out."""
    found = priced(row, run, predicted)
    if isinstance(found, str):
        return found
    if not (math.isfinite(found.step) and found.step > 0):
        return f"failed: its price is {found.step}"
    oom = run.outcome == "OOM"
    return Sample(
        label=label(run), sweep=run.sweep, measured=None if oom else run.seconds, predicted=found.step, work=work(run),
        was_oom=oom if run.outcome else None, told_oom=not found.fits,
        memory=None if run.peak_mem_gib is None or oom else run.peak_mem_gib * GIB, told_memory=found.memory,
    )  # fmt: skip
