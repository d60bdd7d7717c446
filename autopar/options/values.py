"""The valid values of the options of planning that are names or small numbers.

The modules that define them import numpy or torch. The names are repeated here so that `--help`
answers at once; `tests/cli/test_cli_surface.py` holds both equal.
"""

from __future__ import annotations

OPTIMIZERS = ("adamw", "sgd", "momentum", "lamb", "muon", "none")
SEARCHES = (
    "dynamic_programming",
    "lagrangian",
    "recursive_programming",
    "exhaustive",
    "integer_program",
)
SCHEMES = (
    "data",
    "zero1",
    "zero2",
    "zero3",
    "tensor",
    "megatron",
    "megatron-sp",
    "ulysses",
    "context",
    "expert",
    "2d",
    "2.5d",
    "3d",
    "pipeline-gpipe",
    "pipeline-1f1b",
    "gpt3-64x6x8",
)
MODES = ("train", "infer")
RECOMPUTES = ("none", "selective", "full")
ALTERNATE = "alternate"
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
ZEROS = (0, 1, 2, 3)
OFFLOADS = ("none", "optimizer")
DTYPES = ("float32", "float16", "bfloat16", "float64")
PRECISIONS = ("bf16", "fp8", "fp8-block", "mxfp8", "nvfp4")
TARGETS = (
    "dtensor",
    "torchtitan",
    "megatron",
    "megatron-bridge",
    "deepspeed",
    "fsdp2",
    "pipelining",
    "transformers",
    "accelerate",
)
