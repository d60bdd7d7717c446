"""Numbers that a call is given for ever, such as the sizes of images, followed through an export.

A real tensor among fake ones is known. Inside a module that is called with one, all that is made of
known tensors and of plain numbers alone is known too: it is computed, and not written down. So code
may read its values, which set the shapes of what follows.

Code may also leave out rows of a batch by their values, such as images that are all zeros. A batch
is planned to have none of these, which is asserted of every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

KNOWN_NUMBERS = 2**27
"""The most elements of a tensor that is computed while a module is exported."""
_NO_TENSORS = (bool, int, float, str, slice, torch.dtype, torch.device, type(None))
_Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tensor was made of a batch alone: the result at `place` of a function.

    None: it is a tensor of the batch.
    """

    function: _Function | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    place: int = 0


def value_of(leaf: Any) -> torch.Tensor | None:
    """The real tensor that is known of an argument, if there is one."""
    if isinstance(leaf, FakeTensor):
        return leaf.constant
    real = type(leaf) is torch.Tensor and leaf.device.type == "cpu"
    return leaf if real and not leaf.requires_grad else None


def equal_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both tensors are known, and the same."""
    if one is None or other is None or one.dtype != other.dtype:
        return False
    with _in_earnest():
        return torch.equal(one, other)


class KnownArguments(TorchFunctionMode):
    """Computes what functions make of known tensors, inside the modules that are given some."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = [False]
        self.of_batch: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        function: _Function,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        tensors = _tensors((args, given))
        if self.inside[-1]:
            values = [self._value(tensor) for tensor in tensors]
            known = [value for value in values if value is not None]
            if len(known) == len(values) and _is_small(function, args, given, known):
                return self._computed(function, args, given)
        if not tensors or not all(tensor in self.of_batch for tensor in tensors):
            return function(*args, **given)
        if function is torch.Tensor.__getitem__ and _selects_rows(*args):
            return self._all_rows(*args)
        result = function(*args, **given)
        for place, tensor in enumerate(_tensors(result)):
            if tensor not in self.of_batch:
                self.of_batch[tensor] = _Made(function, args, given, place)
        return result

    def enter(self, given: Any) -> None:
        """A call of a module with these arguments begins, until `leave`."""
        self.inside.append(any(value_of(tensor) is not None for tensor in _tensors(given)))

    def leave(self) -> None:
        """The innermost call has ended."""
        self.inside.pop()

    @contextmanager
    def called(self, given: Any) -> Iterator[None]:
        """A call of a module with these arguments."""
        self.enter(given)
        try:
            yield
        finally:
            self.leave()

    def note_batch(self, given: Any) -> None:
        """Note the tensors of a batch."""
        for tensor in _tensors(given):
            self.of_batch[tensor] = _Made()

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is known, or made of rows of a batch that have become so."""
        value = value_of(tensor)
        made: _Made | None = self.of_batch.get(tensor)
        if value is not None or made is None or made.function is None:
            return value
        sources = _tensors((made.args, made.kwargs))
        if any(self._value(source) is None for source in sources):
            return None
        return _tensors(self._computed(made.function, made.args, made.kwargs))[made.place]

    def _computed(
        self, function: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        def real(leaf: Any) -> Any:
            return self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf

        own_args, own_kwargs = pytree.tree_map(real, (args, dict(kwargs)))
        with _in_earnest():
            return function(*own_args, **own_kwargs)

    def _all_rows(self, values: torch.Tensor, rows: FakeTensor) -> torch.Tensor:
        """All rows of the values; from here on the rows that are chosen are known."""
        torch._check(rows.all().item())  # type: ignore[no-untyped-call]
        with _in_earnest():
            rows.constant = torch.ones(rows.shape, dtype=torch.bool, device="cpu")
        self.inside[-1] = True
        return values


@contextmanager
def known_arguments(module: torch.nn.Module, mode: KnownArguments) -> Iterator[None]:
    """While this lasts, the known arguments of the module's parts are followed."""

    def enter(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
        mode.enter((args, kwargs))
        if part is module:
            mode.note_batch((args, kwargs))

    def leave(part: torch.nn.Module, args: Any, result: Any) -> None:
        mode.leave()

    hooks = [
        hook
        for part in module.modules()
        for hook in (
            part.register_forward_pre_hook(enter, with_kwargs=True),
            part.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _in_earnest() -> Iterator[None]:
    """While this lasts, functions compute, whatever is exported."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _tensors(given: Any) -> list[torch.Tensor]:
    """The tensors of a structure, in order; the commonest ones without torch's slow walk."""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, _NO_TENSORS):
        return []
    if type(given) in (tuple, list, dict):
        parts = given.values() if isinstance(given, dict) else given
        return [tensor for part in parts for tensor in _tensors(part)]
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _selects_rows(values: torch.Tensor, index: Any) -> bool:
    """Whether an index takes some of the values along their first dim, by truth values."""
    return (
        isinstance(index, FakeTensor)
        and index.dtype == torch.bool
        and index.shape == values.shape[:1]
        and values.is_floating_point()
    )


def _is_small(
    function: _Function,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known: Sequence[torch.Tensor],
) -> bool:
    """Whether a function makes tensors that are small enough to be computed, of known ones."""
    if known:
        return _together(known) <= KNOWN_NUMBERS
    if function not in _device_constructors():
        return False
    with _in_earnest():
        made = function(*args, **{**kwargs, "device": "meta"})
    return bool(made.numel() <= KNOWN_NUMBERS)


def _together(tensors: Sequence[torch.Tensor]) -> int:
    """The elements of what is elementwise of tensors."""
    try:
        shapes = [one.shape for one in tensors]
        return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return sum(tensor.numel() for tensor in tensors)
