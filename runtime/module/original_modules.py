"""The original module's tree of submodules and their plain attributes, without tensors or code.

`module.config` is the original's; `module.layers[0]` and `len(module.layers)` work as before. A
submodule here holds parameters and buffers of the plan. It has no forward pass apart from the whole
model's, and says so when called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.facts import Fact, Facts, FactsOf
from autopar.model import TorchModel

from .own_state import OwnState
from .plain_attributes import Original


class Recalling(OwnState):
    """A module that answers for plain attributes of an original, where there is one."""

    _original: Original | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._original is None or name.startswith("_"):
                raise
        return self._original.value(name, self)

    def __dir__(self) -> list[str]:
        names = set(super().__dir__())  # type: ignore[no-untyped-call]
        if self._original is not None:
            names.update(self._original.names())
        return sorted(names)


class OriginalModule(Recalling):
    """A submodule of the original, which `isinstance` takes for one of the original's class."""

    # Scripts sort parameters and initialise modules by type. `type()` still tells this class.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return OriginalModule if self._original is None else self._original.kind

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the plan is of the whole model."""
        name = self._original.kind.__name__ if self._original is not None else "submodule"
        raise PlanError(
            f"this {name} is part of a planned model and has no forward pass of its own: call the "
            "whole planned module"
        )

    def _no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: nothing would call them."""
        raise PlanError(
            "parts of a planned model are not called one by one, and hooks on them would never "
            "run: put them on the whole"
        )

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = _no_hooks

    def _get_name(self) -> str:
        kind = type(self) if self._original is None else self._original.kind
        return kind.__name__


class OriginalList(OriginalModule, nn.ModuleList):
    """A list of submodules."""


class OriginalSequence(OriginalModule, nn.Sequential):
    """A sequence of submodules."""


class OriginalDict(OriginalModule, nn.ModuleDict):
    """A dict of submodules."""


class OriginalParameters(OriginalModule, nn.ParameterList):
    """A list of parameters."""


class OriginalNamedParameters(OriginalModule, nn.ParameterDict):
    """A dict of parameters."""


_KINDS: Mapping[type[nn.Module], type[OriginalModule]] = {
    nn.ModuleList: OriginalList,
    nn.Sequential: OriginalSequence,
    nn.ModuleDict: OriginalDict,
    nn.ParameterList: OriginalParameters,
    nn.ParameterDict: OriginalNamedParameters,
}
CONTAINERS = frozenset(_KINDS.values())


def recall(
    root: Recalling, module: nn.Module, reads: Mapping[str, frozenset[str]], path: str = ""
) -> None:
    """Give `root` the submodules of `module`, still without parameters, and plain attributes.

    `reads`: the attributes that the program rests on, by the submodule's path.
    """
    root._original = Original(module, path, reads)
    for name, child in module._modules.items():
        if child is None:
            root._modules[name] = None
        elif is_free(root, name):
            part = _part(child)
            root._modules[name] = part
            recall(part, child, reads, f"{path}.{name}" if path else name)


def facts_of(root: Recalling, model: TorchModel) -> list[Fact]:
    """The facts of a model, those of objects among the attributes of its modules included."""
    known = model.facts or Facts()
    find = FactsOf(known.names, known.whole)
    parts = (part._original for part in root.modules() if isinstance(part, Recalling))
    return [*known.of_code, *(fact for own in parts if own for fact in own.facts(find))]


def _part(module: nn.Module) -> OriginalModule:
    """An empty submodule of the kind that stands for a module's."""
    kinds = (ours for torchs, ours in _KINDS.items() if isinstance(module, torchs))
    part = next(kinds, OriginalModule)()
    # torch's containers of parameters count and name their members themselves.
    if isinstance(module, nn.ParameterList):
        vars(part)["_size"] = len(module)
    if isinstance(module, nn.ParameterDict):
        vars(part)["_keys"] = dict.fromkeys(module.keys())
    return part


def is_free(module: nn.Module, name: str) -> bool:
    """Whether a name is free in a module; its original's attributes do not count."""
    taken = (vars(module), module._parameters, module._buffers, module._modules)
    return (
        bool(name) and not any(name in held for held in taken) and not hasattr(type(module), name)
    )


def attach(
    root: nn.Module, path: str, value: Tensor, *, saved: bool = True
) -> tuple[nn.Module, str]:
    """Register a parameter or a buffer under its module path; `saved`: in the state dict.

    If the path is taken, by an attribute say, underscores take the place of dots.
    """
    *parents, leaf = path.split(".")
    module = root
    for part in parents:
        child = module._modules.get(part)
        if child is None:
            if not is_free(module, part):
                return attach(root, path.replace(".", "_"), value, saved=saved)
            child = Recalling()
            module.add_module(part, child)
        module = child
    if not is_free(module, leaf):
        other = (path.replace(".", "_") if parents else path) + "_"
        return attach(root, other, value, saved=saved)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=saved)
    return module, leaf


def held(module: nn.Module, leaf: str) -> Any:
    """The present value under a name, which may be another tensor than was registered."""
    # Every step reads every parameter several times: `getattr` looks in many places first.
    value = module._parameters.get(leaf)
    return getattr(module, leaf) if value is None else value
