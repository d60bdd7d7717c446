"""A function of tensors as a module, whose operator so has a path of its own in a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class OperatorModule(nn.Module):
    """Calls `function`; keep it as an attribute of a module, as any layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """Call the function."""
        return self.function(*inputs, **arguments)

    def extra_repr(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", self.function))
