"""A published training run, a row of `training_steps.csv`, as a known configuration on a cluster.

A row's own values are taken unchanged; the framework's habits are in the cost model's table,
choices of recipes in `frameworks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.costmodel.collectives.dispatch import SMS
from autopar.costmodel.known.configuration import RECOMPUTE, Configuration
from autopar.costmodel.known.frameworks import Framework
from autopar.costmodel.known.habits import Habits
from autopar.costmodel.known.priced_step import Priced, price
from autopar.costmodel.known.shape import Shape
from autopar.errors import AutoparError

from .frameworks import ATTENTION, framework_of, recipe_of
from .machines import cluster_of
from .missing import Missing
from .sizes import Row, number, shape_of

DTYPES: Mapping[str, str] = {"fp16": "float16", "mixed": "float16"}
NARROW = (
    ("float8", "float8_e4m3fn"),
    ("mxfp8", "float8_block"),
    ("fp8-mx", "float8_block"),
    ("fp8-sc", "float8_block"),
    ("fp8", "float8_e4m3fn"),
    ("amp_fp8", "float8_e4m3fn"),
    ("nvfp4", "float4"),
)
"""The types to which products cast their operands, by the prefix of a row's precision."""
DISPATCHERS: Mapping[str, str] = {"deepep": "node", "hybridep": "node"}
"""Dispatchers of Megatron-Core, by their name there."""
SEQUENCE = ("megatron-core", "NeMo", "Megatron-Bridge", "Megatron-Core")
"""Frameworks that run tensor parallelism with sequence parallelism wherever there is any."""
MICRO_BATCHES = (1, 2, 4, 8)
"""Tried where a row does not say which it ran: the fastest that fits."""


def framework(row: Row) -> Framework:
    """The framework of a row, with the differences that the row states."""
    work = framework_of(row["framework"], compiled=compiled(row), precision=row["precision"])
    given = row["attn_impl"]
    if given and given != "flash" and given not in ATTENTION:
        raise Missing(f"attn_impl not described: {given}")
    kernels = work.kernels
    if given in ATTENTION:
        kernels = replace(kernels, attention=ATTENTION[given])
    if "RMS" in given:
        kernels = replace(kernels, norm="fused")
    narrow = next((ours for word, ours in NARROW if row["precision"].lower().startswith(word)), "")
    habits = _chosen(_habits(row, work.habits), row)
    if narrow == "float8_e4m3fn" and "torchtitan" in row["framework"]:
        # Parameters are gathered in 8 bits, but not by rows. Kept values are the same: a product of
        # narrow tensors is a torch.mm, too.
        habits = replace(habits, gathered_bytes=None if "rowwise" in row["precision"] else 1.0)
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
        habits = replace(
            habits, gradient_bytes=6, accumulation_bytes=18.0, reduce_whole=True, partition="items"
        )
    if "async TP" in row["notes"]:
        habits = replace(habits, pipelined_tensor=True)
    if "overlap-grad-reduce" in row["notes"]:
        habits = replace(habits, overlap_gradients=True, overlap_gather=True, pipelined_tensor=True)
    if row["framework"].startswith("PyTorch FSDP") and row["hfu_pct"]:
        # The share of recomputed layers is not published; model and hardware FLOP/s differ by a
        # third of it.
        share = 3 * (float(row["hfu_pct"]) / float(row["mfu_pct"]) - 1)
        habits = replace(habits, recomputed=min(max(share, 0.0), 1.0))
    return habits


def _chosen(habits: Habits, row: Row) -> Habits:
    """The habits with the choices of a run's recipe."""
    name = row["framework"]
    if name.startswith("NeMo"):
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
            offloaded=choices.get("offloaded_layers", 0) / number(row, "layers", 80),
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
    cell = row["zero_stage"]
    if cell[:1] in ("3", "H") or cell == "FSDP":
        return 3
    if cell[:1] in ("0", "1", "2"):
        return int(cell[:1])
    if row["framework"].startswith(SEQUENCE):
        return 3 if recipe(row).get("fsdp") else 1
    if cell:
        raise Missing(f"zero_stage not described: {cell}")
    return 0


def _recompute(row: Row, work: Framework) -> str:
    word = (row["recompute"].split("(")[0].split() or ["none"])[0]
    if word not in RECOMPUTE:
        raise Missing(f"recompute not described: {row['recompute']}")
    if row["framework"].startswith("PyTorch FSDP") and word == "selective":
        return "full"  # of a share of the layers
    if word == "none" and recipe(row).get("recompute"):
        return "selective"
    return word


def configuration_of(row: Row, work: Framework) -> Configuration:
    """The parallel configuration of a row."""
    missing = [name for name in ("global_batch", "tp", "pp", "dp") if not row[name]]
    if missing:
        raise Missing(f"not given: {', '.join(missing)}")
    data = number(row, "dp")
    micro = number(row, "micro_batch")
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
        expert_tensor=1 if row["framework"].startswith("Megatron-Bridge") else 0,
        dispatcher=DISPATCHERS.get(choices.get("dispatcher", ""), "alltoall"),
        # The recipes of this project's performance tests give HybridEP more (perf_recipes).
        dispatcher_sms=32 if choices.get("dispatcher") == "hybridep" else SMS,
        overlap_experts=bool(choices.get("overlap_experts")),
        zero=_zero(row),
        interleave=number(row, "interleave"),
        recompute=_recompute(row, work),
        recompute_modules=tuple(choices.get("recompute", ())),
        sequence_parallel=row["seq_parallel"] == "1"
        or (tensor > 1 and row["framework"].startswith(SEQUENCE)),
        dtype=next(
            (ours for word, ours in DTYPES.items() if row["precision"].startswith(word)), "bfloat16"
        ),
    )
    return work.run(c)


def predict(row: Row) -> tuple[Shape, Priced]:
    """The model of a row and its predicted step.

    Raises `Missing` if the row does not define its run.
    """
    work = framework(row)
    shape = shape_of(row, work)
    cluster = cluster_of(row["gpu"], row["network"])
    if row["micro_batch"]:
        return shape, price(shape, configuration_of(row, work), cluster)
    attempts = list(_tried(row, work, shape))
    fitting = [one for one in attempts if one.fits] or attempts
    if not fitting:
        raise Missing("not given: micro_batch")
    return shape, min(fitting, key=lambda one: one.step)


def _tried(row: Row, work: Framework, shape: Shape) -> Iterator[Priced]:
    """The prices of a row that leaves its micro-batch open."""
    for micro in MICRO_BATCHES:
        try:
            yield price(
                shape,
                configuration_of({**row, "micro_batch": str(micro)}, work),
                cluster_of(row["gpu"], row["network"]),
            )
        except AutoparError:
            continue
