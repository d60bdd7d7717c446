"""The measured kernel for each attention of a framework, or a published slowdown of another."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costmodel.device.attention import AttentionForm
from autopar.costmodel.device.grouped_products import GroupedForm
from autopar.costmodel.device.measured_kernels import Generation

# Generation -> the measured kernels that are it, the best known first, with a factor and a source.
CANDIDATES: Mapping[str, tuple[tuple[str, float, str], ...]] = {
    "cudnn": (
        ("trtllm_mha", 1.0, "measured: the kernels that NVIDIA's libraries have for Blackwell"),
        (
            "fa3",
            1.0,
            "assumed: cuDNN 9 is within 5 % of FlashAttention-3 forward (arXiv:2407.08608, figure "
            "5)",
        ),
        ("flash_attention", 1.0, "assumed: as FlashAttention-2"),
        ("vllm_flash_attn_fa2", 1.0, "assumed: as FlashAttention-2"),
    ),
    "flash3": (
        ("fa3", 1.0, "measured"),
        ("trtllm_mha", 1.0, "assumed: FlashAttention-3 does not run here; the kernels that do"),
        (
            "flash_attention",
            1.0,
            "assumed: FlashAttention-3 does not run here; FlashAttention-2 does",
        ),
        (
            "vllm_flash_attn_fa2",
            1.0,
            "assumed: FlashAttention-3 does not run here; FlashAttention-2 does",
        ),
    ),
    "flash2": (
        (
            "fa3",
            1.6,
            "assumed: FlashAttention-3 is 1.5 to 2 times as fast forward, 1.5 to 1.75 backward "
            "(arXiv:2407.08608)",
        ),
        ("vllm_flash_attn_fa2", 1.0, "measured"),
        ("trtllm_mha", 1.0, "assumed: frameworks run cuDNN's kernels here"),
        ("flash_attention", 1.0, "measured"),
    ),
    "flash1": (
        ("fa3", 3.2, "assumed: half as fast as FlashAttention-2 (arXiv:2307.08691, section 4.1)"),
        (
            "vllm_flash_attn_fa2",
            2.0,
            "assumed: half as fast as FlashAttention-2 (arXiv:2307.08691, section 4.1)",
        ),
        (
            "trtllm_mha",
            2.0,
            "assumed: half as fast as later kernels (arXiv:2307.08691, section 4.1)",
        ),
        (
            "flash_attention",
            2.0,
            "assumed: half as fast as FlashAttention-2 (arXiv:2307.08691, section 4.1)",
        ),
    ),
}


def generations_of(attention: Mapping[str, AttentionForm]) -> dict[str, Generation]:
    """The first candidate of each generation that was measured on a device."""
    generations = {}
    for name, candidates in CANDIDATES.items():
        kernel, slower, source = next(
            candidate for candidate in candidates if candidate[0] in attention
        )
        generations[name] = Generation(kernel=kernel, slower=slower, source=source)
    return generations


TRAINED = ("moe_torch_flow_cutlass", "moe_torch_flow")
"""Grouped kernels as training frameworks have them (CUTLASS), the newest first."""


def experts_of(grouped: Mapping[str, GroupedForm]) -> dict[str, str]:
    """The grouped kernel that training runs, by dtype."""
    kernels = {}
    for dtype, name in (("bfloat16", "bfloat16"), ("float8", "fp8")):
        kernel = next(
            (f"{kernel} {name}" for kernel in TRAINED if f"{kernel} {name}" in grouped), None
        )
        if kernel:
            kernels[dtype] = kernel
    return kernels
