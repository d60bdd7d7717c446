"""The habits of training frameworks, read in their sources; one rate alone was read off runs.

They are kernels, fusions, overlaps and precision.

Sources: NVIDIA/Megatron-LM (arXiv:2104.04473, arXiv:2205.05198; megatron/core of 2024 to 2026:
@d98e8a64); NVIDIA/TransformerEngine; bigscience-workshop/Megatron-DeepSpeed@87a9dba0 and
microsoft/DeepSpeed@2e1847d6 (pipe/engine.py, zero/stage_1_and_2.py, bf16_optimizer.py);
bigscience-workshop/bigscience@9e64edec (train/tr11-176B-ml); Aleph-Alpha/scaling@78489292 (later
than the sweep of arXiv:2311.05610); pytorch/torchtitan@9dec370a;
foundation-model-stack/fms-fsdp@5a296afe; mosaicml/llm-foundry@b2a43a14 and composer@0.17;
NVIDIA/NeMo@e400b6de with NeMo-Framework-Launcher@24.07; NVIDIA-NeMo/Megatron-Bridge@067f987d;
alpa-projects/alpa; deepspeedai/DeepSpeed@edaa7221 (runtime/zero/config.py, ops/adam/fused_adam.py);
huggingface/nanotron@2411b022 (models/llama.py, parallel/tensor_parallel/functional.py,
optim/gradient_accumulator.py); Oneflow-Inc/libai@9dcbe3b2 (layers/, models/utils/graph_base.py);
Dazz993/Mist@d69e530a (mist/model/gpt.py, mist/modules/losses.py, mist/analyzer/strategy.py);
pytorch/torchtitan@a96fb82e, @9dec370a, @6b11290c and @e51a77d2 (of June 2024 to March 2026);
AI-Hypercomputer/maxtext@000e9355 (MaxText/configs/base.yml); NVIDIA-NeMo/Automodel@013d1137
(components/distributed/config.py); yanring/Megatron-MoE-ModelZoo@31942f09 (model_configs,
runtime_configs); of Llama 3 what arXiv:2407.21783 says (section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import UsageError, unknown

from .framework import AUTOPAR, OWN, Framework
from .habits import Habits
from .kernels import Kernels

# The fuser of 2021 leaves dropout, and so the chain of bias, dropout and residual, to kernels of
# their own.
_MEGATRON_2021 = Framework(
    habits=Habits(loss="megatron"), kernels=Kernels(attention="fused", skips_masked=True)
)
_MEGATRON_2022 = _MEGATRON_2021.but(overlap_tensor=True, regather=True, fused_accumulation=True)
# Transformer Engine's layers: norms, gate and product, bias, dropout and residual, and rotary
# positions are one kernel each; gate and up are one product, attention is cuDNN's, messages of
# context parallelism run under it. An update reads the norm's gradients (4), gradient, master and
# moments (16), writes the latter (12), reads the master and writes the parameter (6), and zeroes
# gradients (4). Last biases of experts: megatron/core/transformer/moe/experts.py (_apply_bias).
# Norms and latent projections that are recomputed: megatron/core/tensor_parallel/random.py
# (CheckpointWithoutOutput).
_MEGATRON_CORE = Framework(
    habits=Habits(
        overlap_tensor=True,
        regather=True,
        fused_accumulation=True,
        fused=True,
        loss="megatron",
        update_traffic=42.0,
        discards_outputs=True,
    ),
    kernels=Kernels(attention="cudnn", joined=True, biases_apart=True),
)
# Gradients are summed in 16 bits where the scripts say so, and reduced and gathered under the
# passes. A master holds only the 16 bits that its parameter lacks. 24.03 fuses neither the
# activation nor the residual.
_NEMO = _MEGATRON_CORE.but(
    overlap_gradients=True,
    overlap_gather=True,
    overlap_chunk_sends=True,
    state_bytes=10,
    gradient_bytes=2,
    reduced_bytes=2,
)
# Gradients are summed and reduced in 16 bits, the loss is one kernel on 16-bit logits.
_BRIDGE = _NEMO.but(state_bytes=12, loss="in-place")
# Gradients are summed and reduced in 16 bits.
_DEEPSPEED = Framework(
    habits=Habits(gradient_bytes=2, reduced_bytes=2, loss="megatron"),
    kernels=Kernels(attention="fused", skips_masked=True),
)
# Parameters and states in float32 shards, gathered in 16 bits, gradients scattered in float32.
_FSDP = Habits()
_FSDP_NARROW = Habits(reduced_bytes=2)
# Every second product is saved (wq, wv, w1, w2), and so is attention, whose keys and values are
# copied for every head. The optimizer of 2024 is a chain of kernels over all parameters (foreach):
# it reads and writes 22 tensors of four bytes. With stages nothing is resharded behind a pass, and
# gradients are reduced behind the last one (parallelize_llama.py; torch's pipelining/stage.py).
_TITAN = Framework(
    habits=replace(_FSDP, saves_outputs=True, update_traffic=88.0, whole_stages=True),
    kernels=Kernels(norm="unfused", repeats_keys=True),
    one_rotation=False,
)
# A compiler fuses the chains and norms of each layer, and runs ahead of the device; complex
# positions stay as they are. The loss was left out of it in December 2024 (train.py: CUDA errors).
_COMPILED = replace(_TITAN.but(fused=True, compiled=True), kernels=Kernels(repeats_keys=True))
# Composer's optimizer is a loop of float32 kernels over flat shards. Attention is written in
# Triton, the default of the scripts of the time. Training metrics are on by default: a cross
# entropy and a perplexity, each of all logits (composer/trainer/trainer.py, _eval_train_metrics;
# llmfoundry/models/mpt/modeling_mpt.py).
_COMPOSER = Framework(
    habits=replace(_FSDP, loss="one-kernel, two metrics", update_traffic=84.0),
    kernels=Kernels(attention="triton"),
)
# Gradients are reduced in 16 bits (mixed precision PURE).
_COMPOSER_NARROW = replace(
    _COMPOSER, habits=replace(_FSDP_NARROW, loss="one-kernel, two metrics", update_traffic=84.0)
)

# Parameters, gradients and their reduction in 16 bits over float32 shards of master and moments,
# updated by one kernel; the model is whatever the user gives, in eager mode. Reductions run under
# the backward pass by default with ZeRO-3 alone.
_ZERO = Habits(gradient_bytes=2, reduced_bytes=2, state_bytes=12, update_traffic=34.0)
# Queries, keys and values are one product, as are gate and up; norms and positions are kernels of
# their own, the gate is not fused. Gradients are added to a float32 buffer micro-batch by
# micro-batch and reduced in it under the last backward pass.
_NANOTRON = Framework(
    habits=Habits(regather=True, overlap_gradients=True, loss="megatron", update_traffic=34.0),
    kernels=Kernels(joined=True),
)
# A graph that is compiled: biases, activations and dropout, scale, mask and softmax, and updates
# are fused, and collectives take turns with computation on one stream. Parameters are stored in
# float32, cast where they are used.
_LIBAI = Framework(
    habits=Habits(fused=True, compiled=True, loss="one-kernel", update_traffic=28.0),
    kernels=Kernels(attention="fused"),
)
# From 2026 norms are torch's kernel without a compiler, too, and attention reads keys and values of
# groups of heads as they are.
_TITAN_2026 = replace(_TITAN.but(update_traffic=28.0), kernels=Kernels())
_COMPILED_2025 = _COMPILED.but(update_traffic=28.0, loss="compiled")
# Stored in float32 shards and cast where they are used; a compiler fuses all between products,
# gathers ahead and reduces behind. Gradients of cast parameters are reduced in 16 bits.
_MAXTEXT = Framework(
    habits=Habits(
        fused=True,
        compiled=True,
        loss="compiled",
        gradient_bytes=4,
        reduced_bytes=2,
        update_traffic=28.0,
        overlap_gradients=True,
        overlap_gather=True,
    ),
    kernels=Kernels(attention="cudnn"),
)
# FSDP2 of torch around layers of Transformer Engine, in eager mode.
_AUTOMODEL = Framework(
    habits=replace(_FSDP, whole_stages=True, loss="torch", update_traffic=28.0),
    kernels=Kernels(attention="cudnn"),
)
# Megatron-Core's layers, gradients summed and reduced in float32 by its default, the loss fused by
# torch's compiler.
_MOE_ZOO = _MEGATRON_CORE.but(
    overlap_gradients=True, overlap_gather=True, overlap_chunk_sends=True, loss="megatron-fused"
)
# FSDP does not reshard between the passes, gradients are summed and reduced in float32, messages
# between stages are asynchronous, embedding and head count as layers of the first and last stage.
_LLAMA_3 = Framework(
    habits=replace(
        _FSDP, whole_stages=True, overlap_sends=True, fused=True, partition="items", loss="torch"
    )
)
# The habits of most frameworks read here, each of fifteen families with one vote, for those of
# which nothing was read: all of them are defaults of `Habits`. About a half leave chains between
# products to kernels of their own, two run tensor-parallel messages under products, and torch's
# cross entropy is the most frequent one. But those of recent years reduce and gather under the
# passes, and run the newest kernel of attention that their device has.
_NEUTRAL = Framework(
    habits=Habits(overlap_gradients=True, overlap_gather=True), kernels=Kernels(attention="cudnn")
)

_BY_NAME: Mapping[str, Framework] = {
    "megatron-2021": _MEGATRON_2021,
    # Each parameter is gathered by itself into a fresh buffer; 16 to 18 GB/s is what the six
    # published runs come to, whatever their size.
    "megatron-2021 zero-3": _MEGATRON_2021.but(reduced_bytes=2, gather_rate=1.7e10),
    "megatron-2022": _MEGATRON_2022,
    "megatron-core": _MEGATRON_CORE,
    # With --overlap-grad-reduce and --overlap-param-gather, as files of plans have it.
    "megatron-core overlapped": _MEGATRON_CORE.but(
        overlap_gradients=True, overlap_gather=True, overlap_chunk_sends=True
    ),
    "nemo-2024.03": _NEMO.but(fused=False),
    "nemo-2024.07": _NEMO,
    "megatron-bridge": _BRIDGE,
    "megatron-deepspeed": _DEEPSPEED,
    # CUDA_LAUNCH_BLOCKING=1 kept 384 devices from hanging; layers are dealt out greedily.
    "megatron-deepspeed bloom": _DEEPSPEED.but(blocking=True, partition="greedy"),
    # Five all-reduces a layer (gate and up have one each backward), the loss on gathered logits,
    # messages whole from every rank.
    "scaling": Framework(
        habits=Habits(gradient_bytes=2, reduced_bytes=4, scatter_sends=False, partition="balanced"),
        kernels=Kernels(norm="unfused"),
        one_rotation=False,
        gathered_logits=True,
        shared_input=False,
    ),
    "torchtitan-2024.12": _TITAN,
    "torchtitan-2024.12 compiled": _COMPILED,
    "torchtitan-2025.06": _TITAN.but(update_traffic=28.0),
    "torchtitan-2025.06 compiled": _COMPILED_2025,
    "torchtitan-2026.03": _TITAN_2026,
    "torchtitan-2026.03 compiled": replace(_COMPILED_2025, kernels=Kernels()),
    "maxtext": _MAXTEXT,
    "automodel": _AUTOMODEL,
    "moe zoo": _MOE_ZOO,
    "llama-3": _LLAMA_3,
    "neutral": _NEUTRAL,
    "fms-fsdp": Framework(
        habits=replace(_FSDP_NARROW, gradient_bytes=2, fused=True, compiled=True, loss="compiled")
    ),
    "llm-foundry-2023.05": _COMPOSER_NARROW,
    "llm-foundry-2023.10": _COMPOSER,
    # The sweep from 128 devices on installs FlashAttention 2.4.2 (scripts/train/benchmarking,
    # @5e85bd62).
    "llm-foundry-2024.01": replace(_COMPOSER, kernels=Kernels(attention="flash2")),
    "deepspeed zero-1": Framework(habits=_ZERO),
    "deepspeed zero-3": Framework(habits=replace(_ZERO, overlap_gradients=True)),
    "nanotron": _NANOTRON,
    "libai": _LIBAI,
    OWN: AUTOPAR,
    # Stages of their own, states sharded and in part in host memory, layers with flash attention or
    # one kernel for the softmax.
    "mist": Framework(
        habits=Habits(
            fused=True,
            gradient_bytes=2,
            reduced_bytes=2,
            loss="megatron-narrow",
            overlap_sends=True,
        ),
        kernels=Kernels(attention="fused", skips_masked=True),
    ),
    "alpa": Framework(
        habits=Habits(
            fused=True, compiled=True, gradient_bytes=2, reduced_bytes=2, loss="compiled"
        ),
        kernels=Kernels(attention="fused"),
    ),
}
FRAMEWORKS: Mapping[str, Framework] = {
    name: replace(framework, name=name) for name, framework in _BY_NAME.items()
}
"""Frameworks by name, with the year of the source read if the framework changed."""


LATEST: Mapping[str, str] = {
    "megatron": "megatron-core",
    "nemo": "nemo-2024.07",
    "torchtitan": "torchtitan-2026.03",
    "llm-foundry": "llm-foundry-2023.10",
}
"""Names without a year, of the latest version that was read."""


def framework_named(name: str) -> Framework:
    """The framework called `name`."""
    known = LATEST.get(name, name)
    if known not in FRAMEWORKS:
        raise UsageError(unknown("framework", name, sorted((*LATEST, *FRAMEWORKS))))
    return FRAMEWORKS[known]
