"""Imports all families of local forms, which fill the table."""

from importlib import import_module

_SPLIT = (
    "experts_once halo_exchange prefix_scans ring_attention split_normalization split_softmax "
    "travelling_rows vocabulary_loss"
)
_LOCAL = (
    "attention_dropout bodies detection dropout experts narrow_experts narrow_products "
    "random_tensors seeded_operators shard_indexing shard_lookup shard_sizes single_device"
)
for _name in _SPLIT.split():
    import_module(f"autopar.runtime.split_operators.{_name}")
for _name in _LOCAL.split():
    import_module(f"autopar.runtime.local_forms.{_name}")
