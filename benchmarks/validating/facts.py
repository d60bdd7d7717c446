"""The facts of a row of `training_steps.csv`: which it states, which are open, and their range.

Every column is used or named here as one that is not. A word that is not known is an error. A fact
that is open has a default, and others that are as possible: the range of a row lies between the
fastest and the slowest of them, one fact changed at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.costmodel.device.device import TF32

from .frameworks import NEUTRAL, described
from .missing import Missing
from .networks import network_of, runs_alone
from .sizes import Row, number

USED = (
    "group",
    "framework",
    "model",
    "arch",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "gated_mlp",
    "vocab",
    "seq_len",
    "experts",
    "topk",
    "params_b",
    "gpu",
    "gpu_mem_gb",
    "gpus",
    "gpus_per_node",
    "network",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "zero_stage",
    "seq_parallel",
    "recompute",
    "attn_impl",
    "micro_batch",
    "global_batch",
    "interleave",
    "precision",
    "notes",
)
"""Columns that a price follows from."""
MEASURED = (
    "step_time_s",
    "step_time_derived_s",
    "tflops_per_gpu",
    "tflops_kind",
    "mfu_pct",
    "hfu_pct",
    "peak_mem_gib",
    "outcome",
)
"""Columns with which it is compared (`mfu_pct`, `hfu_pct`: of FSDP's runs, whose share of
recomputed layers follows from their ratio).
"""
NOT_USED: Mapping[str, str] = {
    "id": "a name",
    "source": "a name",
    "seen": "says how the row was read",
    "unseen_fields": "says how the row was read",
    "reliability": "says how the row was read",
    "tokens_per_s_per_gpu": "the step is derived from it",
    "samples_per_s": "the step is derived from it",
    "derived_from": "says how the step was derived",
}
"""Other columns, each with the reason."""

PRECISIONS: Mapping[str, tuple[str, str]] = {
    "bf16": ("bfloat16", ""),
    "bfloat16": ("bfloat16", ""),
    "amp_bf16": ("bfloat16", ""),
    "fp16": ("float16", ""),
    "float16": ("float16", ""),
    "amp_fp16": ("float16", ""),
    "amp": ("float16", ""),
    "mixed": ("float16", ""),
    "fp32": ("float32", ""),
    "float32": ("float32", ""),
    "tf32": ("float32", TF32),
    "fp8": ("bfloat16", "float8_e4m3fn"),
    "float8": ("bfloat16", "float8_e4m3fn"),
    "amp_fp8": ("bfloat16", "float8_e4m3fn"),
    "fp8-cs": ("bfloat16", "float8_e4m3fn"),
    "fp8-ds": ("bfloat16", "float8_e4m3fn"),
    "fp8-mx": ("bfloat16", "float8_block"),
    "fp8-sc": ("bfloat16", "float8_block"),
    "fp8-block": ("bfloat16", "float8_block"),
    "mxfp8": ("bfloat16", "float8_block"),
    "nvfp4": ("bfloat16", "float4"),
    "": ("bfloat16", ""),
}
"""By the first word of a row's precision: the type of values, and that to which products cast their
operands.
"""
HINTS = (
    "tensorwise",
    "rowwise",
    "mixed",
    "per-tensor",
    "current",
    "delayed",
    "hybrid",
    "e4m3",
    "blockwise",
)
"""Further words that say how a precision is used."""
RECIPES = ("Megatron-Bridge", "NeMo")
"""Frameworks whose recipes say what their rows leave open."""
RACKS: Mapping[str, int] = {"GB200": 72, "GB300": 72}
"""Devices that NVLink joins over several hosts (NVL72)."""
STAGES_IN_CHUNKS = (1, 2, 4)
"""Chunks of a stage that are possible where a row with stages does not say."""


def precision_of(row: Row) -> tuple[str, str]:
    """The type of values and that of operands of products, which a row's precision names."""
    text = row["precision"].partition("(")[0].strip()
    word, *rest = text.replace("_mixed", " mixed").split() or [""]
    word = word.removesuffix("-mixed").removesuffix(",")
    known = PRECISIONS.get(word.lower())
    if known is None or any(hint.strip("+,") not in HINTS for hint in rest):
        raise Missing(f"precision not described: {row['precision']}")
    return known


def spans_nodes(row: Row) -> bool:
    """Whether a run has more devices than one switch inside a node or a rack joins."""
    racks = (size for word, size in RACKS.items() if row["gpu"].startswith(word))
    inside = next(racks, number(row, "gpus_per_node", 8))
    return number(row, "gpus") > inside and not runs_alone(row["network"])


def open_facts(row: Row) -> Iterator[str]:
    """The facts that a row leaves open, and that its price depends on."""
    if described(row["framework"]) == NEUTRAL:
        yield "framework"
    if spans_nodes(row):
        network = network_of(row["network"], number(row, "gpus_per_node", 8))
        if network is None or not network.stated:
            yield "network"
    if not row["precision"]:
        yield "precision"
    if not row["micro_batch"]:
        yield "micro-batch"
    if sum(not row[degree] for degree in ("tp", "pp", "dp")) > 1:
        yield "layout"
    own = described(row["framework"]) == "llama-3"
    if number(row, "pp") > 1 and not row["interleave"] and not own:
        yield "interleave"
    if not row["recompute"] and not row["framework"].startswith(RECIPES):
        yield "recompute"
