"""All families of local forms; importing them fills the table."""

from autopar.runtime.split_operators import (
    experts_once,
    halo_exchange,
    prefix_scans,
    ring_attention,
    split_normalization,
    split_softmax,
    travelling_rows,
    vocabulary_loss,
)

from . import (
    attention_dropout,
    dropout,
    experts,
    narrow_experts,
    narrow_products,
    onnx_shard_indexing,
    random_tensors,
    seeded_operators,
    shard_indexing,
    shard_lookup,
    shard_sizes,
    single_device,
)

__all__ = [
    "attention_dropout",
    "dropout",
    "experts",
    "experts_once",
    "halo_exchange",
    "narrow_experts",
    "narrow_products",
    "onnx_shard_indexing",
    "prefix_scans",
    "random_tensors",
    "ring_attention",
    "seeded_operators",
    "shard_indexing",
    "shard_lookup",
    "shard_sizes",
    "single_device",
    "split_normalization",
    "split_softmax",
    "travelling_rows",
    "vocabulary_loss",
]
