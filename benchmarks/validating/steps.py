"""A published training run, a row of `training_steps.csv`, as a known configuration on a cluster.

A row's own values are taken unchanged; the framework's habits are in the cost model's table,
choices of recipes in `frameworks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import Framework, Habits, Kernels, framework_named
from autopar.errors import AutoparError
from benchmarks.validating.known.shape import Shape

from .configuration import RECOMPUTE, Configuration
from .facts import precision_of
from .frameworks import NEUTRAL, attention_of, described, framework_of_row, recipe_of
from .machines import cluster_of
from .missing import Missing
from .priced import Priced, price
from .seen import PROFILE, taken_away
from .sizes import Row, number, shape_of

DISPATCHERS: Mapping[str, str] = {"deepep": "node", "hybridep": "node"}
"""Dispatchers of Megatron-Core, by their name there."""
OWN_EXPERTS = ("megatron-bridge", "moe zoo")
"""Frameworks whose recipes do not split experts (--expert-tensor-parallel-size 1)."""
STAGE = re.compile(r"(?:zero)?[- ]?(?:stage)?[- ]?([0-3])\b", re.IGNORECASE)
SEQUENCE = ("megatron-core", "nemo-", "megatron-bridge", "moe zoo", "torchtitan", "llama-3")
"""Descriptions of frameworks that run tensor parallelism with sequence parallelism wherever there
is any.
"""
ZERO: Sequence[tuple[int, tuple[str, ...]]] = (
    (1, ("megatron-core", "nemo-", "megatron-bridge", "moe zoo", "deepspeed zero-1", "nanotron")),
    (3, ("torchtitan", "llama-3", "automodel", "maxtext", "fms-fsdp", "llm-foundry", "deepspeed")),
)
"""ZeRO stages that the scripts of frameworks set, where a row does not name one."""
MICRO_BATCHES = (1, 2, 4, 8)
"""Tried where a row does not say which it ran: the fastest that fits."""


def framework(row: Row) -> Framework:
    """The framework of a row, with the differences that the row states.

    Without a profile it is the neutral habit, with what the row says of its kernels.
    """
    neutral = PROFILE in taken_away(row)
    work = framework_named(NEUTRAL) if neutral else framework_of_row(row, compiled=compiled(row))
    given = attention_of(row["attn_impl"])
    if neutral and row["attn_impl"].strip():
        # FlashAttention of no known version: the second is the most frequent one.
        given = given or Kernels().attention
    kernels = replace(work.kernels, attention=given or work.kernels.attention)
    if "RMS" in row["attn_impl"]:
        kernels = replace(kernels, norm="fused")
    narrow = precision_of(row)[1]
    habits = work.habits if neutral else _chosen(_habits(row, work.habits), row)
    if "gather rate" in taken_away(row):
        habits = replace(habits, gather_rate=math.inf)
    return replace(work, habits=habits, kernels=replace(kernels, products=narrow))


def compiled(row: Row) -> bool:
    """Whether a compiler fuses the framework's operators."""
    return (
        "compile" in row["notes"]
        or "compile" in row["framework"]
        or "Parax" in row["framework"]
        or "async TP" in row["notes"]
    )


def _habits(row: Row, habits: Habits) -> Habits:
    """The framework's habits, with the differences that a row states."""
    habits = replace(
        habits,
        overlap_gradients=habits.overlap_gradients or "DDP torch (overlapped)" in row["notes"],
    )
    if row["precision"].startswith(
        "bf16 (fp32 grad"
    ):  # a float32 buffer, to which kernels of their own add 16-bit gradients
        habits = replace(habits, accumulation_bytes=18.0, partition="items")
    if "async TP" in row["notes"]:
        habits = replace(habits, pipelined_tensor=True)
    if "overlap-grad-reduce" in row["notes"]:
        habits = replace(habits, overlap_gradients=True, overlap_gather=True, pipelined_tensor=True)
    return habits


def _chosen(habits: Habits, row: Row) -> Habits:
    """The habits with the choices of a run's recipe."""
    name = row["framework"]
    if described(name).startswith("nemo-"):
        # Their scripts sum in 16 bits for Llama alone, and pipeline tensor parallelism for the
        # largest models.
        wide = "LLAMA" not in row["model"].upper()
        fused_loss = "24.07" in name and row["model"] in ("LLAMA3-70B", "Nemotron-22B")
        return replace(
            habits,
            gradient_bytes=4 if wide else 2,
            reduced_bytes=4 if wide else 2,
            loss="megatron-fused" if fused_loss else "megatron",
            pipelined_tensor=row["model"] in ("GPT3-175B", "LLAMA3-70B", "Nemotron-22B"),
        )
    if name.startswith("Megatron-Bridge"):
        choices = recipe(row)
        dense = row["model"].startswith("LLAMA")
        return replace(
            habits,
            partition="items" if "405B" in row["model"] else "even",
            compiled=choices.get("graphs") == "step",
            graphed=choices.get("graphs") == "layers",
            pipelined_tensor=dense and row["precision"] != "NVFP4",
            state_bytes=8 if row["model"].startswith("DeepSeek") else 12,
            overlap_gradients="DeepSeek" not in row["model"] or not row["gpu"].startswith("H100"),
        )
    return habits


def recipe(row: Row) -> Mapping[str, Any]:
    """The choices of a row's recipe."""
    if not row["framework"].startswith("Megatron-Bridge"):
        return {}
    return recipe_of(row["framework"], row["model"], row["gpu"], row["precision"])


def _zero(row: Row) -> int:
    """The ZeRO stage that a row names, or its framework's."""
    cell = row["zero_stage"].strip()
    if stage := STAGE.match(cell):
        return int(stage[1])
    word = cell.upper()
    if word.startswith(("FSDP", "HSDP", "HYBRID")):
        return 3
    if "DISTRIBUTED OPTIMIZER" in word and "NOT STATED" not in word:
        return 1
    if cell and not word.startswith(("DDP", "NONE", "NO")):
        raise Missing(f"zero_stage not described: {cell}")
    if recipe(row).get("fsdp"):
        return 3
    known = described(row["framework"])
    return next((stage for stage, names in ZERO if known.startswith(names)), 0)


def _shards(row: Row) -> int:
    """The ranks that share out states in hybrid sharding: those of a node (0: all)."""
    if not row["zero_stage"].strip().upper().startswith(("HSDP", "HYBRID")):
        return 0
    replicas = number(row, "dp") * number(row, "cp")
    inner = max(number(row, "gpus_per_node", 8) // (number(row, "tp") or 1), 1)
    return inner if replicas % inner == 0 else 0


def _recompute(row: Row, work: Framework) -> str:
    word = (row["recompute"].lower().split("(")[0].split() or ["none"])[0]
    word = {"no": "none", "0": "none", "off": "none", "yes": "full"}.get(word, word)
    if word not in RECOMPUTE:
        raise Missing(f"recompute not described: {row['recompute']}")
    if row["framework"].startswith("PyTorch FSDP") and word == "selective":
        return "full"  # of a share of the layers
    if word == "none" and recipe(row).get("recompute"):
        return "selective"
    return word


def _sequence_parallel(row: Row) -> bool:
    """Whether a row says that rows are split between layers, or its framework does it always."""
    cell = row["seq_parallel"]
    if cell not in ("", "0", "1"):
        raise Missing(f"seq_parallel not described: {cell}")
    always = described(row["framework"]).startswith(SEQUENCE) and number(row, "tp") > 1
    return cell == "1" or always


def _micro_batch(row: Row) -> int:
    """Sequences of a micro-batch.

    torchtitan divides a rank's batch among as many micro-batches as there are stages; from June
    2025 they have one sequence (distributed/pipeline_parallel.py).
    """
    micro = number(row, "micro_batch")
    stages = number(row, "pp")
    local = micro * number(row, "dp") == number(row, "global_batch")
    known = described(row["framework"])
    if stages == 1 or not local or not known.startswith("torchtitan"):
        return micro
    return max(micro // stages, 1) if known < "torchtitan-2025" else 1


def _expert_tensor(row: Row) -> int:
    """The ranks that split each expert: one, or those of tensor parallelism (0).

    One, too, where there are not enough ranks in a stage for more.
    """
    stage = number(row, "tp") * number(row, "dp") * number(row, "cp")
    whole = stage % (number(row, "ep") * number(row, "tp")) != 0
    return 1 if whole or described(row["framework"]) in OWN_EXPERTS else 0


def _chunks(row: Row) -> int:
    """Chunks of a stage.

    Llama 3's have a layer each, where embedding and head count as one (arXiv:2407.21783, 3.3.2).
    """
    items = number(row, "layers", 0) + 2
    stages = number(row, "pp")
    llama = described(row["framework"]) == "llama-3" and not row["interleave"] and stages > 1
    return items // stages if llama and items % stages == 0 else number(row, "interleave")


def with_degrees(row: Row) -> Row:
    """The row with the degree that follows from the others and the number of devices."""
    degrees = {name: number(row, name, 0) for name in ("tp", "pp", "dp")}
    absent = [name for name, degree in degrees.items() if not degree]
    devices = number(row, "gpus", 0)
    if len(absent) != 1 or not devices:
        return row
    others = math.prod(degree for degree in degrees.values() if degree) * number(row, "cp")
    return row if devices % others else {**row, absent[0]: str(devices // others)}


def configuration_of(row: Row, work: Framework) -> Configuration:
    """The parallel configuration of a row."""
    row = with_degrees(row)
    missing = [name for name in ("global_batch", "tp", "pp", "dp") if not row[name]]
    if missing:
        raise Missing(f"not given: {', '.join(missing)}")
    data = number(row, "dp")
    micro = _micro_batch(row)
    batch = max(round(number(row, "global_batch") / (micro * data)), 1) * micro * data
    tensor = number(row, "tp")
    choices = recipe(row)
    c = Configuration(
        global_batch=batch,
        micro_batch=micro,
        tensor=tensor,
        pipeline=number(row, "pp"),
        data=data,
        context=number(row, "cp"),
        expert=number(row, "ep"),
        expert_tensor=_expert_tensor(row),
        dispatcher=DISPATCHERS.get(choices.get("dispatcher", ""), "alltoall"),
        overlap_experts=bool(choices.get("overlap_experts")),
        zero=_zero(row),
        shards=_shards(row),
        interleave=_chunks(row),
        recompute=_recompute(row, work),
        recompute_modules=tuple(choices.get("recompute", ())),
        sequence_parallel=_sequence_parallel(row),
        dtype=precision_of(row)[0],
    )
    return c.run_by(work)


Prices = Callable[[Shape, Configuration, Cluster, str], Priced]


def predict(row: Row, by: Prices = price) -> tuple[Shape, Priced]:
    """The model of a row and its predicted step, at the prices that `by` gives.

    Raises `Missing` if the row does not define its run.
    """
    work = framework(row)
    row = with_degrees(row)
    shape = shape_of(row, work)
    attempts = list(_tried(row, work, shape, by))
    fitting = [one for one in attempts if one.fits] or attempts
    return shape, min(fitting, key=lambda one: one.step)


def machines_of(row: Row) -> Cluster:
    """The cluster of a row."""
    return cluster_of(
        row["gpu"],
        row["network"],
        memory=float(row.get("gpu_mem_gb") or 0),
        node=number(row, "gpus_per_node", 0),
        without=taken_away(row),
    )


def _tried(row: Row, work: Framework, shape: Shape, by: Prices) -> Iterator[Priced]:
    """The prices of a row, of which one that leaves its layout or micro-batch open has several."""
    cluster = machines_of(row)
    layouts = list(_layouts(row))
    if len(layouts) == 1 and row["micro_batch"]:
        yield by(shape, configuration_of(row, work), cluster, work.name)
        return
    told = Missing("not given: tp, pp, dp, micro_batch")
    priced = False
    for layout in layouts:
        for micro in [row["micro_batch"]] if row["micro_batch"] else map(str, MICRO_BATCHES):
            try:
                c = configuration_of({**layout, "micro_batch": micro}, work)
                yield by(shape, c, cluster, work.name)
                priced = True
            except AutoparError:
                continue
    if not priced:
        raise told


def _layouts(row: Row) -> Iterator[Row]:
    """The row with the layouts that it may have.

    They are data and tensor parallelism in a node, with experts on one rank or split by data.
    """
    if row["tp"] and row["dp"] and row["pp"]:
        yield row
        return
    devices = number(row, "gpus", 0)
    node = min(number(row, "gpus_per_node", 8), devices)
    for tensor in (2**n for n in range(node.bit_length())):
        if devices and devices % tensor == 0:
            data = devices // tensor
            zero = {"zero_stage": "2"} if row["zero_stage"] == "auto" else {}
            layout = {**row, **zero, "tp": str(tensor), "pp": "1", "dp": str(data)}
            experts = number(row, "experts", 0) > 1 and not int(row["ep"] or 0) > 1
            for ranks in sorted({1, data if experts else 1}):
                yield {**layout, "ep": str(ranks)} if experts else layout
