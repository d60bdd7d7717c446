"""Arguments of a call, brought into the order and under the names of the planned call.

A plan is made for one call. Tensors may be others in the next ones; all else must be as planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.ir import Tensor as Described
from autopar.model import LoadedModel

_ABSENT = inspect.Parameter.empty
"""Stands for an argument that is not there."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A stand-in for a planned argument, with its place among the leaves of the planned call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The planned call: its `leaves`, their structure, and the model's signature."""

    leaves: tuple[Any, ...]
    spec: Any
    signature: inspect.Signature | None

    @classmethod
    def of(cls, model: LoadedModel) -> Arguments | None:
        """The planned call of a model; None for ONNX models, whose inputs are known by name."""
        if model.torch is None:
            return None
        if model.call is None:
            return cls(leaves=(), spec=model.torch.in_spec, signature=None)
        leaves, spec = pytree.tree_flatten(model.call)
        signature = inspect.signature(model.module.forward)
        return cls(leaves=tuple(leaves), spec=spec, signature=signature)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the planned one.

        Other arguments must be as planned, or `PlanError` is raised.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec:
            if self.signature is None:
                raise PlanError(
                    f"the model was planned for arguments of the form {self.spec}, "
                    f"called with {spec}"
                )
            leaves = self._ordered(args, kwargs)
        pairs = zip(self.leaves, leaves, strict=bool(self.leaves))
        if not all(_agree(planned, value) for planned, value in pairs):
            # By name once more: the message then names the argument that differs.
            leaves = self._ordered(args, kwargs)
        return [value for value in leaves if isinstance(value, Tensor)]

    def _ordered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call that passes the planned arguments differently.

        They may come by name, in another order, or without defaults.
        """
        assert self.signature is not None
        stand_ins = [_Place(i) for i in range(len(self.leaves))]
        planned = self._bound(*pytree.tree_unflatten(stand_ins, self.spec))
        present = self._bound(args, kwargs)
        for name, value in present.items():
            if name not in planned:
                raise PlanError(self._refusal(name, _ABSENT, value, self._said(args, kwargs)))
        ordered = list(self.leaves)
        for name, argument in planned.items():
            value = present.get(name, _ABSENT)
            wanted, wanted_spec = pytree.tree_flatten(argument)
            values, spec = pytree.tree_flatten(value)
            before = [self.leaves[w.index] if isinstance(w, _Place) else w for w in wanted]
            if spec != wanted_spec or not all(map(_agree, before, values)):
                was = pytree.tree_unflatten(before, wanted_spec)
                raise PlanError(self._refusal(name, was, value, self._said(args, kwargs)))
            for place, leaf in zip(wanted, values, strict=True):
                if isinstance(place, _Place):
                    ordered[place.index] = leaf
        return ordered

    def _refusal(self, name: str, planned: Any, value: Any, said: Collection[str]) -> str:
        """The reason why an argument is refused, and what to do.

        `said`: the names of the arguments that the call gives itself.
        """
        assert self.signature is not None
        replan = "plan again with example inputs like this call"
        if planned is None or planned is _ABSENT:
            was = "without it" if planned is _ABSENT else "with None for it"
            return (
                f"the argument {name!r} is given as {_text(value)}, the model was planned {was}: "
                f"leave it out, or {replan}"
            )
        if name not in said or value is None or value is _ABSENT:
            return (
                f"the argument {name!r} was planned as {_text(planned)} and is left out: "
                f"give it so, or {replan}"
            )
        if isinstance(value, Mapping) and set(value) & set(self.signature.parameters):
            return (
                f"the argument {name!r} is {_text(value)}, which holds the arguments by name: "
                "unpack it, module(**batch)"
            )
        return (
            f"the argument {name!r} is {_text(value)}, the model was planned with "
            f"{_text(planned)}: give it so, or {replan}"
        )

    def _said(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str]:
        """The names of the arguments that a call gives, defaults apart."""
        assert self.signature is not None
        return {*self.signature.bind(*args, **kwargs).arguments, *kwargs}

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the signature, defaults included.

        Further keywords (`**kwargs`) count as if they were in it.
        """
        assert self.signature is not None
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(
                f"the model cannot be called so: {error}; it takes {self.signature}"
            ) from error
        bound.apply_defaults()
        by_name: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            further = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            by_name.update(value if further else {name: value})
        return by_name


def other_input(name: str, given: Tensor, planned: Described, part: tuple[int, ...]) -> str:
    """The reason why an input of other sizes or another type is refused, and what to do.

    `part`: the shape that a rank must give.
    """
    if part != planned.shape:
        count = planned.shape[0] // part[0]
        return (
            f"input {name!r} is {given.dtype} {list(given.shape)}; each of {count} ranks is given "
            f"its part, {planned.dtype} {list(part)} (full_batch=True: each is given all of it)"
        )
    text = (
        f"input {name!r} is {given.dtype} {list(given.shape)}, "
        f"the plan is for {planned.dtype} {list(planned.shape)}"
    )
    rest = planned.shape[1:]
    if given.dim() and tuple(given.shape[1:]) == rest and given.shape[0] != planned.shape[0]:
        batch = given.shape[0]
        options = f"--batch {batch} (autopar.plan(..., batch={batch}, reuse_from=plan))"
        return f"{text}: give it a batch of {planned.shape[0]}, or plan again with {options}"
    if tuple(given.shape) == tuple(planned.shape):
        return f"{text}: cast it, or plan again with such an input"
    return (
        f"{text}: give it in these sizes, or plan again with example inputs of the others "
        "(autopar.plan(..., reuse_from=plan))"
    )


def _agree(planned: Any, value: Any) -> bool:
    """Whether an argument is as planned; of tensors it is asked later, by size and type."""
    if isinstance(planned, Tensor) or isinstance(value, Tensor):
        return isinstance(planned, Tensor) and isinstance(value, Tensor)
    return planned is value or bool(planned == value)


def _text(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if tensors := sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
        return f"a {type(value).__name__} of {tensors} tensor" + ("s" if tensors > 1 else "")
    return "nothing" if value is _ABSENT else repr(value)
