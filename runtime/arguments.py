"""Calls of a planned model: arguments in the order, under the names and with the constants of the planned call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.ir import Tensor as Described
from autopar.model import LoadedModel


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a planned argument among the leaves of the planned call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The planned call: its `leaves`, their structure, and the model's signature."""

    leaves: tuple[Any, ...]
    spec: Any
    signature: inspect.Signature | None

    @classmethod
    def of(cls, model: LoadedModel) -> Arguments | None:
        """None for ONNX models, whose inputs are known by name."""
        if model.torch is None:
            return None
        spec = model.torch.in_spec
        if model.call is None:
            return cls(leaves=(), spec=spec, signature=None)
        leaves, own = pytree.tree_flatten(model.call)
        return cls(leaves=tuple(leaves), spec=own, signature=inspect.signature(model.module.forward))

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the planned one; other arguments must be as planned."""
        given, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec and self.signature is not None:
            given = self._ordered(args, kwargs)
        elif spec != self.spec:
            raise PlanError(f"the model was planned for arguments of the form {self.spec}, called with {spec}")
        if any(not _agree(planned, value) for planned, value in zip(self.leaves, given, strict=bool(self.leaves))):
            given = self._ordered(args, kwargs)  # names the argument that differs
        return [value for value in given if isinstance(value, Tensor)]

    def _ordered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call that passes the planned arguments differently: by name, reordered, without defaults."""
        assert self.signature is not None
        places = pytree.tree_unflatten([_Place(i) for i in range(len(self.leaves))], self.spec)
        planned, given = self._bound(*places), self._bound(args, kwargs)
        if strange := [name for name in given if name not in planned]:
            raise PlanError(self._refusal(strange[0], inspect.Parameter.empty, given[strange[0]], args, kwargs))
        ordered = list(self.leaves)
        for name, mine in planned.items():
            wanted, wanted_spec = pytree.tree_flatten(mine)
            values, spec = pytree.tree_flatten(given.get(name, inspect.Parameter.empty))
            before = [self.leaves[w.index] if isinstance(w, _Place) else w for w in wanted]
            if spec != wanted_spec or not all(_agree(one, other) for one, other in zip(before, values, strict=True)):
                was = pytree.tree_unflatten(before, wanted_spec)
                raise PlanError(self._refusal(name, was, given.get(name, inspect.Parameter.empty), args, kwargs))
            for place, value in zip(wanted, values, strict=True):
                if isinstance(place, _Place):
                    ordered[place.index] = value
        return ordered

    def _refusal(self, name: str, planned: Any, given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The reason why an argument is refused, and what to do."""
        assert self.signature is not None
        again = "plan again with example inputs like this call"
        nothing = (None, inspect.Parameter.empty)
        if any(planned is one for one in nothing):
            was = "without it" if planned is inspect.Parameter.empty else "with None for it"
            return f"the argument {name!r} is given as {_text(given)}, the model was planned {was}: leave it out, or {again}"
        if name not in self._said(args, kwargs) or any(given is one for one in nothing):
            return f"the argument {name!r} was planned as {_text(planned)} and is left out: give it so, or {again}"
        if isinstance(given, Mapping) and set(given) & set(self.signature.parameters):
            return f"the argument {name!r} is {_text(given)}, which holds the arguments by name: unpack it, module(**batch)"
        return f"the argument {name!r} is {_text(given)}, the model was planned with {_text(planned)}: give it so, or {again}"

    def _said(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str]:
        """The names of the arguments that a call gives, defaults apart."""
        assert self.signature is not None
        return {*self.signature.bind(*args, **kwargs).arguments, *kwargs}

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the signature, defaults included, further keywords as if they were in it."""
        assert self.signature is not None
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(f"the model cannot be called so: {error}; it takes {self.signature}") from error
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            further = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found.update(value if further else {name: value})
        return found


def other_input(name: str, given: Tensor, planned: Described, part: tuple[int, ...]) -> str:
    """The reason why an input of other sizes or another type is refused, and what to do.

    `part`: the shape that a rank must give.
    """
    if part != planned.shape:
        count = planned.shape[0] // part[0]
        return (
            f"input {name!r} is {given.dtype} {list(given.shape)}; each of {count} ranks is given its part, {planned.dtype} {list(part)} "
            "(full_batch=True: each is given all of it)"
        )
    text = f"input {name!r} is {given.dtype} {list(given.shape)}, the plan is for {planned.dtype} {list(planned.shape)}"
    rest = planned.shape[1:]
    if given.dim() and tuple(given.shape[1:]) == rest and given.shape[0] != planned.shape[0]:
        again = f"--batch {given.shape[0]} (autopar.plan(..., batch={given.shape[0]}, reuse_from=plan))"
        return f"{text}: give it a batch of {planned.shape[0]}, or plan again with {again}"
    if tuple(given.shape) == tuple(planned.shape):
        return f"{text}: cast it, or plan again with such an input"
    return f"{text}: give it in these sizes, or plan again with example inputs of the others (autopar.plan(..., reuse_from=plan))"


def _agree(planned: Any, given: Any) -> bool:
    if isinstance(planned, Tensor) or isinstance(given, Tensor):
        return isinstance(planned, Tensor) and isinstance(given, Tensor)
    return planned is given or bool(planned == given)


def _text(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if tensors := sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return f"a {type(value).__name__} of {tensors} tensor" + ("s" if tensors > 1 else "")
    return "nothing" if value is inspect.Parameter.empty else repr(value)
