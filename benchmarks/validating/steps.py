"""A published training run, a row of `training_steps.csv`, as a known configuration on a cluster.

What a row says is taken as it stands; what its framework does (which kernels, what overlaps, in which precision it reduces) is
in one table of frameworks, and what its machines are in one table of clusters. Nothing here is fitted to a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.known import Configuration, Habits, Priced, price
from autopar.costmodel.transformer import Shape

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """`habits` of a framework, its norm and position kernels, and what else its models have."""

    habits: Habits
    position: str = "learned"
    norm: str = "fused"
    bias: bool = True
    dropout: bool = True
    tied: bool = True


_MEGATRON_2021 = Habits(gradient_bytes=4)
_FSDP = Habits(fused=True, gradient_bytes=2)
FRAMEWORKS: Mapping[str, Framework] = {
    "Megatron-LM 2021": Framework(habits=_MEGATRON_2021),
    "Megatron-LM 2021 + DeepSpeed ZeRO-3": Framework(habits=replace(_MEGATRON_2021, gradient_bytes=2)),
    "Megatron-LM 2022": Framework(habits=replace(_MEGATRON_2021, overlap_tensor=True, regather=True, fused_accumulation=True)),
    "Megatron-DeepSpeed (BLOOM)": Framework(habits=replace(_MEGATRON_2021, gradient_bytes=2), dropout=False),
    "Aleph Alpha internal (Megatron-style)": Framework(
        habits=Habits(fused=False, gradient_bytes=4), position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False
    ),
    "torchtitan 2024-12": Framework(habits=_FSDP, position="rotary-unfused", bias=False, dropout=False, tied=False),
    "torchtitan 2025-06": Framework(habits=_FSDP, position="rotary-unfused", bias=False, dropout=False, tied=False),
    "torchtitan 2025-06 (Trainy)": Framework(habits=_FSDP, position="rotary-unfused", bias=False, dropout=False, tied=False),
    "PyTorch FSDP + compile": Framework(habits=_FSDP, position="rotary", bias=False, dropout=False, tied=False),
    "vTrain": Framework(habits=replace(_MEGATRON_2021, gradient_bytes=2)),
}
ATTENTION: Mapping[str, str] = {
    "unfused": "fused",  # Megatron's own softmax kernel
    "fused": "fused",
    "torch": "unfused",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
    "flash_attention2 + RMS kernel": "flash2",
    "SDPA/flash": "flash2",
    "SDPA flash2": "flash2",
}
DTYPES: Mapping[str, str] = {"fp16": "float16", "mixed": "float16", "bf16": "bfloat16", "float8": "bfloat16"}


def _int(row: Row, name: str, default: int = 1) -> int:
    return int(float(row[name])) if row.get(name) else default


def shape_of(row: Row) -> Shape | None:
    """The model of a row, or None where its sizes are not given."""
    if not all(row[name] for name in ("layers", "hidden", "vocab")):
        return None
    work = FRAMEWORKS[row["framework"]]
    hidden = _int(row, "hidden")
    heads = _int(row, "heads", next(heads for heads in (96, 64, 32, 1) if hidden % heads == 0))  # where not given
    return Shape(
        layers=_int(row, "layers"), hidden=hidden, heads=heads, kv_heads=_int(row, "kv_heads", heads), ffn=_int(row, "ffn", 4 * hidden),
        vocab=_int(row, "vocab"), sequence=_int(row, "seq_len"), gated=row["gated_mlp"] == "1", tied=work.tied, bias=work.bias,
        dropout=work.dropout, norm="rms_norm" if row["arch"] == "llama" else "layer_norm", position=work.position,
    )  # fmt: skip


def configuration_of(row: Row) -> Configuration:
    """The parallel configuration of a row."""
    work = FRAMEWORKS[row["framework"]]
    dtype = next(ours for word, ours in DTYPES.items() if row["precision"].startswith(word))
    zero = row["zero_stage"]
    habits = replace(work.habits, overlap_gradients="DDP torch (overlapped)" in row["notes"])
    if "eager" in row["notes"]:
        habits = replace(habits, fused=False)
    if "async TP" in row["notes"]:
        habits = replace(habits, overlap_tensor=True)
    pipeline, data, micro = _int(row, "pp"), _int(row, "dp"), _int(row, "micro_batch")
    batch = _int(row, "global_batch")
    recompute = row["recompute"].split("(")[0].split()[0]
    return Configuration(
        global_batch=max(round(batch / (micro * data)), 1) * micro * data, micro_batch=micro, tensor=_int(row, "tp"), pipeline=pipeline,
        data=data, context=_int(row, "cp"), zero=3 if zero[:1] in "3H" else int(zero or 0), sequence_parallel=row["seq_parallel"] == "1",
        recompute=recompute, interleave=_int(row, "interleave"), attention=ATTENTION[row["attn_impl"]],
        norm="fused" if "RMS" in row["attn_impl"] else work.norm, dtype=dtype, habits=habits,
    )  # fmt: skip


@functools.cache
def cluster_of(gpu: str, network: str) -> Cluster:
    """The machines of a row."""
    name = "dgx-a100-80g" if gpu.startswith("A100") else "dgx-h100" if gpu.startswith("H100") else "hgx-h200" if gpu.startswith("H200") else "p3.16xlarge"
    return load_cluster(name)


def predict(row: Row) -> Priced | None:
    """The predicted step of a row, or None where the row leaves open what was run."""
    shape = shape_of(row)
    if shape is None or not row["tp"] or not row["dp"]:
        return None
    return price(shape, configuration_of(row), cluster_of(row["gpu"], row["network"]))
