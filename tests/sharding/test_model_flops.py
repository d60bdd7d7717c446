"""The FLOPs of models are those that are counted by hand."""

from __future__ import annotations

import pytest

from autopar.sharding.analysis import analyse
from autopar.sharding.model_flops import model_flops
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=3,
    hidden=64,
    heads=8,
    kv_heads=2,
    ffn=160,
    vocab=128,
    sequence=32,
    gated=True,
    norm="rms_norm",
    bias=False,
    dropout=False,
)
BATCH = 4


def _weights() -> int:
    """Elements of the weights that a token meets: of the layers, and of the head."""
    attention = 64 * (64 + 2 * 16) + 64 * 64
    return 3 * (attention + 3 * 64 * 160) + 128 * 64


@pytest.mark.parametrize(("train", "passes"), [(True, 3), (False, 1)])
def test_a_decoder_has_six_for_each_weight_and_token_and_attention(
    train: bool, passes: int
) -> None:
    flops = model_flops(analyse(transformer(SHAPE, batch=BATCH).graph, train=train))
    tokens = BATCH * 32
    products = 2 * _weights() * tokens
    # Two products of s x s x hidden for each layer and sequence, half of them behind the mask.
    attention = 3 * BATCH * 2 * (2 * 32 * 32 * 64) / 2
    assert sum(flops.values()) == passes * (products + attention)
    assert set(flops) == {"bfloat16"}
