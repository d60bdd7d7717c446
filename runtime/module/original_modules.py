"""The original module's tree of submodules and their plain attributes, without tensors or code.

`module.config` is the original's; `module.layers[0]` and `len(module.layers)` work as before. A
submodule here holds parameters and buffers of the plan. It has no forward pass apart from the whole
model's, and says so when called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import PlanError

from .changes import Change, refused
from .own_state import OwnState
from .plain_attributes import Original, Unkept


class Recalling(OwnState):
    """A module that answers for plain attributes of an original, where there is one."""

    _original: Original | None = None
    # Of the whole module, by path and name; None where no program can follow.
    _changes: dict[tuple[str, str], Change] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._original is None or name.startswith("_"):
                raise
        return self._original.value(name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._original is not None and value is not self._modules.get(name, self):
            self._note(self._original, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._original is not None:
            self._note(self._original, name, Unkept())
        super().__delattr__(name)

    def _note(self, original: Original, name: str, value: object) -> None:
        """Note the change of an attribute that the program rests on, or refuse it."""
        if name not in original.read:
            return
        change = original.change(name, value)
        changes = self._changes
        if change is None:
            if changes is not None:
                changes.pop((original.path, name), None)
        elif changes is None:
            raise refused(change, "the model cannot be exported once more")
        # Containers are looked at in each call, since they may change in place, too.
        elif name not in original.copies:
            changes[original.path, name] = change

    def changed_containers(self) -> Iterator[Change]:
        """The changes of lists, dicts and sets that were read."""
        original = self._original
        for name in original.copies if original is not None else ():
            assert original is not None
            change = original.change(name, vars(self).get(name, original.read[name]))
            if change is not None:
                yield change

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


def follow(root: Recalling) -> None:
    """Let a module and its parts note changes that other programs may follow."""
    changes: dict[tuple[str, str], Change] = {}
    for part in root.modules():
        if isinstance(part, Recalling):
            part._changes = changes


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
