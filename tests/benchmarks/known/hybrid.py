"""A small model of layers of every kind: state space, attention, dense and experts."""

from benchmarks.validating.known import Shape
from benchmarks.validating.known.shape import StateSpace

HYBRID = Shape(
    layers=6,
    hidden=1024,
    heads=16,
    kv_heads=4,
    ffn=4096,
    vocab=4096,
    sequence=1024,
    pattern="M-M*ME",
    state=StateSpace(heads=32, width=64, size=128, groups=8),
    experts=16,
    top_k=4,
    expert_ffn=512,
    shared_ffn=1024,
    bias=False,
    dropout=False,
    tied=False,
    norm="rms_norm",
    position="none",
)
