"""A small mixture of experts whose runs are priced."""

from benchmarks.validating.known import Shape

MIXTURE = Shape(
    layers=6,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=32000,
    sequence=2048,
    gated=True,
    experts=32,
    top_k=4,
    expert_ffn=512,
    tied=False,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
)
