"""How a planned model is called: in the order, under the names and with the constants of the call it was planned for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.model import LoadedModel


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a planned argument among the leaves of the planned call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How the model was called when it was planned: `leaves` of the call, their structure, and the model's signature."""

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
        """The tensors of a call in the order of the planned one; what is no tensor must be as it was planned."""
        given, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec != self.spec and self.signature is not None:
            given = self._ordered(args, kwargs)
        elif spec != self.spec:
            raise PlanError(f"the model was planned for arguments of the form {self.spec}, called with {spec}")
        for planned, value in zip(self.leaves, given, strict=bool(self.leaves)):
            if not _agree(planned, value):
                raise PlanError(f"the model was planned with {_text(planned)} where it is called with {_text(value)}")
        return [value for value in given if isinstance(value, Tensor)]

    def _ordered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call that passes the planned arguments in another way: by name, in another order, defaults left out."""
        assert self.signature is not None
        places = pytree.tree_unflatten([_Place(i) for i in range(len(self.leaves))], self.spec)
        planned, given = self._bound(*places), self._bound(args, kwargs)
        ordered = list(self.leaves)
        for name, mine in planned.items():
            wanted, wanted_spec = pytree.tree_flatten(mine)
            values, spec = pytree.tree_flatten(given.get(name, inspect.Parameter.empty))
            agree = spec == wanted_spec and all(isinstance(w, _Place) or _agree(w, v) for w, v in zip(wanted, values, strict=True))
            if not agree:
                shown = [_text(self.leaves[w.index]) if isinstance(w, _Place) else _text(w) for w in wanted]
                raise PlanError(f"the model was planned for {name} = {', '.join(shown)}, called with {', '.join(map(_text, values))}")
            for place, value in zip(wanted, values, strict=True):
                if isinstance(place, _Place):
                    ordered[place.index] = value
        return ordered

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the signature, defaults included, further keywords as if they were in it."""
        assert self.signature is not None
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PlanError(f"the model cannot be called so: {error}") from error
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            further = self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found.update(value if further else {name: value})
        return found


def _agree(planned: Any, given: Any) -> bool:
    if isinstance(planned, Tensor) or isinstance(given, Tensor):
        return isinstance(planned, Tensor) and isinstance(given, Tensor)
    return planned is given or bool(planned == given)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "nothing" if value is inspect.Parameter.empty else repr(value)
