"""Records the aten calls that a piece of torch makes, as the importer would name them, with the
values that they were given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_pre_dispatch, enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.graph import DTYPE_BYTES

# Where memory lies, and which generator draws: the runtime decides both.
_PLACEMENT = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking", "generator"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One call: its kind, and its arguments by their formal names, tensors as they were before the
    call.

    `signature` tells calls apart: kind, shapes, dtypes, and every other argument by value.
    """

    kind: str
    arguments: Mapping[str, Any]

    signature: str

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        lists = [
            value if isinstance(value, list | tuple) else [value]
            for value in self.arguments.values()
        ]
        return [value for values in lists for value in values if isinstance(value, Tensor)]


def spell(value: Any) -> str:
    """A value by what decides on a rule: a tensor by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spell, value))}]"
    return repr(value)


class _Recorder(SchemaCheckMode):
    """Sees every call: before autograd and before composite operators fall apart (`early`), or
    after both.

    Of the dispatch modes that torch lets stand in front of autograd, only the base class's place is
    free for others.
    """

    def __init__(self, kinds: Collection[str], seen: set[str], *, early: bool) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch if early else None)
        self.kinds = kinds
        self.seen = seen
        self.calls: list[Captured] = []

    def __enter__(self) -> Any:
        return TorchDispatchMode.__enter__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, given = _named(func, args, kwargs or {})
        if kind in self.kinds:
            signature = (
                f"{kind}({', '.join(f'{name}={spell(value)}' for name, value in given.items())})"
            )
            if signature not in self.seen and all(map(_held_by_a_graph, given.values())):
                self.seen.add(signature)
                kept = {name: _value(value) for name, value in given.items()}
                self.calls.append(Captured(kind=kind, arguments=kept, signature=signature))
        return func(*args, **(kwargs or {}))


def capture(run: Callable[[], Any], kinds: Collection[str], seen: set[str]) -> Iterator[Captured]:
    """The calls of operators among `kinds` that `run` makes, composite ones and those that they are
    made of, unless in `seen`.

    Calls are added to `seen`. Where `run` fails, those that it has made until then are given.
    """
    for early in (True, False):
        recorder = _Recorder(kinds, seen, early=early)
        with contextlib.ExitStack() as stack:
            if early:
                stack.enter_context(enable_python_dispatcher())
                stack.enter_context(enable_pre_dispatch())
            stack.enter_context(recorder)
            # A sample that this build of torch refuses, or one that a change of its sizes has made
            # illegal, ends here.
            with contextlib.suppress(Exception):
                run()
        yield from recorder.calls


def _named(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Kind and arguments of a call as the importer reads it."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if func._schema.name == "aten::squeeze":
        return "aten.squeeze.dims", {"self": given["self"], "dim": _dims_of_one(given)}
    return str(func), {name: value for name, value in given.items() if name not in _PLACEMENT}


def _dims_of_one(given: Mapping[str, Any]) -> list[int]:
    shape = given["self"].shape
    wanted = given.get("dim", range(len(shape)))
    dims = {dim % max(len(shape), 1) for dim in ((wanted,) if isinstance(wanted, int) else wanted)}
    return sorted(dim for dim in dims if dim < len(shape) and shape[dim] == 1)


def _held_by_a_graph(value: Any) -> bool:
    """Whether a graph can hold the value: no sparse, quantised or nested tensors."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and not value.is_quantized and not value.is_nested
        return plain and str(value.dtype).removeprefix("torch.") in DTYPE_BYTES
    if isinstance(value, list | tuple):
        return all(map(_held_by_a_graph, value))
    return value is None or isinstance(value, torch.dtype | bool | int | float | str)


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_value(item) for item in value] if isinstance(value, list | tuple) else value
