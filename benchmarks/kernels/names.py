"""Names of the kernels of rows, under which their constants are kept."""

from __future__ import annotations

from collections.abc import Mapping

APART = ("sglang_fused_moe_triton",)


def attention_kernel(row: Mapping[str, str]) -> str:
    """The kernel of a row of attention; without a mask each version has kernels of its own."""
    return row["kernel"] if row["causal"] == "1" else f"{row['kernel']} {row['version']} unmasked"


def layer_kernel(row: Mapping[str, str]) -> str:
    """The kernel and dtype of a layer of experts; ungated layers use the gated ones' kernels.

    Evenly routed rows of the kernels `APART` are kept apart, since the rows of one of several ranks
    differ from other tables.
    """
    even = " balanced" if row["kernel"] in APART and row["distribution"] == "balanced" else ""
    return (
        f"{row['kernel'].replace('moe_torch_flow_nongated', 'moe_torch_flow_cutlass')} "
        f"{row['dtype']}{even}"
    )
