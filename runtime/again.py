"""What is not kept for the backward pass but made again there: parts of a program, and gathered parameters.

A part (its operators, and the redistributions that belong to them) runs without autograd; its backward pass runs it once more, from the
same random state, and then backwards (T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016). A gathered parameter is
recognised among what autograd keeps by its storage; its shard is kept instead, and gathered again at the first operator that asks for it,
for all that do (stage 3 of S. Rajbhandari et al., ZeRO, 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .collectives import Chain, act, step


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that operators on `device` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Draw from this state on."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Again(torch.autograd.Function):
    """A part of a program: forward it keeps what it is given, backward it runs once more."""

    @staticmethod
    def forward(ctx: Any, part: MadeAgain, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.state = random_state(part.device)
        ctx.save_for_backward(*values)
        ctx.set_materialize_grads(False)
        given = {id(value) for value in values}
        out = tuple(o.view_as(o) if id(o) in given else o for o in part.run(*values))
        ctx.mark_non_differentiable(*(o for o, wanted in zip(out, part.differentiable, strict=True) if not wanted))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        part: MadeAgain = ctx.part
        wanted = ctx.needs_input_grad[1:]
        values = [v.detach().requires_grad_(w) for v, w in zip(ctx.saved_tensors, wanted, strict=True)]
        now = random_state(part.device)
        set_random_state(part.device, ctx.state)
        with torch.enable_grad():
            out = part.run(*values)
        set_random_state(part.device, now)
        pairs = [(o, g) for o, g in zip(out, gradients, strict=True) if g is not None and o.requires_grad]
        asked = [value for value in values if value.requires_grad]
        found = iter(torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True) if pairs else ())
        return (None, *(next(found, None) if w else None for w in wanted))


class MadeAgain:
    """A part of a program whose values are made again in the backward pass; `differentiable`: which of its outputs have a gradient."""

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], differentiable: tuple[bool, ...], device: torch.device) -> None:
        self.run, self.differentiable, self.device = run, differentiable, device

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The part's outputs."""
        if not torch.is_grad_enabled() or not any(value.requires_grad for value in values):
            return self.run(*values)
        out: tuple[Tensor, ...] = _Again.apply(self, *values)  # type: ignore[no-untyped-call]
        return out


class _Gathered:
    """A gathered value of one forward pass: how to make it again, and who still asks for it."""

    def __init__(self, value: Tensor, source: Callable[[], Tensor], chain: Chain, *, asked_for: bool) -> None:
        self.asked_for = asked_for
        self.storage: Any = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        self.source, self.chain = source, chain
        self.asked = 0
        self.again: Tensor | None = None

    def make(self) -> Tensor:
        """The value once more."""
        value = self.source()
        with torch.no_grad():
            for ahead, _, group in self.chain:
                value = act(value, ahead, group)
        return value

    def take(self) -> Tensor:
        """The value for one of those that ask for it; the last of them lets go of it."""
        value = self.make() if self.again is None else self.again
        self.asked -= 1
        self.again = value if self.asked > 0 else None
        return value


_View = tuple[_Gathered, torch.Size, tuple[int, ...], Any]


class Gathering:
    """The gathered values of one forward pass, by their storage."""

    def __init__(self) -> None:
        self.known: dict[int, _Gathered] = {}

    def find(self, value: Tensor) -> _Gathered | None:
        """What was gathered into the storage of a value."""
        if isinstance(value, DTensor):
            return None
        found = self.known.get(value.untyped_storage()._cdata)
        return found if found is not None and not found.storage.expired() else None

    def pack(self, value: Tensor) -> Tensor | _View:
        """What autograd keeps of a value."""
        found = self.find(value)
        if found is None or not found.asked_for:
            return value
        found.asked += 1
        return found, value.size(), value.stride(), value.storage_offset()

    @staticmethod
    def unpack(kept: Tensor | _View) -> Tensor:
        """The value that autograd asks for."""
        if isinstance(kept, Tensor):
            return kept
        gathered, size, stride, offset = kept
        return gathered.take().as_strided(size, stride, offset)


_current: list[Gathering] = []


@contextmanager
def gathering_again() -> Iterator[None]:
    """Operators inside keep no value that is gathered inside."""
    found = Gathering()
    _current.append(found)
    try:
        with torch.autograd.graph.saved_tensors_hooks(found.pack, found.unpack):
            yield
    finally:
        _current.pop()


class GatheredAgain:
    """A redistribution of a parameter whose value is not kept for the backward pass, where the plan says that this `asked_for` it."""

    def __init__(self, chain: Chain, *, differentiable: bool, asked_for: bool) -> None:
        self.chain, self.differentiable, self.asked_for = chain, differentiable, asked_for

    def __call__(self, value: Tensor) -> Tensor:
        """The value at the end of the chain, from that at its start."""
        out = value
        for ahead, back, group in self.chain:
            out = step(out, ahead, back if self.differentiable else None, group)
        if _current and out.untyped_storage()._cdata != value.untyped_storage()._cdata:
            start = value.detach()
            before = _current[-1].find(start)
            source = before.make if before is not None else lambda: start
            gathered = _Gathered(out, source, self.chain, asked_for=self.asked_for)
            _current[-1].known[out.untyped_storage()._cdata] = gathered
        return out
