"""Exports equal layers of a model once: a model of 61 layers of three kinds costs three layers.

While the model is exported, each call of a layer in a list becomes one operator, and each kind of
layer is exported on its own. `unfolded` then writes the layers' operators in place of the calls.

Two layers are of one kind if they have the same classes, parameters and arguments, and if all that
the code of the first has read of itself is equal in the second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import ModelError

from .known_arguments import KnownArguments, equal_values, value_of
from .reads import of_its_code

CALL = "autopar.layer.default"
"""The operator that stands for a layer's call while the model around it is exported."""
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))

torch.library.define("autopar::layer", "(Tensor[] inputs, int place) -> Tensor[]")


@dataclass(slots=True)
class Kind:
    """A kind of layer: its first layer, and what goes in and comes out.

    `arguments`: tensors without data and plain values, in the order of `spec`. `results`: those of
    a call, None until the first one. `returned`: for each result, the place of the tensor that it
    is among those given. `read`: what its code has read of itself, by the parts' paths.
    """

    layer: torch.nn.Module
    path: str
    arguments: list[Any]
    spec: Any
    read: Mapping[str, frozenset[str]] = field(default_factory=dict)
    results: list[Any] | None = None
    returned: list[int | None] = field(default_factory=list)
    out_spec: Any = None


class Folding:
    """The calls of layers in one export: `places` are those of the paths, in the order of calls."""

    def __init__(self, module: torch.nn.Module, reads: Mapping[str, set[str]]) -> None:
        self.reads = reads
        self.layers = dict(_listed(module, {module}))
        self.known = KnownArguments()
        self.kinds: list[Kind] = []
        self.places: list[tuple[str, Kind]] = []

    def called(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a layer's call, as one operator of the export."""
        layer = self.layers[path]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [leaf if (value := value_of(leaf)) is None else value for leaf in leaves]
        if any(path == other for other, _ in self.places):
            # It has two sets of names then, which its path alone does not tell.
            raise ModelError(f"{path} is called twice")
        if not all(map(_is_passable, leaves)) or _in_a_region():
            return type(layer).forward(layer, *args, **kwargs)
        kind = next((kind for kind in self.kinds if self._fits(kind, path, leaves, spec)), None)
        if kind is None:
            kind = Kind(
                layer=layer, path=path, arguments=[_bare(leaf) for leaf in leaves], spec=spec
            )
            self.kinds.append(kind)
        self.places.append((path, kind))
        tensors = [leaf for leaf in leaves if passed(leaf)]
        made = iter(torch.ops.autopar.layer(tensors, len(self.places) - 1))
        assert kind.results is not None, "known from the first call on"
        results = [next(made) if passed(r) else r for r in kind.results]
        # What changes a returned argument in place is to change the argument.
        results = [
            r if place is None else tensors[place]
            for r, place in zip(results, kind.returned, strict=True)
        ]
        return pytree.tree_unflatten(results, kind.out_spec)

    def fake(self, tensors: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
        """The results of a call: the first one of a kind runs the layer on fake tensors."""
        _, kind = self.places[place]
        if kind.results is None:
            given = iter(tensors)
            leaves = [next(given) if passed(a) else a for a in kind.arguments]
            args, kwargs = pytree.tree_unflatten(leaves, kind.spec)
            with self.known, self.known.called((args, kwargs)):
                outputs = type(kind.layer).forward(kind.layer, *args, **kwargs)
            after, spec = pytree.tree_flatten((args, kwargs))
            changed = spec != kind.spec or any(
                a is not b or not _is_passable(a) for a, b in zip(after, leaves, strict=True)
            )
            if changed:
                # The next layers would not see what this one has put into a list or dict.
                raise ModelError(f"{kind.path} changes the containers that it is given")
            kind.results, kind.out_spec = pytree.tree_flatten(outputs)
            kind.returned = _places_of(kind, tensors)
            if any(value_of(result) is not None for result in kind.results):
                raise ModelError(f"{kind.path} returns numbers that it is given")
            if not all(isinstance(result, (torch.Tensor, *_PLAIN)) for result in kind.results):
                raise ModelError(f"{kind.path} returns more than tensors and numbers")
            own = of_its_code(
                {p: names for p, names in self.reads.items() if _inside(p, kind.path)}
            )
            kind.read = {p.removeprefix(kind.path).lstrip("."): own[p] for p in own}
        return [torch.empty_like(r) for r in kind.results if passed(r)]

    def _fits(self, kind: Kind, path: str, leaves: Sequence[Any], spec: Any) -> bool:
        same = spec == kind.spec and all(map(_alike, leaves, kind.arguments))
        return same and _equal_parts(kind.layer, self.layers[path], kind.read)


@contextmanager
def folding_of(module: torch.nn.Module, reads: Mapping[str, set[str]]) -> Iterator[Folding]:
    """A `Folding` for an export, which has to last until the exported program has been read."""
    folding = Folding(module, reads)
    _present.append(folding)
    try:
        yield folding
    finally:
        _present.pop()


@contextmanager
def folded_calls(folding: Folding) -> Iterator[None]:
    """While this lasts, the layers in lists are called through `folding`."""

    def through(path: str) -> Any:
        return lambda *args, **kwargs: folding.called(path, args, kwargs)

    for path, layer in folding.layers.items():
        layer.forward = through(path)
    try:
        yield
    finally:
        for layer in folding.layers.values():
            del layer.forward


_present: list[Folding] = []


def _results(inputs: Sequence[torch.Tensor], place: int) -> list[torch.Tensor]:
    return _present[-1].fake(inputs, place)


torch.library.register_fake("autopar::layer", _results)


def _listed(
    module: torch.nn.Module, seen: set[torch.nn.Module], path: str = ""
) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers in the outermost lists of several, by their first path.

    Parts with a `forward` of their own, as hooks of other libraries make them, are left.
    """
    for name, child in module.named_children():
        if child in seen:
            continue
        seen.add(child)
        place = f"{path}.{name}" if path else name
        several = isinstance(module, torch.nn.ModuleList) and len(module) > 1
        if several and "forward" not in vars(child):
            yield place, child
        else:
            yield from _listed(child, seen, place)


def _in_a_region() -> bool:
    """Whether gradients are off or types are cast here, which an export of its own would forget."""
    devices = ("cpu", "cuda")
    return not torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, devices))


def passed(leaf: Any) -> bool:
    """Whether a tensor is passed to a layer; one that is known belongs to the kind of layer."""
    return isinstance(leaf, torch.Tensor) and value_of(leaf) is None


def _is_passable(leaf: Any) -> bool:
    """Whether an argument tells a layer all at once.

    Containers of other classes that are empty do, as long as no layer puts something into them.
    """
    empty = isinstance(leaf, MutableMapping) and not leaf
    return empty or isinstance(leaf, (torch.Tensor, *_PLAIN))


def _places_of(kind: Kind, given: Sequence[torch.Tensor]) -> list[int | None]:
    """Which of the given tensors each result is; `ModelError` if one shares memory otherwise."""
    assert kind.results is not None
    state = (*kind.layer.parameters(), *kind.layer.buffers())
    others = {_memory(tensor) for tensor in (*given, *state)}
    places: list[int | None] = []
    for result in kind.results:
        same = [place for place, tensor in enumerate(given) if tensor is result]
        places.append(same[0] if len(same) == 1 and passed(result) else None)
        if not passed(result) or len(same) == 1:
            continue
        if _memory(result) in others:
            # A change in place of one would have to be one of the other.
            raise ModelError(f"{kind.path} returns a view of what it is given or returns")
        others.add(_memory(result))
    return places


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _bare(leaf: Any) -> Any:
    """A tensor of the same shape and type on the meta device; anything else as it is."""
    if not passed(leaf):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        values = (value_of(one), value_of(other))
        if any(value is not None for value in values):
            return one is other or equal_values(*values)
        return one.shape == other.shape and one.dtype == other.dtype
    return type(one) is type(other) and bool(one == other)


def _equal_parts(
    one: torch.nn.Module, other: torch.nn.Module, read: Mapping[str, frozenset[str]]
) -> bool:
    """Whether two layers have the same parts, and equal values under the names `read`."""
    ones = dict(one.named_modules())
    others = dict(other.named_modules())
    same = ones.keys() == others.keys() and _ties(one) == _ties(other)
    return same and all(
        type(part) is type(others[path])
        and vars(part)["training"] == vars(others[path])["training"]
        and _equal_state(part, others[path])
        and all(_equal_attribute(part, others[path], name) for name in read.get(path, ()))
        for path, part in ones.items()
    )


def equal_layers(
    one: torch.nn.Module, other: torch.nn.Module, path: str, reads: Mapping[str, frozenset[str]]
) -> bool:
    """Whether two layers of a list compute the same but for the values of their parameters.

    `reads`: what the model's code has read, by the parts' paths; `path`: of the first layer.
    """
    own = {p.removeprefix(path).lstrip("."): reads[p] for p in reads if _inside(p, path)}
    return _equal_parts(one, other, own)


def _ties(layer: torch.nn.Module) -> dict[str, str]:
    """Each parameter and buffer of a layer, and the first name of the same tensor in it."""
    first: dict[torch.Tensor, str] = {}
    named = (
        *layer.named_parameters(remove_duplicate=False),
        *layer.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(value, name) for name, value in named}


def _equal_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    def state(part: torch.nn.Module) -> list[Any]:
        own = {**part._parameters, **part._buffers}
        return [
            (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
            for name, t in own.items()
        ]

    return state(one) == state(other)


def _equal_attribute(one: torch.nn.Module, other: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is equal; parameters, buffers and parts are compared elsewhere."""
    if name in {*one._parameters, *one._buffers, *one._modules, "forward"}:
        return True
    # Past the record of what the model's own code reads.
    try:
        first = object.__getattribute__(one, name)
        second = object.__getattribute__(other, name)
    except AttributeError:
        return not (hasattr(type(one), name) or name in vars(one) or name in vars(other))
    # Methods of two layers are bound to these; their code is that of the class.
    if getattr(first, "__self__", None) is one and getattr(second, "__self__", None) is other:
        return getattr(first, "__func__", None) is getattr(second, "__func__", None)
    if first is second:
        return True
    if isinstance(first, functools.partial) and isinstance(second, functools.partial):
        # Partial functions are equal only to themselves.
        parts = [(f.func, f.args, f.keywords) for f in (first, second)]
        return parts[0] == parts[1]
    if isinstance(first, (torch.Tensor, torch.nn.Module)):
        return False
    try:
        return type(first) is type(second) and bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False
