"""Megatron-Core as the arguments of a run have it: its habits, kernels, schedule and layout.

Defaults are those of NVIDIA/Megatron-LM@d98e8a64 (megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.costmodel.frameworks import Framework, Habits, framework_named
from autopar.errors import UsageError, unknown
from autopar.integrations.convert.megatron import LOSSES
from autopar.integrations.convert.precisions import MEGATRON_RECIPES
from autopar.integrations.importing.pipeline_layout import chunks_of, ended, even
from autopar.ir.recipes import RECIPES
from autopar.order.schedules import SCHEDULES

from .configuration import Configuration, number

Arguments = Mapping[str, str]
DISPATCHERS = {
    "allgather": "allgather",
    "alltoall": "alltoall",
    "deepep": "node",
    "hybridep": "node",
}
"""Dispatchers of rows to experts by the names of arguments. The first is the default."""
STATES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
MERGED = "overlap-moe-expert-parallel-comm"
"""The argument with which passes of two micro-batches are merged."""
READ = frozenset(
    (
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
        "cp-comm-type",
        "cross-entropy-fusion-impl",
        "cross-entropy-loss-fusion",
        "cuda-graph-impl",
        "cuda-graph-scope",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "exp-avg-dtype",
        "exp-avg-sq-dtype",
        "expert-tensor-parallel-size",
        "fp4-format",
        "fp4-recipe",
        "fp8-format",
        "fp8-param-gather",
        "fp8-recipe",
        "main-params-dtype",
        "moe-enable-deepep",
        "moe-flex-dispatcher-backend",
        "moe-grouped-gemm",
        "moe-token-dispatcher-type",
        "no-overlap-p2p-communication",
        MERGED,
        "pipeline-model-parallel-layout",
        "recompute-modules",
        "tp-comm-overlap",
        "use-precision-aware-optimizer",
    )
)
"""Arguments that only the price takes over."""


def schedule_of(stages: int, interleave: int, *, merged: bool) -> str | None:
    """The preferred schedule of those that Megatron-LM runs with so many chunks a stage."""
    if stages == 1:
        return None
    rows = [
        row
        for row in SCHEDULES.values()
        if row.other_names.megatron
        and row.merges == merged
        and bool(row.chunks) == (interleave > 1)
    ]
    if not rows:
        raise UsageError(
            f"--{MERGED} with stages needs several chunks a stage, as "
            "--num-layers-per-virtual-pipeline-stage makes"
        )
    return min(rows, key=lambda row: row.preferred).name


def dispatcher_of(given: Arguments) -> str:
    """The dispatcher of rows to experts that arguments name, of those of `Kernels`."""
    kind = given.get("moe-token-dispatcher-type", next(iter(DISPATCHERS)))
    if kind == "flex":
        kind = given.get("moe-flex-dispatcher-backend", "deepep")
    if kind not in DISPATCHERS:
        raise UsageError(unknown("dispatcher", kind, DISPATCHERS))
    return DISPATCHERS[kind]


def layout_of(configuration: Configuration, layers: int) -> tuple[str, ...]:
    """The letters of every chunk; empty where layers are dealt out evenly."""
    given = configuration.arguments
    if "pipeline-model-parallel-layout" in given:
        return chunks_of(given["pipeline-model-parallel-layout"])
    first, last = (
        number("megatron", given, f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")
    )
    if first is not None or last is not None:
        return ended(layers, configuration.stages, first=first, last=last)
    ends = {end: f"account-for-{end}-in-pipeline-split" in given for end in ("embedding", "loss")}
    if not any(ends.values()):
        return ()
    chunks = configuration.stages * configuration.interleave
    return even(layers, chunks, embedding=ends["embedding"], loss=ends["loss"])


def precision_of(given: Arguments) -> str | None:
    """The recipe of products that arguments name, None for none."""
    if "fp4-format" in given:
        return "nvfp4"
    if "fp8-format" not in given:
        return None
    recipe = given.get("fp8-recipe", "delayed")
    if recipe not in MEGATRON_RECIPES:
        raise UsageError(unknown("--fp8-recipe", recipe, MEGATRON_RECIPES))
    return MEGATRON_RECIPES[recipe]


def megatron_framework(configuration: Configuration) -> Framework:
    """Megatron-Core with the habits and kernels that the arguments choose."""
    given = configuration.arguments
    bridge = configuration.source == "megatron-bridge"
    work = framework_named("megatron-bridge" if bridge else "megatron-core")
    precision = precision_of(given)
    products = RECIPES[precision].kernel if precision else ""
    kernels = replace(work.kernels, products=products)
    if configuration.expert > 1:
        kernels = replace(kernels, dispatcher=dispatcher_of(given))
    return replace(work, habits=_habits(configuration, work.habits), kernels=kernels)


def _habits(configuration: Configuration, habits: Habits) -> Habits:
    given = configuration.arguments
    gradients = 4 if configuration.reduce is None else 2
    loss = habits.loss
    if "cross-entropy-loss-fusion" in given:
        kind = given.get("cross-entropy-fusion-impl", "native")
        losses = {word: name for name, word in LOSSES.items()}
        if kind not in losses:
            raise UsageError(unknown("--cross-entropy-fusion-impl", kind, losses))
        loss = losses[kind]
    scope = given.get("cuda-graph-scope", "").split()
    graphs = given.get("cuda-graph-impl", "none")
    return replace(
        habits,
        overlap_gradients="overlap-grad-reduce" in given,
        overlap_gather="overlap-param-gather" in given,
        pipelined_tensor="tp-comm-overlap" in given,
        overlap_chunk_sends="no-overlap-p2p-communication" not in given,
        gradient_bytes=gradients,
        reduced_bytes=gradients,
        loss=loss,
        state_bytes=_state_bytes(given),
        compiled="full_iteration" in (graphs, *scope),
        graphed=graphs == "transformer_engine" and "attn" in scope,
    )


def _state_bytes(given: Arguments) -> float:
    """Bytes of the optimizer for each parameter: master weight and two moments."""
    if "use-precision-aware-optimizer" not in given:
        return 12.0
    total = 0.0
    for name in ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"):
        word = given.get(name, "fp32")
        if word not in STATES:
            raise UsageError(unknown(f"--{name}", word, STATES))
        total += STATES[word]
    return total
