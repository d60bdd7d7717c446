"""What the frameworks of published runs execute, as read in their sources: facts of programs, none fitted to a row.

Sources: NVIDIA/Megatron-LM (2104.04473, 2205.05198); bigscience-workshop/Megatron-DeepSpeed@87a9dba0 and microsoft/DeepSpeed@2e1847d6
(pipe/engine.py, zero/stage_1_and_2.py, bf16_optimizer.py); bigscience-workshop/bigscience@9e64edec (train/tr11-176B-ml);
Aleph-Alpha/scaling@78489292 (later than the sweep of 2311.05610); pytorch/torchtitan@9dec370a; foundation-model-stack/fms-fsdp@5a296afe;
alpa-projects/alpa.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.known.configuration import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """`habits` of a framework, and what its models have; `compiled`: a compiler fuses norms and positions too."""

    habits: Habits
    position: str = "learned"
    norm: str = "fused"
    bias: bool = True
    dropout: bool = True
    tied: bool = True
    gathered_logits: bool = False
    shared_input: bool = True


# The fuser of the time leaves dropout, and so the chain of bias, dropout and residual, to kernels of their own.
_MEGATRON = Habits()
# Messages in shares, gathered once forward and twice backward; gradients are summed and reduced in 16 bits.
_DEEPSPEED = Habits(gradient_bytes=2, reduced_bytes=2, send_gathers=1.5)
# Parameters and states in float32 shards, gathered in 16 bits, gradients scattered in float32.
_FSDP = Habits(gradient_bytes=4, reduced_bytes=4, state_bytes=10)
_TITAN = Framework(
    # Of the products every second is kept (wq, wv, w1, w2), and attention.
    habits=replace(_FSDP, kept=(".query", ".core", ".mlp.gate", ".mlp.down")),
    position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False,
)  # fmt: skip
_ALPA = Framework(habits=Habits(fused=True, compiled=True, gradient_bytes=2, reduced_bytes=2), dropout=False, tied=False)

FRAMEWORKS: Mapping[str, Framework] = {
    "Megatron-LM 2021": Framework(habits=_MEGATRON),
    # Each parameter is gathered by itself into a fresh buffer; 16 to 18 GB/s is what the six published runs come to, whatever their size.
    "Megatron-LM 2021 + DeepSpeed ZeRO-3": Framework(habits=replace(_MEGATRON, reduced_bytes=2, gather_rate=1.7e10)),
    "Megatron-LM 2022": Framework(habits=replace(_MEGATRON, overlap_tensor=True, regather=True, fused_accumulation=True)),
    # CUDA_LAUNCH_BLOCKING=1 kept 384 devices from hanging; layers are dealt out greedily.
    "Megatron-DeepSpeed (BLOOM)": Framework(habits=replace(_DEEPSPEED, blocking=True, partition="greedy"), position="alibi"),
    # Five all-reduces a layer (gate and up have one each backward), the loss on gathered logits, messages whole from every rank, gradients
    # reduced whole in float32 although the optimizer is sharded, embedding and head recomputed with the layers.
    "Aleph Alpha internal (Megatron-style)": Framework(
        habits=Habits(
            gradient_bytes=2, reduced_bytes=4, reduce_whole=True, scatter_sends=False, partition="balanced", recompute_ends=True
        ),
        position="rotary-unfused", norm="unfused", bias=False, dropout=False, tied=False, gathered_logits=True, shared_input=False,
    ),
    "torchtitan 2024-12": _TITAN,
    "torchtitan 2025-06": _TITAN,
    "torchtitan 2025-06 (Trainy)": _TITAN,
    "PyTorch FSDP + compile": Framework(
        habits=replace(_FSDP, gradient_bytes=2, reduced_bytes=2), position="rotary", bias=False, dropout=False, tied=False
    ),
    "Parax(Alpa) data_parallel": _ALPA,
    "Parax(Alpa) zero_2": _ALPA,
    "vTrain": Framework(habits=_DEEPSPEED),
}  # fmt: skip

# Kernels of attention, by the word that a row uses.
ATTENTION: Mapping[str, str] = {
    "unfused": "fused",  # scale, mask and softmax in Megatron's one kernel; XLA fuses them as well
    "fused": "fused",
    "torch": "unfused",
    "flash_attentionv1.0.8": "flash1",
    "flash_attention2": "flash2",
    "flash_attention2 + RMS kernel": "flash2",
    "SDPA/flash": "flash2",
    "SDPA flash2": "flash2",
}
