"""A module on one device that is called with casts of its masters, as plans with a master type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class Mastered(nn.Module):
    """A module called with casts of `masters`, to which the gradients flow.

    `masters`: by the paths of their parameters.
    """

    def __init__(self, module: nn.Module, masters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module = module
        self._masters = dict(masters)
        self._dtypes = {path: value.dtype for path, value in module.named_parameters()}

    def forward(self, *inputs: Tensor) -> Any:
        """Call the module with cast masters."""
        cast = {path: master.to(self._dtypes[path]) for path, master in self._masters.items()}
        return functional_call(self.module, cast, inputs)


def mastered(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The module with `masters` of some of its `parameters`, and the parameters to be trained.

    Both are by their names in the graph.
    """
    path = {id(value): name for name, value in module.named_parameters()}
    leaves = {
        name: nn.Parameter(value.clone(), parameters[name].requires_grad)
        for name, value in masters.items()
        if name in parameters
    }
    if not leaves:
        return module, dict(parameters)
    own = Mastered(module, {path[id(parameters[name])]: leaf for name, leaf in leaves.items()})
    return own, {**parameters, **leaves}
