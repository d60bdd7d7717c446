"""Gives aten operators the one form that they have in graphs.

They work out of place, and arguments that a shard needs are spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_PLAIN_FORMS = {
    "aten.normal_.default": torch.ops.aten.normal_functional.default,
    "aten.bernoulli_.float": torch.ops.aten.bernoulli.p,
}


def plain_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The out-of-place form of `target` (`relu` for `relu_`); None where torch has none."""
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_"):
        return None
    overloads = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    plain = getattr(overloads, target._overloadname or "default", None) or _PLAIN_FORMS.get(
        str(target)
    )
    assert plain is None or isinstance(plain, torch._ops.OpOverload)
    return plain


def explicit(
    target: torch._ops.OpOverload, given: dict[str, Any]
) -> tuple[torch._ops.OpOverload, dict[str, Any]]:
    """Spell out facts of whole tensors as arguments of an operator.

    Such facts are the dims that `squeeze` drops and the dtype of `type_as`.
    """
    if target._schema.name == "aten::squeeze":
        return torch.ops.aten.squeeze.dims, {"self": given["self"], "dim": _dims_of_one(given)}
    if target._schema.name == "aten::type_as":
        return torch.ops.aten.to.dtype, {
            "self": given["self"],
            "dtype": given["other"].meta["val"].dtype,
        }
    return target, given


def _dims_of_one(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims that `squeeze` takes away, all of size 1.

    A shard may have more dims of size 1 than the whole.
    """
    shape = given["self"].meta["val"].shape
    wanted = given.get("dim", range(len(shape)))
    dims = {dim % max(len(shape), 1) for dim in ((wanted,) if isinstance(wanted, int) else wanted)}
    return tuple(dim for dim in sorted(dims) if dim < len(shape) and shape[dim] == 1)
