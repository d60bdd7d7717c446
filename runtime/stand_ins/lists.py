"""Torch's functions of stand-ins: those over lists of tensors, and those that no stand-in answers.

Functions over lists (`torch._foreach_...`, fused updates) run on the tensors that this rank has.
Where every rank lacks one of the tensors that are joined (`torch.stack`, `torch.cat`), all of them
take part, and the holders tell the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError

from .elsewhere import Elsewhere, outside
from .gradient_figures import LARGEST, NORM, Figures
from .operators import bare_of, joint_origin

JOINING = (torch.stack, torch.cat, torch.concat, torch.concatenate)
_REFUSED = {"tolist", "numpy", "__array__", "allclose", "backward", "storage", "__dlpack__"}
"""Methods that would need values, which torch's operators do not see."""
Kwargs = dict[str, Any]


def answered(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """The result of one of torch's functions with a stand-in among its arguments."""
    name = func.__name__
    # Attributes, the commonest of all, need no look at what they are of.
    if name == "__get__":
        return outside(func, *args)
    if name == "__set__":
        return _set(func, args[0], args[1])
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if func in JOINING:
        return _joined(func, args, kwargs)
    if name.startswith("_amp_foreach"):
        return _unscaled(*args)
    if name.startswith(("_foreach_", "_fused_")):
        return _over_lists(func, args, kwargs)
    if name in _REFUSED:
        _first(args, kwargs).origin.refuse(f"{name}()")
    if name == "new":
        # Torch's own makes an ordinary tensor.
        return args[0].new_empty(*args[1:])
    if name == "isfinite" and args[0].kind in ("values", "sizes"):
        return _is_finite(args[0])
    return _over_stand_ins(func, args, kwargs)


def _first(*arguments: Any) -> Elsewhere:
    return next(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Elsewhere))


def _over_stand_ins(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """A function whose operators reach the stand-ins; DTensors would answer in front of them."""
    first = _first(args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    split = any(isinstance(leaf, DTensor) for leaf in leaves)
    # They would not know a stand-in among their operands.
    if split:
        args, kwargs = pytree.tree_map_only(DTensor, bare_of, (tuple(args), kwargs))
    result = outside(func, *args, **kwargs)
    return pytree.tree_map_only(Tensor, lambda value: _as_own(value, first, leaves), result)


def _as_own(value: Tensor, first: Elsewhere, given: Sequence[Any]) -> Tensor:
    """A result as one of this rank's tensors: a figure is one that all ranks have."""
    plain = type(value) is Tensor and not any(value is leaf for leaf in given)
    return first.origin.holders.wrap(value) if plain else value


def _set(func: Any, target: Tensor, value: Any) -> None:
    """Set a tensor's attribute; of stand-ins and others, neither takes the other's data."""
    data = func == Tensor.data.__set__  # type: ignore[attr-defined]
    if isinstance(value, Elsewhere) and not isinstance(target, Elsewhere):
        value.origin.refuse("setting it as data or gradient of a tensor of this rank")
    if data and isinstance(target, Elsewhere) and not isinstance(value, Elsewhere):
        like = torch.empty_like(value, device="meta") if not isinstance(value, DTensor) else None
        value = target.of(bare_of(value) if like is None else like, target.origin)
    outside(func, target, value)


def _is_finite(value: Elsewhere) -> Elsewhere:
    like = torch.empty(value.shape, dtype=torch.bool, device="meta")
    figures = Figures(value.figures.values, told=value.figures.told)
    return value.of(like, value.origin, figures, kind="finite", whole=value.whole)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As `torch.autograd.grad`: gradients of stand-ins are stand-ins."""
    if any(isinstance(value, Elsewhere) for value in pytree.tree_leaves(outputs)):
        _first(outputs).origin.refuse("a gradient of what is made of it")
    listed = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    names = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    return _first(listed).origin.holders.read_gradients(outputs, listed, **options)


def _joined(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Tensors stacked or put one behind another, of which this rank lacks some."""
    listed = list(args[0] if args else kwargs.pop("tensors"))
    ours = [value for value in listed if isinstance(value, Elsewhere)]
    if not ours or "out" in kwargs:
        _first(args, kwargs).origin.refuse(f"{func.__name__} into a tensor of this rank")
    others = [value for value in listed if not isinstance(value, Elsewhere)]
    holders = ours[0].origin.holders
    if _all_take_part(ours, others):
        whole = holders.exchanged(listed)
        if torch.is_grad_enabled() and any(value.requires_grad for value in listed):
            one = torch.ones((), requires_grad=True)
            whole = list(_Told.apply(one, *whole))  # type: ignore[no-untyped-call]
        return holders.wrap(func(whole, *args[1:], **kwargs))
    # Some rank has all of them, and does not wait for the others.
    if others:
        joint_origin(ours, others).refuse(f"{func.__name__} with tensors of this rank")
    return outside(func, listed, *args[1:], **kwargs)


def _all_take_part(ours: Sequence[Elsewhere], others: Sequence[Tensor]) -> bool:
    """Whether every rank lacks one of some values, and waits for the others to tell them."""
    known = all(value.origin.stages and not value.origin.unsure for value in ours)
    return known and ours[0].origin.holders.all_lack_one(ours, others)


class _Told(torch.autograd.Function):
    """Values that ranks have told one another, from which no gradient leads back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise PlanError(
            "a loss made of the weights of several pipeline stages has no gradient: let the "
            "optimizer decay the weights, let the model return the penalty in its loss, or plan "
            "without stages"
        )


def _all_told(ours: Sequence[Tensor]) -> list[Tensor]:
    """The figures of gradients, if those of all are known; else none."""
    told = [
        value.figures.values
        for value in ours
        if isinstance(value, Elsewhere) and value.whole and value.kind == "values"
    ]
    known = [values for values in told if values is not None]
    return known if len(known) == len(ours) else []


def _unscaled(gradients: Sequence[Tensor], bad: Tensor, factor: Tensor) -> None:
    """A gradient scaler's check and division, also by the figures of other stages."""
    ours = [value for value in gradients if isinstance(value, Elsewhere)]
    others = [value for value in gradients if not isinstance(value, Elsewhere)]
    told = _all_told(ours)
    if not told:
        ours[0].origin.refuse("the check that changed gradients are finite")
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, bad, factor)
    worst = torch.stack(told)[:, LARGEST]
    bad.copy_(torch.maximum(bad, (~worst.isfinite()).any().to(bad.dtype)))
    _scale(ours, told, factor.double())


def _scale(ours: Sequence[Elsewhere], told: list[Tensor], factor: Any) -> None:
    for value, values in zip(ours, torch._foreach_mul(told, abs(factor)), strict=True):
        value.figures.values = values


def _at_once(name: str, ours: Sequence[Any], other: Any) -> list[Any] | None:
    """The usual functions over many stand-ins, in a few operators; None if it is none of these."""
    told = _all_told(ours)
    # Element by element, torch's dispatch would cost the host more than the work.
    if not told:
        return None
    if name == "_foreach_norm" and other in (2, math.inf):
        column = torch.stack(told)[:, LARGEST if other == math.inf else NORM]
        wrap = ours[0].origin.holders.wrap
        # The list has one type, as torch's function wants it.
        return [wrap(norm) for norm in column.to(ours[0].dtype).unbind()]
    if name == "_foreach_mul_":
        factor = bare_of(other) if isinstance(other, DTensor) and not other.dim() else other
        if isinstance(factor, (int, float)) or (type(factor) is Tensor and not factor.dim()):
            _scale(ours, told, factor)
            return list(ours)
    return None


def _over_lists(func: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """A function over lists, element by element: on tensors where this rank has all of them."""
    name = func.__name__
    first = next(value for value in args if isinstance(value, (list, tuple)))
    lacking = _places_of_stand_ins((*args, *kwargs.values()), len(first))
    own = [place for place in range(len(first)) if place not in lacking]
    numbers = [*args, *kwargs.values()]
    stray = next((value for value in numbers if isinstance(value, Elsewhere)), None)
    writes = name.endswith("_") or name.startswith("_fused_")
    if own and stray is not None:
        stray.origin.refuse(f"{name} with tensors of this rank")
    for place in lacking:
        if writes and not isinstance(first[place], Elsewhere):
            _first([_at(value, place, len(first)) for value in numbers]).origin.refuse(
                f"{name} into a tensor of this rank"
            )
    results: list[Any] = [None] * len(first)
    if own:
        picked = [_only(value, own, len(first)) for value in args]
        options = {key: _only(value, own, len(first)) for key, value in kwargs.items()}
        made = func(*picked, **options)
        results = _spread(made, own, len(first))
    # A fused update gives nothing back, and gradients in it are not read any more.
    if name.startswith("_fused_"):
        return None
    other = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    made = None if kwargs.get("dtype") else _at_once(name, [first[at] for at in lacking], other)
    if made is not None:
        for place, value in zip(lacking, made, strict=True):
            results[place] = value
        return list(first) if writes else results
    single = _single(name)
    for place in lacking:
        options = {key: _at(value, place, len(first)) for key, value in kwargs.items()}
        results[place] = single(*(_at(v, place, len(first)) for v in args), **options)
    if name == "_foreach_norm":
        return _told_norms(first, results)
    return list(first) if writes else results


def _told_norms(gradients: Sequence[Tensor], norms: list[Tensor]) -> list[Tensor]:
    """Norms of which each rank has some, told at once: here it is known whose gradients they are,
    which decides who takes part.
    """
    ours = [value for value in norms if isinstance(value, Elsewhere)]
    others = [value for value in gradients if not isinstance(value, Elsewhere)]
    if not _all_take_part(ours, others):
        return norms
    holders = ours[0].origin.holders
    return [holders.wrap(value) for value in holders.exchanged(norms)]


def _places_of_stand_ins(arguments: Sequence[Any], length: int) -> list[int]:
    """The places in lists at which some list has a stand-in."""
    places: set[int] = set()
    for value in arguments:
        if isinstance(value, (list, tuple)) and len(value) == length:
            places.update(at for at, one in enumerate(value) if isinstance(one, Elsewhere))
    return sorted(places)


def _only(value: Any, places: Sequence[int], length: int) -> Any:
    """A list's elements at some places; anything else is for all places."""
    if isinstance(value, (list, tuple)) and len(value) == length:
        return [value[place] for place in places]
    return value


def _at(value: Any, place: int, length: int) -> Any:
    return value[place] if isinstance(value, (list, tuple)) and len(value) == length else value


def _spread(made: Any, places: Sequence[int], length: int) -> list[Any]:
    """Results at their places; None where there is none."""
    results: list[Any] = [None] * length
    if isinstance(made, (list, tuple)):
        for place, value in zip(places, made, strict=True):
            results[place] = value
    return results


_SINGLE: Mapping[str, str] = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Names of functions over lists that a tensor's method has not."""


def _single(name: str) -> Callable[..., Any]:
    """The function of one tensor that a function over lists calls for each."""
    if name == "_foreach_norm":
        return _norm
    stem = name.removeprefix("_foreach_").rstrip("_")
    single = _SINGLE.get(stem, stem) + ("_" if name.endswith("_") else "")
    if stem in ("addcmul", "addcdiv"):
        return lambda x, y, z, value=1: getattr(x, single)(y, z, value=value)
    if single == "pow":
        return torch.pow
    method: Callable[..., Any] = getattr(Tensor, single)
    return method


def _norm(value: Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """The norm of one gradient of a list."""
    return torch.linalg.vector_norm(value, order, dtype=dtype)
