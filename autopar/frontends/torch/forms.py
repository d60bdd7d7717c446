"""Gives aten operators the one form that they have in graphs.

They work out of place, and arguments that a shard needs are spelled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_OTHER_NAMES = {"aten::normal_": "normal_functional"}
"""Out-of-place forms that are not called as the form in place without its underscore."""


def plain_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The out-of-place form of `target` (`relu` for `relu_`); None where torch has none.

    It is the overload that takes the same arguments: overloads of one name may be in another order
    (`pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to a tensor).
    """
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_"):
        return None
    plain = _OTHER_NAMES.get(target._schema.name, name.removesuffix("_"))
    overloads = getattr(getattr(torch.ops, namespace), plain, None)
    names = overloads.overloads() if overloads is not None else ()
    forms = (getattr(overloads, overload) for overload in names)
    wanted = _taken(target)
    return next((form for form in forms if _taken(form) == wanted), None)


def _taken(target: torch._ops.OpOverload) -> list[tuple[str, str, bool]]:
    """The names and types of the arguments, and which are by keyword alone."""
    return [(a.name, str(a.type), a.kwarg_only) for a in target._schema.arguments]


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
    # Sparse gradients of tables have no shards; dense ones are of the same values.
    return target, {**given, "sparse": False} if given.get("sparse") is True else given


def _dims_of_one(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims that `squeeze` takes away, all of size 1.

    A shard may have more dims of size 1 than the whole.
    """
    shape = given["self"].meta["val"].shape
    wanted = given.get("dim", range(len(shape)))
    dims = {dim % max(len(shape), 1) for dim in ((wanted,) if isinstance(wanted, int) else wanted)}
    return tuple(dim for dim in sorted(dims) if dim < len(shape) and shape[dim] == 1)


def spelled_out(
    target: torch._ops.OpOverload, form: torch._ops.OpOverload, node: torch.fx.Node
) -> dict[str, Any]:
    """The arguments of a node of `target` by name, with defaults of it that its `form` lacks."""
    arguments = target._schema.arguments
    given = dict(zip([a.name for a in arguments], node.args, strict=False)) | node.kwargs
    without = {a.name for a in form._schema.arguments if not a.has_default_value()}
    missing = (a for a in arguments if a.name in without and a.name not in given)
    return given | {a.name: a.default_value for a in missing}


def on_meta(target: torch._ops.OpOverload, given: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The arguments as meta tensors of their shapes and types, and what `target` makes of them."""

    def described(argument: torch.fx.Node) -> Any:
        value = argument.meta.get("val")
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    arguments = {name: torch.fx.node.map_arg(value, described) for name, value in given.items()}
    if "device" in arguments:
        arguments["device"] = "meta"
    return [*arguments.values()], target(**arguments)
