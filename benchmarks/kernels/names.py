"""Names of the kernels of rows, under which their constants are kept."""

from __future__ import annotations

from collections.abc import Mapping

APART = ("sglang_fused_moe_triton",)


def attention_kernel(row: Mapping[str, str]) -> str:
    """The kernel of a row of attention; without a mask each version has kernels of its own."""
    return row["kernel"] if row["causal"] == "1" else f"{row['kernel']} {row['version']} unmasked"


def layer_kernel(row: Mapping[str, str]) -> str:
    """The kernel and dtype of a layer of experts; those that are not gated run on the gated ones' kernels. Of the kernels `APART` the
    evenly routed rows are apart: how many rows a rank of several gets there differs from the other tables."""
    even = " balanced" if row["kernel"] in APART and row["distribution"] == "balanced" else ""
    return f"{row['kernel'].replace('moe_torch_flow_nongated', 'moe_torch_flow_cutlass')} {row['dtype']}{even}"
