"""`Elsewhere`: a tensor that another stage holds, of true shape and type, without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn

from autopar.errors import PlanError

from .gradient_figures import Figures


class Holders(Protocol):
    """A planned module's stages, as far as its stand-ins must know them."""

    device: torch.device

    def wrap(self, value: Tensor) -> Tensor:
        """A value that all ranks have, as one of the tensors that this rank's parameters are."""

    def all_lack_one(self, missing: Sequence[Elsewhere], present: Sequence[Tensor]) -> bool:
        """Whether every rank lacks one of the `missing` values, or of those `present` here."""

    def exchanged(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values of which every rank has some, whole; collective."""

    def read_gradients(self, outputs: Any, inputs: Sequence[Tensor], **options: Any) -> Any:
        """As `torch.autograd.grad`, also of stand-ins; collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the tensor behind a stand-in is.

    `stages`: those that hold it; none if no rank has it. `unsure`: ranks that lack another tensor
    may have been told this figure of it.
    """

    name: str
    holders: Holders
    stages: frozenset[int]
    unsure: bool = False

    def refuse(self, doing: str) -> NoReturn:
        """Refuse what needs values."""
        raise PlanError(
            f"{self.name!r} is a parameter of another pipeline stage, of whose values this rank "
            f"has none for {doing}: clip with module.clip_grad_norm_(...), read whole weights on "
            "every rank with module.full_values(module.graph_parameters()), save with "
            "autopar.save, or plan without stages"
        )


class Elsewhere(Tensor):
    """A tensor of another stage, or one made of such.

    `kind`: elements that the figures describe (see `gradient_figures.py`). `whole`: it has all
    elements that they are of. `aside`: its gradient, while an optimizer makes a step.
    """

    origin: Origin
    figures: Figures
    kind: str
    whole: bool
    aside: Tensor | None

    @classmethod
    def of(
        cls,
        like: Tensor,
        origin: Origin,
        figures: Figures | None = None,
        *,
        kind: str = "values",
        whole: bool = True,
        device: torch.device | None = None,
    ) -> Self:
        """A stand-in of the shape and type of another tensor."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            # Torch's optimizers and clipping sort tensors by their device.
            device=device or origin.holders.device,
        )
        made.origin = origin
        made.figures = figures or Figures()
        made.kind = kind
        made.whole = whole
        made.aside = None
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = list(self.shape)
        return f"Elsewhere({self.origin.name!r}, shape={shape}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        other: Tensor = self.detach().clone()
        if isinstance(self, nn.Parameter):
            other = nn.Parameter(other, requires_grad=self.requires_grad)
        memo[id(self)] = other
        if self.grad is not None:
            other.grad = copy.deepcopy(self.grad, memo)
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.origin.refuse("a file (torch.save, pickle)")

    def full_tensor(self) -> NoReturn:
        """Refused: ranks of the stage that holds it do not take part."""
        self.origin.refuse("full_tensor()")

    # Torch's distributed checkpoints ask each rank what it writes and reads of a tensor.
    def __create_write_items__(self, *_: Any) -> list[Any]:
        """Nothing: its holders write it."""
        return []

    def __create_chunk_list__(self) -> list[Any]:
        """Nothing: its holders read it."""
        return []

    def share_memory_(self) -> Self:
        """Nothing, since there is no memory to share."""
        return self


def outside(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call without the treatment of torch's functions of stand-ins."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
