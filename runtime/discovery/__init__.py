"""Finding the sharding rule of an operator that has none, by executing it on small shards."""

from .discover import MESHES, Discovery, discover, on_trial, prove_all
from .shrunk import discover_call, prove_call
from .targets import discover_target, example_of_texts, prove_rule

__all__ = [
    "MESHES", "Discovery", "discover", "discover_call", "discover_target", "example_of_texts", "on_trial", "prove_all", "prove_call",
    "prove_rule",
]  # fmt: skip
