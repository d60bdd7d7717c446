"""A published training run, a row of `training_steps.csv`, as a known configuration on a cluster.

What a row says is taken as it stands; what its framework does is in `frameworks`, and what its machines are in one table of networks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.known.configuration import Configuration, Habits
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.step import Priced, price

from .frameworks import ATTENTION, FRAMEWORKS

Row = Mapping[str, str]
DTYPES: Mapping[str, str] = {"fp16": "float16", "mixed": "float16", "bf16": "bfloat16", "float8": "bfloat16"}


def _int(row: Row, name: str, default: int = 1) -> int:
    return int(float(row[name])) if row.get(name) else default


def shape_of(row: Row) -> Shape | None:
    """The model of a row, or None where its sizes are not given."""
    if not all(row[name] for name in ("layers", "hidden", "vocab")):
        return None
    work, hidden, experts = FRAMEWORKS[row["framework"]], _int(row, "hidden"), _int(row, "experts", 0)
    heads = _int(row, "heads", next(heads for heads in (96, 64, 32, 1) if hidden % heads == 0))  # where not given
    return Shape(
        layers=_int(row, "layers"), hidden=hidden, heads=heads, kv_heads=_int(row, "kv_heads", heads), vocab=_int(row, "vocab"),
        # Alpa's layers of experts (every second one) and the dense ones between are eight times as wide as the hidden dim.
        ffn=_int(row, "ffn", 8 * hidden if experts else 4 * hidden), sequence=_int(row, "seq_len"), gated=row["gated_mlp"] == "1",
        experts=experts, expert_every=2, top_k=_int(row, "topk", 2), tied=work.tied, bias=work.bias, dropout=work.dropout,
        norm="rms_norm" if row["arch"] == "llama" else "layer_norm", position=work.position, gathered_logits=work.gathered_logits,
        shared_input=work.shared_input or row["seq_parallel"] == "1",
    )  # fmt: skip


def _habits(row: Row) -> Habits:
    """What the framework does, as far as a row says that it did otherwise."""
    habits = FRAMEWORKS[row["framework"]].habits
    habits = replace(habits, overlap_gradients=habits.overlap_gradients or "DDP torch (overlapped)" in row["notes"])
    if row["precision"].startswith("bf16 (fp32 grad"):  # a float32 buffer, to which kernels of their own add 16-bit gradients
        habits = replace(habits, gradient_bytes=6, accumulation_bytes=18.0, reduce_whole=True, partition="items")
    if _compiled(row):
        habits = replace(habits, fused=True, compiled=True)
    if "async TP" in row["notes"]:
        habits = replace(habits, overlap_tensor=True)
    if row["framework"].startswith("PyTorch FSDP") and row["hfu_pct"]:
        # The share of layers that are recomputed is not published; model and hardware FLOP/s differ by a third of it.
        share = 3 * (float(row["hfu_pct"]) / float(row["mfu_pct"]) - 1)
        habits = replace(habits, recomputed=min(max(share, 0.0), 1.0))
    return habits


def _compiled(row: Row) -> bool:
    return "compile" in row["notes"] or "compile" in row["framework"] or "Parax" in row["framework"]


def configuration_of(row: Row) -> Configuration:
    """The parallel configuration of a row."""
    work, compiled = FRAMEWORKS[row["framework"]], _compiled(row)
    data, micro, zero = _int(row, "dp"), _int(row, "micro_batch"), row["zero_stage"]
    recompute = (row["recompute"].split("(")[0].split() or ["none"])[0]
    if row["framework"].startswith("PyTorch FSDP") and recompute == "selective":
        recompute = "full"  # of a share of the layers
    return Configuration(
        global_batch=max(round(_int(row, "global_batch") / (micro * data)), 1) * micro * data, micro_batch=micro, tensor=_int(row, "tp"),
        pipeline=_int(row, "pp"), data=data, context=_int(row, "cp"), zero=3 if zero[:1] in ("3", "H") else int(zero or 0),
        sequence_parallel=row["seq_parallel"] == "1", recompute=recompute, interleave=_int(row, "interleave"),
        attention=ATTENTION[row["attn_impl"]], norm="fused" if compiled or "RMS" in row["attn_impl"] else work.norm,
        products="float8_e4m3fn" if row["precision"].startswith("float8") else "", habits=_habits(row),
        dtype=next(ours for word, ours in DTYPES.items() if row["precision"].startswith(word)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a row's network says where it is not the preset's: B/s of a port, and how many devices share it."""

    bandwidth: float
    shared_by: int


NETWORKS: Mapping[str, Network] = {
    # 100 Gbit/s Omni-Path without GPUDirect: 5 GB/s a node were measured before the host's topology was set right, and no figure after
    # (bigscience-workshop/bigscience@9e64edec: experiments/bandwidth, train/tr11-176B-ml/chronicles-prequel.md); fitted to the sweep.
    "4x100Gb OPA": Network(bandwidth=2.2e9, shared_by=2),
    "400Gbps": Network(bandwidth=5e10, shared_by=8),
    "800Gbps": Network(bandwidth=1e11, shared_by=8),
}
PRESETS = (("A100", "dgx-a100-80g"), ("H100", "dgx-h100"), ("H200", "hgx-h200"), ("V100", "p3.16xlarge"))


@functools.cache
def cluster_of(gpu: str, network: str) -> Cluster:
    """The machines of a row."""
    cluster = load_cluster(next(preset for word, preset in PRESETS if gpu.startswith(word)))
    device = cluster.device
    if "96GB" in gpu:  # HBM2e instead of HBM3, and 500 W of 700 W
        device = replace(device, memory_bandwidth=2.4e12, memory_capacity=device.memory_capacity * 96 / 80)
    if "V100" in gpu and "32GB" in gpu:
        device = replace(device, memory_capacity=device.memory_capacity * 2)
    cluster = replace(cluster, device=device)
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
