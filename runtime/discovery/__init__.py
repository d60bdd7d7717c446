"""Discovery of the sharding rule of an operator that has none, by executing it on shards."""

from .discover import MESHES, Discovery, discover, on_trial, prove_all
from .example_calls import discover_target, example_of_texts, prove_rule
from .model_operators import discover_call, prove_call

__all__ = [
    "MESHES",
    "Discovery",
    "discover",
    "discover_call",
    "discover_target",
    "example_of_texts",
    "on_trial",
    "prove_all",
    "prove_call",
    "prove_rule",
]
