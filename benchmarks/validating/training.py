"""Groups of published training runs: every run priced, with its work and its measurements.

    work of a device = ((3, or 4 with full recompute) x forward FLOPs of layers + 3 x those of the
    head) / devices
                       (selective recompute repeats the attention alone)
    forward FLOPs a token of a layer = 4 h^2 (1 + kv_heads / heads) + 2 m h f + 4 s h
                       m: 3 matrices where gated, else 2

Source: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021),
appendix, and V. Korthikanti et al., "Reducing activation recomputation in large transformer models"
(2022), appendix A. A causal mask is not counted as half.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from autopar.costmodel.calibration.run_kinds import run_kind
from autopar.costmodel.device.device import TF32
from autopar.errors import AutoparError
from benchmarks.validating.known.shape import Shape

from .facts import open_facts, precision_of
from .missing import Missing
from .priced import Priced
from .processes import each
from .rows import Row, Run
from .scores import Group, Sample
from .seen import PROFILE, unseeing, without
from .sizes import attention_flops, forward_flops, layer_flops
from .steps import predict

GIB = 2.0**30
Predict = Callable[[Row], tuple[Shape, Priced]]
T = TypeVar("T")


def _model_and_length(run: Run) -> str:
    return f"{run.model.split()[-1]} {run.seq_len}"


BY_NEUTRAL = " without its profile"
"""The end of the names of groups that are priced as if nothing of their framework was read."""
FAMILY = re.compile(r"[^0-9+]*")
"""The name of a framework without its version."""


def _with_experts(run: Run) -> str:
    return "experts" if run.model.startswith("MoE") else "dense"


def _family(run: Run) -> str:
    """The kind of model that a run of Megatron-Bridge trains."""
    if "emotron" in run.model:
        return "state space"
    if "GPT OSS" in run.model or "GPT-OSS" in run.model:
        return "GPT-OSS"
    return "dense" if run.model.upper().startswith("LLAMA") else "experts"


DIVIDED: Mapping[str, Callable[[Run], str]] = {
    "alephalpha": _model_and_length,
    "mbridge": _family,
    "alpa_ws": _with_experts,
    "korth_t5": lambda run: (
        f"dp {run.dp}"
    ),  # its row of several replicas measures the reduction of gradients, not recompute
}
"""Groups that are also scored in parts, each with the function that names a row's part."""


def work(run: Run, shape: Shape) -> float | None:
    """FLOPs a device in a step, or None where sizes are missing."""
    if not (run.global_batch and run.gpus):
        return None
    again = 0.0
    if run.recompute.startswith("full"):
        again = sum(layer_flops(shape, kind) for kind in shape.kinds())
    elif run.recompute.startswith("selective"):
        again = len(shape.kinds()) * attention_flops(shape, shape.sequence, 2 * shape.width)
    return run.global_batch * shape.sequence * (3.0 * forward_flops(shape) + again) / run.gpus


def stated_seconds(run: Run, shape: Shape) -> float | None:
    """Seconds of a step: the row's own, or those that follow from its stated TFLOP/s.

    FLOPs are counted as the row defines them: six a parameter and token, plus attention without
    halving for a causal mask, and no recompute.
    """
    if (
        run.seconds is not None
        or run.tflops_per_gpu is None
        or "model FLOPs" not in run.tflops_kind
    ):
        return run.seconds
    flops = work(run.model_copy(update={"recompute": ""}), shape)
    return None if flops is None else flops / (run.tflops_per_gpu * 1e12)


def reason(run: Run) -> str | None:
    """The reason why a row cannot be scored before it is priced, or None."""
    if run.outcome not in ("ok", "OOM", ""):
        return f"its outcome is {run.outcome}"
    if run.seconds is None and run.outcome != "OOM" and "model FLOPs" not in run.tflops_kind:
        return "no step time given"
    return None


def training_groups(rows: Sequence[tuple[Row, Run]], predicted: Predict = predict) -> list[Group]:
    """A group for each name in the rows, and after it the parts that it is divided in.

    Behind them are the groups without what they have seen.
    """
    samples: dict[str, list[Sample]] = {}
    left_out: dict[str, Counter[str]] = {}
    parts: dict[str, list[str]] = {}
    apart: dict[str, list[Sample]] = {}
    outcomes = samples_of(rows, predicted)
    for (_, run), outcome in zip(rows, outcomes, strict=True):
        names = [run.group]
        if run.group in DIVIDED:
            names.append(f"{run.group} {DIVIDED[run.group](run)}")
        for name in names:
            samples.setdefault(name, [])
            left_out.setdefault(name, Counter())
            members = parts.setdefault(run.group, [])
            if name not in members:
                members.append(name)
        for name in names:
            if isinstance(outcome, str):
                left_out[name][outcome] += 1
            else:
                samples[name].append(outcome)
    unseen = [(unseeing(row, run.group), run) for row, run in rows if without(run.group)]
    for (_, run), unfitted in zip(unseen, samples_of(unseen, predicted), strict=True):
        members = apart.setdefault(without(run.group), [])
        members.extend([] if isinstance(unfitted, str) else [unfitted])
    ordered = [name for members in parts.values() for name in members]
    return [
        *(
            Group(name=name, samples=tuple(samples[name]), left_out=dict(left_out[name]))
            for name in ordered
        ),
        *(Group(name=name, samples=tuple(members)) for name, members in apart.items()),
    ]


def unprofiled_groups(rows: Sequence[tuple[Row, Run]], predicted: Predict = predict) -> list[Group]:
    """The groups of rows priced as if nothing of their frameworks was read, nor off the rows."""
    samples: dict[str, list[Sample]] = {}
    unseen = [(unseeing(row, run.group, PROFILE), run) for row, run in rows]
    for (_, run), unread in zip(rows, samples_of(unseen, predicted), strict=True):
        if not isinstance(unread, str):
            # Pairs of devices are told of the rows themselves.
            members = samples.setdefault(f"{run.group}{BY_NEUTRAL}", [])
            members.append(replace(unread, pair=None))
    return [Group(name=name, samples=tuple(members)) for name, members in samples.items()]


def samples_of(rows: Sequence[tuple[Row, Run]], predicted: Predict = predict) -> list[Sample | str]:
    """The priced rows, or the reasons for leaving them out."""
    return each(partial(_sample_of, predicted=predicted), rows)


def _sample_of(pair: tuple[Row, Run], predicted: Predict) -> Sample | str:
    return sample(*pair, predicted)


SINKS = re.compile("gpt-?oss", re.IGNORECASE)
"""Models whose attention has sinks, for which no table has kernels."""


def label(run: Run) -> str:
    """The row's name, model and configuration, for people."""
    degrees = f"{run.gpus} GPUs, tp {run.tp}, pp {run.pp}, dp {run.dp}" + (
        f", cp {run.cp}" if (run.cp or 1) > 1 else ""
    )
    rest = (
        f"micro-batch {run.micro_batch} of {run.global_batch}, recompute {run.recompute}, "
        f"{run.attn_impl}"
    )
    return f"{run.id} {run.model}: {degrees}, {rest}"


def attempted(call: Callable[[], T]) -> T | str:
    """The call's result, or its reason for failing.

    One row that cannot be priced must not hide the others; it is counted.
    """
    try:
        return call()
    except Missing as error:
        return str(error)
    except AutoparError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def priced(row: Row, run: Run, predicted: Predict) -> tuple[Shape, Priced] | str:
    """The model and the price of a row, or the reason why it has none."""
    return reason(run) or attempted(lambda: predicted(row))


ALLOCATOR = ("torchtitan",)
"""Frameworks whose logs show what torch's allocator has reserved, without the context of the device
(torchtitan: reserved_bytes.all.peak).
"""
COMPILER = ("Alpa", "Parax")
"""Frameworks that show the memory that a compiler assigned (XLA's buffers)."""


def told_memory(row: Row, price: Priced) -> float:
    """The predicted bytes of what the row's framework shows."""
    if row["framework"].startswith(COMPILER):
        return max(price.allocated)
    return price.memory - price.reserved if row["framework"].startswith(ALLOCATOR) else price.memory


def _scale(run: Run) -> dict[str, float]:
    """The figures of a run against which residuals are shown."""
    figures = {
        "devices": run.gpus,
        "sequence": run.seq_len,
        "micro-batch": run.micro_batch,
        "parameters": run.hidden and run.layers and run.hidden**2 * run.layers,
    }
    return {name: float(figure) for name, figure in figures.items() if figure}


def sample(row: Row, run: Run, predicted: Predict) -> Sample | str:
    """The priced row, or the reason for leaving it out."""
    prices = priced(row, run, predicted)
    if isinstance(prices, str):
        return prices
    shape, price = prices
    if not (math.isfinite(price.step) and price.step > 0):
        return f"failed: its price is {price.step}"
    oom = run.outcome == "OOM"
    facts = attempted(lambda: tuple(open_facts(row)))
    return Sample(
        label=label(run),
        sweep=run.sweep,
        measured=None if oom else stated_seconds(run, shape),
        predicted=price.step,
        work=work(run, shape),
        was_oom=oom if run.outcome else None,
        told_oom=not price.fits,
        memory=None if run.peak_mem_gib is None or oom else run.peak_mem_gib * GIB,
        told_memory=told_memory(row, price),
        open=() if isinstance(facts, str) else facts,
        scale=_scale(run),
        pair=(
            FAMILY.match(run.framework)[0],
            run.model,
            f"{row['precision'] or 'any'}, {run.seq_len}",
        ),  # type: ignore[index]
        kind=run_kind(
            experts=shape.experts > 0,
            narrow=precision_of(row)[1] not in ("", TF32),
            unmeasured=shape.state is not None or bool(SINKS.search(run.model)),
        ),
        device=run.gpu.partition("-")[0],
        tokens=(run.global_batch or 0) * shape.sequence / (run.gpus or 1),
    )
