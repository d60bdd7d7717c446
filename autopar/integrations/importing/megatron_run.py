"""A run of Megatron-Core, from its arguments: the price of the run itself, not of a plan for it.

Degrees come from `Configuration`; this reads what arguments say of dispatch, overlap, recompute,
precision, layouts and kernels. Defaults are those of NVIDIA/Megatron-LM@d98e8a64
(megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import Framework, Habits, framework_named
from autopar.costmodel.known import Configuration as Known
from autopar.costmodel.known import Priced, Shape, price
from autopar.costmodel.known.pipeline_layout import chunks_of, ended, even
from autopar.errors import UsageError, unknown
from autopar.integrations.convert.precisions import MEGATRON_RECIPES
from autopar.ir.recipes import RECIPES
from autopar.order.schedules import SCHEDULES

from .configuration import Configuration, number

Arguments = Mapping[str, str]
DISPATCHERS: Mapping[str, tuple[str, str, int]] = {
    "alltoall": ("alltoall", "", 1),
    "deepep": ("node", "moe-deepep-num-sms", 20),
    "hybridep": ("node", "moe-hybridep-num-sms", 16),
}
"""Dispatchers: ours, and the argument of their multiprocessors with its default."""
GATHERS = "allgather"
"""The dispatcher that gathers the rows of all ranks on each, without a price."""
LOSSES = {"te": "in-place", "native": "megatron-fused"}
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
        "expandable-segments",
        "expert-tensor-parallel-size",
        "fp4-format",
        "fp4-recipe",
        "fp8-format",
        "fp8-param-gather",
        "fp8-recipe",
        "main-params-dtype",
        "moe-deepep-num-sms",
        "moe-enable-deepep",
        "moe-expert-capacity-factor",
        "moe-flex-dispatcher-backend",
        "moe-hybridep-num-sms",
        "moe-pad-expert-input-to-capacity",
        "moe-shared-expert-overlap",
        "moe-token-dispatcher-type",
        "mtp-num-layers",
        "no-overlap-p2p-communication",
        MERGED,
        "pipeline-model-parallel-layout",
        "recompute-modules",
        "tp-comm-overlap",
        "use-precision-aware-optimizer",
    )
)
"""Arguments that only the price of the run takes over."""


def price_run(configuration: Configuration, shape: Shape, cluster: Cluster) -> Priced:
    """Predict a step of the model on the cluster as Megatron-Core runs it."""
    given = configuration.arguments
    work = _framework(configuration)
    modules = number("megatron", given, "mtp-num-layers") or 0
    shape = replace(shape.run_by(work), mtp=modules)
    run = known_run(configuration, shape, cluster.devices).run_by(work)
    return price(shape, run, cluster)


def known_run(configuration: Configuration, shape: Shape, devices: int) -> Known:
    """The configuration on so many devices, without its framework."""
    given = configuration.arguments
    data = configuration.degree_of_data(devices)
    dispatcher, sms = _dispatcher(given)
    micro_batch = configuration.micro_batch or 1
    return Known(
        global_batch=configuration.batch or micro_batch * data,
        micro_batch=micro_batch,
        tensor=configuration.tensor,
        pipeline=configuration.stages,
        data=data,
        context=configuration.context,
        context_by="heads" if given.get("cp-comm-type") == "a2a" else "ring",
        expert=configuration.expert,
        expert_tensor=configuration.expert_tensor or 0,
        dispatcher=dispatcher,
        dispatcher_sms=sms,
        overlap_experts=MERGED in given,
        overlap_shared="moe-shared-expert-overlap" in given,
        capacity=_capacity(given),
        zero=configuration.zero or 0,
        sequence_parallel=configuration.sequence_parallel,
        recompute=configuration.recompute or "none",
        recompute_modules=tuple(given.get("recompute-modules", "").split()),
        # A run says by `overlap_experts` that passes are merged.
        schedule=schedule_of(configuration.stages, configuration.interleave, merged=False)
        or "1f1b",
        interleave=configuration.interleave,
        layout=layout_of(configuration, len(shape.kinds())),
        dtype=configuration.dtype or "float32",
    )


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
    return min(rows, key=lambda row: row.preferred).name


def priced_otherwise(given: Arguments) -> list[str]:
    """Sentences on arguments in whose place the price of the run takes others."""
    if _kind(given) != GATHERS:
        return []
    return [
        f"--moe-token-dispatcher-type {GATHERS} (the default): its gathers of all rows have no "
        "price, and the run itself is priced with rows that travel one by one (alltoall)"
    ]


def _kind(given: Arguments) -> str:
    kind = given.get("moe-token-dispatcher-type", GATHERS)
    return given.get("moe-flex-dispatcher-backend", "deepep") if kind == "flex" else kind


def _dispatcher(given: Arguments) -> tuple[str, int]:
    kind = _kind(given)
    if kind == GATHERS:
        # The nearest that has a price (see `priced_otherwise`).
        kind = "alltoall"
    if kind not in DISPATCHERS:
        raise UsageError(unknown("dispatcher", kind, DISPATCHERS))
    name, argument, default = DISPATCHERS[kind]
    return name, number("megatron", given, argument, default) or default


def _capacity(given: Arguments) -> float:
    text = given.get("moe-expert-capacity-factor", "0")
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"megatron: --moe-expert-capacity-factor is {text!r}, which is no number"
        ) from None


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


def _framework(configuration: Configuration) -> Framework:
    """Megatron-Core with the habits and kernels that the arguments choose."""
    given = configuration.arguments
    work = framework_named("megatron-core")
    precision = precision_of(given)
    products = RECIPES[precision].kernel if precision else ""
    kernels = replace(work.kernels, products=products)
    return replace(work, habits=_habits(configuration, work.habits), kernels=kernels)


def _habits(configuration: Configuration, habits: Habits) -> Habits:
    given = configuration.arguments
    gradients = 4 if configuration.reduce is None else 2
    loss = habits.loss
    if "cross-entropy-loss-fusion" in given:
        kind = given.get("cross-entropy-fusion-impl", "native")
        if kind not in LOSSES:
            raise UsageError(unknown("--cross-entropy-fusion-impl", kind, LOSSES))
        loss = LOSSES[kind]
    scope = given.get("cuda-graph-scope", "").split()
    graphs = given.get("cuda-graph-impl", "none")
    return replace(
        habits,
        overlap_gradients="overlap-grad-reduce" in given,
        overlap_gather="overlap-param-gather" in given,
        pipelined_tensor="tp-comm-overlap" in given,
        overlap_sends=configuration.interleave > 1 and "no-overlap-p2p-communication" not in given,
        gradient_bytes=gradients,
        reduced_bytes=gradients,
        gathered_bytes=1.0 if "fp8-param-gather" in given else None,
        loss=loss,
        state_bytes=_state_bytes(given),
        compiled="full_iteration" in (graphs, *scope),
        graphed=graphs == "transformer_engine" and "attn" in scope,
        expandable="expandable-segments" in given,
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
