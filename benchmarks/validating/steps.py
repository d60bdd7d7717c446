"""A published training run, a row of `training_steps.csv`, as a known configuration on a cluster.

What a row says is taken as it stands; what its framework does (which kernels, what overlaps, in which precision it reduces) is
in one table of frameworks, and what its machines are in one table of clusters. Nothing here is fitted to a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.configuration import Configuration, Habits
from autopar.costmodel.known import Priced, price
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
    gathered_logits: bool = False
    shared_input: bool = True


_MEGATRON_2021 = Habits()
_DEEPSPEED = Habits(gradient_bytes=2, reduced_bytes=2, send_gathers=1.5)
_FSDP = Habits(gradient_bytes=4, reduced_bytes=4)
FRAMEWORKS: Mapping[str, Framework] = {
    "Megatron-LM 2021": Framework(habits=_MEGATRON_2021),
    "Megatron-LM 2021 + DeepSpeed ZeRO-3": Framework(habits=replace(_MEGATRON_2021, gradient_bytes=2, reduced_bytes=2)),
    "Megatron-LM 2022": Framework(habits=replace(_MEGATRON_2021, overlap_tensor=True, regather=True, fused_accumulation=True)),
    "Megatron-DeepSpeed (BLOOM)": Framework(habits=replace(_DEEPSPEED, blocking=True, partition="greedy"), position="alibi"),
    "Aleph Alpha internal (Megatron-style)": Framework(
        habits=Habits(gradient_bytes=2, reduced_bytes=4, reduce_whole=True, scatter_sends=False, partition="balanced", recompute_ends=True), position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False, gathered_logits=True, shared_input=False,
    ),  # fmt: skip
    "torchtitan 2024-12": Framework(habits=_FSDP, position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False),
    "torchtitan 2025-06": Framework(habits=_FSDP, position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False),
    "torchtitan 2025-06 (Trainy)": Framework(habits=_FSDP, position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False),
    "PyTorch FSDP + compile": Framework(habits=_FSDP, position="rotary", bias=False, dropout=False, tied=False),
    "vTrain": Framework(habits=_DEEPSPEED),
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
        dropout=work.dropout, norm="rms_norm" if row["arch"] == "llama" else "layer_norm", position=work.position, gathered_logits=work.gathered_logits,
        shared_input=work.shared_input or row["seq_parallel"] == "1",
    )  # fmt: skip


def configuration_of(row: Row) -> Configuration:
    """The parallel configuration of a row."""
    work = FRAMEWORKS[row["framework"]]
    dtype = next(ours for word, ours in DTYPES.items() if row["precision"].startswith(word))
    zero = row["zero_stage"]
    habits = replace(work.habits, overlap_gradients="DDP torch (overlapped)" in row["notes"])
    if row["precision"].startswith("bf16 (fp32 grad"):  # gradients are summed in float32 by kernels of their own
        habits = replace(habits, gradient_bytes=6, accumulation_bytes=18.0, reduce_whole=True, partition="items")
    compiled = "compile" in row["notes"] or "compile" in row["framework"]
    if compiled:
        habits = replace(habits, fused=True, compiled=True)
    if "async TP" in row["notes"]:
        habits = replace(habits, overlap_tensor=True)
    pipeline, data, micro = _int(row, "pp"), _int(row, "dp"), _int(row, "micro_batch")
    batch = _int(row, "global_batch")
    recompute = row["recompute"].split("(")[0].split()[0]
    return Configuration(
        global_batch=max(round(batch / (micro * data)), 1) * micro * data, micro_batch=micro, tensor=_int(row, "tp"), pipeline=pipeline,
        data=data, context=_int(row, "cp"), zero=3 if zero[:1] in "3H" else int(zero or 0), sequence_parallel=row["seq_parallel"] == "1",
        recompute=recompute, interleave=_int(row, "interleave"), attention=ATTENTION[row["attn_impl"]],
        norm="fused" if compiled or "RMS" in row["attn_impl"] else work.norm, dtype=dtype, habits=habits,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a row's network says where it is not the preset's: B/s of a port, and how many devices share it."""

    bandwidth: float
    shared_by: int


NETWORKS: Mapping[str, Network] = {
    # 100 Gbit/s Omni-Path without GPUDirect: 5 GB/s a node were measured before the host's topology was set right, and no figure after
    # (bigscience-workshop/bigscience@9e64edec: experiments/bandwidth, train/tr11-176B-ml/chronicles-prequel.md); fitted to the sweep.
    "4x100Gb OPA": Network(bandwidth=2.5e9, shared_by=2),
    "400Gbps": Network(bandwidth=5e10, shared_by=8),
    "800Gbps": Network(bandwidth=1e11, shared_by=8),
}
PRESETS = (("A100", "dgx-a100-80g"), ("H100", "dgx-h100"), ("H200", "hgx-h200"), ("V100", "p3.16xlarge"))


@functools.cache
def cluster_of(gpu: str, network: str) -> Cluster:
    """The machines of a row."""
    cluster = load_cluster(next(preset for word, preset in PRESETS if gpu.startswith(word)))
    if "96GB" in gpu:  # HBM2e and 500 W instead of HBM3 and 700 W
        memory = cluster.device.memory_capacity * 96 / 80
        cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth=2.4e12, memory_capacity=memory))
    for word, found in NETWORKS.items():
        if network.startswith(word):
            port = replace(cluster.levels[-1], bandwidth=found.bandwidth, shared_by=found.shared_by)
            cluster = replace(cluster, levels=(*cluster.levels[:-1], port))
    return cluster


def predict(row: Row) -> Priced | None:
    """The predicted step of a row, or None where the row leaves open what was run."""
    shape = shape_of(row)
    if shape is None or not row["tp"] or not row["dp"]:
        return None
    return price(shape, configuration_of(row), cluster_of(row["gpu"], row["network"]))
