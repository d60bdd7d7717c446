"""Gradient buckets: the gradients of parameters that are stored whole are summed over the ranks, under the backward pass.

A bucket is started when the last of its gradients is there and all buckets before it have been started, so that every
rank issues the same collectives in the same order; what is left is started when the backward pass ends, and there all
buckets are waited for. A gradient that lies in `.grad` from an earlier backward pass and has been summed already is
first turned back into shares (kept by one rank of each group), so that the sum stays right when gradients accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.sharding.program import Bucket

from .collectives import AxisGroup, all_reduce

_C10D = torch.ops._c10d_functional


def local_of(value: Tensor) -> Tensor:
    """The shard of a DTensor, without autograd; other tensors as they are."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


class _Reduction:
    """One bucket: its parameters, and in the course of a backward pass the flat sum under way."""

    def __init__(self, parameters: Sequence[nn.Parameter], axes: Sequence[AxisGroup]) -> None:
        self.parameters = tuple(parameters)
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self.waiting: set[nn.Parameter] = set(parameters)
        self.flat: Tensor | None = None

    @property
    def is_holder(self) -> bool:
        """Whether this rank is the one of its groups that keeps what has been summed before."""
        return all(axis.coordinate == 0 for axis in self.axes)

    def start(self, shares: Set[nn.Parameter]) -> None:
        """Flatten the gradients and start the sum over the first axis; `shares` are the parameters whose gradient is not summed yet."""
        flat = torch.cat([self._share(p, p in shares) for p in self.parameters])
        self.flat = _C10D.all_reduce(flat, "sum", self.axes[0].name) if self.axes else flat

    def _share(self, parameter: nn.Parameter, is_share: bool) -> Tensor:
        """This rank's addend: zeros where there is no gradient, or where it is a sum already that another rank brings."""
        if parameter.grad is None or not (is_share or self.is_holder):
            return torch.zeros_like(local_of(parameter)).reshape(-1)
        return local_of(parameter.grad).reshape(-1)

    def finish(self) -> None:
        """Wait, sum over the other axes, and write the sums back."""
        assert self.flat is not None
        flat: Tensor = _C10D.wait_tensor(self.flat) if self.axes else self.flat
        for axis in self.axes[1:]:
            flat = all_reduce(flat, axis)
        sums = flat.split([local_of(p).numel() for p in self.parameters])  # type: ignore[no-untyped-call]
        for parameter, total in zip(self.parameters, sums, strict=True):
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                gradient.copy_(total.view(gradient.shape))
        self.flat = None


class GradientBuckets:
    """Hooks on the parameters of all buckets; `synchronize` is off inside `no_sync`."""

    _handing_on = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Bucket], axes: Sequence[AxisGroup]) -> None:
        self.synchronize = True
        self._reductions = [_Reduction([parameters[name] for name in b.parameters], [axes[a] for a in b.axes]) for b in buckets]
        self._owner = {parameter: reduction for reduction in self._reductions for parameter in reduction.parameters}
        self._shares: set[nn.Parameter] = set()
        self._next = 0
        self._pass = -1
        for parameter in self._owner:
            parameter.register_hook(self._before(parameter))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._after)  # type: ignore[no-untyped-call]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate shares; the first one after it sums them."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    @property
    def pending(self) -> bool:
        """Whether some gradient is a share that waits to be summed."""
        return bool(self._shares)

    @contextmanager
    def apart(self, *, synchronize: bool) -> Iterator[None]:
        """Backward passes inside have nothing to do with those outside; the parameters' gradients are put aside meanwhile."""
        before, shares = self.synchronize, self._shares
        self.synchronize, self._shares = synchronize, set()
        try:
            yield
        finally:
            self.synchronize, self._shares = before, shares

    def hand_on(self) -> None:
        """What the present backward pass still brings has been summed already."""
        self._handing_on = True
        torch.autograd.Variable._execution_engine.queue_callback(self._handed_on)

    def _handed_on(self) -> None:
        self._handing_on = False

    def _before(self, parameter: nn.Parameter) -> Any:
        def hook(_: Tensor) -> None:
            if parameter not in self._shares and not self._handing_on:
                if parameter.grad is not None and not self._owner[parameter].is_holder:
                    local_of(parameter.grad).zero_()
                self._shares.add(parameter)

        return hook

    def _after(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if not self.synchronize or self._handing_on:
            return
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._begin(task)
        self._owner[parameter].waiting.discard(parameter)
        while self._next < len(self._reductions) and not self._reductions[self._next].waiting:
            self._reductions[self._next].start(self._shares)
            self._next += 1

    def _begin(self, task: int) -> None:
        """The first gradient of a backward pass: forget a pass that was broken off, and ask to be called at the end."""
        self._pass, self._next = task, 0
        for reduction in self._reductions:
            reduction.waiting, reduction.flat = set(reduction.parameters), None
        torch.autograd.Variable._execution_engine.queue_callback(self._flush)

    def _flush(self) -> None:
        for reduction in self._reductions[self._next :]:
            if not self._shares.isdisjoint(reduction.parameters):
                reduction.start(self._shares)
        for reduction in self._reductions:
            if reduction.flat is not None:
                reduction.finish()
                self._shares.difference_update(reduction.parameters)
        self._pass = -1
