"""Operators over stand-ins.

One that changes a stand-in does nothing, since the holder does the same to the tensor itself. One
that makes a tensor gives a stand-in, or one of a gradient's figures. One that would need other
values is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .elsewhere import Elsewhere, Origin
from .gradient_figures import ATEN, Figures, factor_of, figure_of, kind_of

WITHOUT_DATA = torch.device("meta")
_WHOLE_VIEWS = {
    ATEN.alias,
    ATEN.detach,
    ATEN.permute,
    ATEN.squeeze,
    ATEN.t,
    ATEN.transpose,
    ATEN.unsqueeze,
    ATEN.view,
    ATEN._unsafe_view,
}
"""Views of all elements, each once."""
_COPIES = {ATEN.clone, ATEN._to_copy, ATEN.copy_}
_READS = {
    ATEN._local_scalar_dense,
    ATEN.equal,
    ATEN.is_nonzero,
    ATEN.masked_select,
    ATEN.nonzero,
    ATEN._unique2,
}
"""Operators whose result is numbers for the host, or of a shape that depends on values."""
_DRAWS_BY_VALUES = {
    ATEN._sample_dirichlet,
    ATEN._standard_gamma,
    ATEN.binomial,
    ATEN.multinomial,
    ATEN.poisson,
    ATEN.rrelu_with_noise,
    ATEN.rrelu_with_noise_,
}
"""Random operators that draw as many numbers as values ask for."""


def joint_origin(ours: Sequence[Elsewhere], others: Sequence[Tensor]) -> Origin:
    """The origin of a tensor made of stand-ins and other tensors."""
    origin = ours[0].origin
    # A value made of a tensor of this stage and one of another is on no rank.
    alone = all(not value.dim() for value in others)
    stages = frozenset.intersection(*(value.origin.stages for value in ours))
    return replace(
        origin,
        stages=stages if alone else frozenset(),
        unsure=any(value.origin.unsure for value in ours),
    )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator with a stand-in among its arguments."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [value for value in tensors if isinstance(value, Elsewhere)]
    others = [value for value in tensors if not isinstance(value, Elsewhere)]
    origin = joint_origin(ours, others)
    name = func.overloadpacket.__name__
    if func.overloadpacket in _READS:
        origin.refuse(f"reading numbers ({name})")
    if func.overloadpacket in _DRAWS_BY_VALUES:
        origin.refuse(f"drawing by values ({name})")
    written = _written(func, args, kwargs)
    _require_unmixed(name, origin, written, ours, others)
    first = args[0] if args and isinstance(args[0], Elsewhere) else ours[0]
    # A part of a tensor has other figures than the whole.
    pick = figure_of(first.kind, func, args, kwargs) if first.whole else None
    if pick is not None:
        if first.figures.values is not None:
            return _told(pick(first.figures.values), first, args, kwargs)
        origin = replace(origin, unsure=origin.unsure or first.figures.told)
    made = _without_data(func, args, kwargs)
    if written:
        for value in written:
            _change(value, func, args, kwargs)
        return made
    # Clipping moves norms to the device of the first.
    device = kwargs.get("device") or first.device
    return pytree.tree_map_only(
        Tensor, lambda meta: _derived(meta, first, origin, (func, args, kwargs), device), made
    )


def _require_unmixed(
    name: str,
    origin: Origin,
    written: Sequence[Tensor],
    ours: Sequence[Elsewhere],
    others: Sequence[Tensor],
) -> None:
    """Refuse unknown values on their way into tensors that have some."""
    into = [value for value in written if not isinstance(value, Elsewhere)]
    # A number made of values that are not here, beside one that is: a sum over all parameters.
    numbers = bool(others) and not written and all(not value.dim() for value in ours)
    lost = torch.is_grad_enabled() and any(value.requires_grad for value in others)
    if into or numbers or (lost and not written):
        origin.refuse(f"{name} with a tensor of this rank")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments into which an operator writes."""
    written: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def _told(number: Tensor, first: Elsewhere, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """A figure as the result of an operator: on one device it has the gradient's type."""
    keep = kwargs.get("keepdim", len(args) > 3 and args[3])
    dtype = kwargs.get("dtype") or (first.dtype if number.dtype is not torch.bool else torch.bool)
    value = number.to(dtype)
    return value.reshape([1] * first.dim()) if keep else value


def _without_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator on tensors without data; a tensor that it writes is itself."""
    metas: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def bare(value: Tensor) -> Tensor:
        if id(value) not in metas:
            metas[id(value)] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=WITHOUT_DATA
            )
            values[id(metas[id(value)])] = value
        return metas[id(value)]

    # Tensors without data draw no numbers.
    if torch.Tag.nondeterministic_seeded in func.tags:
        _draw(func, args, kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, bare, (args, kwargs))
    kwargs = {**kwargs, "device": WITHOUT_DATA} if "device" in kwargs else kwargs
    kwargs.pop("pin_memory", None)
    result = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, lambda made: values.get(id(made), made), result)


def _draw(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Draw the random numbers that the holder draws, so that generators go on alike."""
    args, kwargs = pytree.tree_map_only(Elsewhere, _zeros, (args, kwargs))
    func(*args, **kwargs)


def _zeros(value: Tensor) -> Tensor:
    """Zeros in the same order in memory, in which generators fill it."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.zero_()


def _change(value: Tensor, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Let the figures follow an operator that writes to a stand-in."""
    assert isinstance(value, Elsewhere)
    before = value.figures
    after = Figures()
    if value.whole and value.kind == "values":
        source = args[1] if func.overloadpacket is ATEN.copy_ else None
        # A copy of a whole gradient is one; anything else makes them unknown.
        if isinstance(source, Elsewhere) and source.whole and source.shape == value.shape:
            after = source.figures
        elif func.overloadpacket is ATEN.zero_:
            after = Figures(torch.zeros(2, dtype=torch.double, device=value.device))
        else:
            after = before.scaled(factor_of(func, args, kwargs))
    before.values = after.values


def _derived(
    made: Tensor,
    first: Elsewhere,
    origin: Origin,
    call: tuple[Any, Any, Mapping[str, Any]],
    device: torch.device,
) -> Tensor:
    """A result of a call of an operator over stand-ins."""
    func, args, kwargs = call
    if isinstance(made, Elsewhere) or made.device != WITHOUT_DATA:
        return made
    returns = func._schema.returns[0].alias_info
    if returns is not None:
        # What is written into a view is written into the tensor.
        whole = first.whole and func.overloadpacket in _WHOLE_VIEWS
        return first.of(made, origin, first.figures, kind=first.kind, whole=whole, device=device)
    figures = Figures()
    kind = "values"
    if first.whole and func.overloadpacket in _COPIES:
        figures = Figures(first.figures.values, told=first.figures.told)
        kind = first.kind
    elif first.whole and (other := kind_of(first.kind, func, args)):
        figures = Figures(first.figures.values, told=first.figures.told)
        kind = other
    elif first.whole and first.kind == "values":
        factor = factor_of(func, args, kwargs)
        figures = first.figures.scaled(factor) if factor is not None else figures
    return first.of(made, origin, figures, kind=kind, device=device)


def bare_of(value: DTensor) -> Tensor:
    """A DTensor as an operand whose values do not count, except for a number."""
    if not value.dim():
        return value.full_tensor().detach()
    return torch.empty(value.shape, dtype=value.dtype, device=WITHOUT_DATA)
