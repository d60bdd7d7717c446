"""Functions of modelling code that are one operator: while a module is exported, a call of one in
the table is that operator, instead of the thousands that its loop over chunks gives.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

import autopar.torch_operators  # noqa: F401  (defines the operators)

MODELLING = ("modeling_", "modular_")
"""How the names of modules with modelling code begin, those of transformers and of the hub."""


def _delta_rule(given: Mapping[str, Any]) -> Any:
    """A delta rule from an empty state, whose last state nobody reads."""
    if _is_more(given, "initial_state", "output_final_state"):
        return None
    names = ("query", "key", "value", "g", "beta", "chunk_size", "use_qk_l2norm_in_kernel")
    return torch.ops.autopar.gated_delta_rule(*(given[name] for name in names)), None


def _state_space(given: Mapping[str, Any]) -> Any:
    """A scan from an empty state with a step for each head, whose last state nobody reads."""
    of_heads = [t for name in ("A", "D", "dt_bias") if (t := given[name]) is not None]
    if given["dt"].dim() != 3 or any(t.dim() != 1 for t in of_heads):
        return None
    if _is_more(given, "initial_states", "return_final_states"):
        return None
    names = ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "chunk_size", "dt_softplus")
    limits = (float(limit) for limit in given["dt_limit"])
    return torch.ops.autopar.state_space_scan(*(given[name] for name in names), *limits)


def _is_more(given: Mapping[str, Any], *names: str) -> bool:
    """Whether one of the arguments is given, or one of packed sequences, gates and scales."""
    both = {**given, **given.get("kwargs", {})}
    others = ("cu_seqlens", "seq_idx", "scale", "z")
    values = [both.get(name) for name in (*names, *others)]
    return any(value is not None and value is not False for value in values)


SCANS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""The name of a function → the operator's result for its arguments, None where it has none."""


@contextmanager
def scans_as_operators(module: torch.nn.Module) -> Iterator[None]:
    """Inside, modelling code that is imported calls operators, and so does what `module` holds."""
    with ExitStack() as stack:
        replaced: dict[int, Callable[..., Any]] = {}
        for name, place in tuple(sys.modules.items()):
            if not name.rpartition(".")[2].startswith(MODELLING):
                continue
            for function, operator in SCANS.items():
                original = vars(place).get(function)
                if callable(original):
                    instead = _preferring(operator, original)
                    replaced[id(original)] = instead
                    stack.enter_context(patch.object(place, function, instead))
        for part in module.modules():
            # A layer may hold the function that its constructor chose.
            for attribute, held in tuple(vars(part).items()):
                if id(held) in replaced:
                    stack.enter_context(patch.object(part, attribute, replaced[id(held)]))
        yield


def _preferring(
    operator: Callable[[Mapping[str, Any]], Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """A call of the operator where it can express the call, else of the original."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        made = operator(bound.arguments)
        return original(*args, **kwargs) if made is None else made

    return call
