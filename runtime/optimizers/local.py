"""Optimizers over the parameters of a planned module that work on this rank's shards as plain tensors.

An elementwise update is the same on a shard as on the whole, and plain tensors are updated several times as fast as
DTensors, with every kernel that torch has. Parameters, gradients, `state` and `state_dict` are DTensors all the same.
Whether an update is elementwise is found by trying it on a small tensor and on its halves. Any other update (norms,
means of rows) runs on DTensors; their partial results are summed at once, because torch cannot change those in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import RunError

from ..closures import Closure, loss_of
from ..optimizer_states import keep_integers, lying_as
from ..parameters import local_of

Groups = Iterable[Tensor] | Iterable[dict[str, Any]]


def local_optimizer(kind: Callable[..., Optimizer], parameters: nn.Module | Groups, **options: Any) -> Optimizer:
    """`kind(parameters, **options)` of a planned module's parameters, on this rank's shards if the result is the same.

    `parameters`: those of a module from `parallelize`, groups of them, or the module (meaning all its trainable
    parameters).
    """
    if isinstance(parameters, nn.Module):
        parameters = [value for value in parameters.parameters() if value.requires_grad]
    groups: list[dict[str, Any]] = [dict(g) if isinstance(g, dict) else {"params": [g]} for g in parameters]
    if all(len(group) == 1 for group in groups):
        groups = [{"params": [value for group in groups for value in _listed(group["params"])]}]
    for group in groups:
        group["params"] = _listed(group["params"])
    split = any(_is_split(value) for group in groups for value in group["params"])
    if split and not is_elementwise(kind, options):
        return SummedOptimizer(kind(groups, **options))
    return LocalOptimizer(kind, groups, options)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _is_split(value: Tensor) -> bool:
    return isinstance(value, DTensor) and any(not placement.is_replicate() for placement in value.placements)


def is_elementwise(kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether steps on a small matrix equal those on its halves, each with its own optimizer."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 4, 6, dtype=torch.float64, generator=generator)

    def steps(cut: Callable[[Tensor], Tensor]) -> Tensor:
        value = nn.Parameter(cut(start).clone())
        optimizer = kind([value], **options)
        for gradient in gradients:
            value.grad = cut(gradient).clone()
            optimizer.step()
        return value.detach()

    try:
        whole = steps(lambda x: x)
        rows = torch.cat([steps(lambda x: x[:2]), steps(lambda x: x[2:])])
        columns = torch.cat([steps(lambda x: x[:, :3]), steps(lambda x: x[:, 3:])], 1)
    except (RuntimeError, ValueError, TypeError):  # it needs more than a plain gradient, such as a closure
        return False
    return torch.allclose(whole, rows, rtol=1e-6, atol=0) and torch.allclose(whole, columns, rtol=1e-6, atol=0)


class LocalOptimizer(Optimizer):
    """Makes the steps of an optimizer on this rank's shards; its groups and its state are those of the DTensors."""

    def __init__(self, kind: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> None:
        self._shards: dict[Tensor, Tensor] = {value: _shard(value) for group in groups for value in group["params"]}
        self.inner = kind([{**group, "params": [self._shards[p] for p in group["params"]]} for group in groups], **options)
        super().__init__(groups, self.inner.defaults)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter with its shard; a replaced parameter takes the state of the one before."""
        found: list[tuple[Tensor, Tensor]] = []
        for group, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update((name, value) for name, value in group.items() if name != "params")
            own["params"] = [self._current(value) for value in group["params"]]
            found += zip(group["params"], own["params"], strict=True)
        return found

    def _current(self, value: Tensor) -> Tensor:
        before, shard = self._shards[value], _shard(value)
        if shard is not before:
            self._shards[value] = shard
            if before in self.inner.state:
                self.inner.state[shard] = self.inner.state.pop(before)
        return shard

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        pairs = self._pairs()
        for value, shard in pairs:
            if shard is not value:
                shard.grad = None if value.grad is None else local_of(value.grad)
        try:
            self.inner.step()
        finally:
            for value, shard in pairs:
                if shard is not value:
                    shard.grad = None
        self._show(pairs)
        return loss

    def _show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the state be that of the inner optimizer, as DTensors."""
        for value, shard in pairs:
            if shard in self.inner.state:
                shown = self.state[value]
                for name, held in self.inner.state[shard].items():
                    if name not in shown or _shard_of_state(shown[name]) is not held:
                        shown[name] = _as_the_parameter(value, shard, held)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's; the states are DTensors that lie as their parameters do."""
        super().load_state_dict(dict(state_dict))
        keep_integers(self, state_dict)
        for value, shard in self._pairs():
            if value in self.state:
                self.inner.state[shard] = {name: _shard_of_state(held) for name, held in self.state[value].items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        if len(self.inner.param_groups) < len(self.param_groups):
            self._shards.update((value, _shard(value)) for value in self.param_groups[-1]["params"])
            self.inner.add_param_group({**param_group, "params": [self._shards[p] for p in self.param_groups[-1]["params"]]})


def _shard(value: Tensor) -> Tensor:
    """The tensor that an optimizer updates in place of a parameter."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _shard_of_state(held: Any) -> Any:
    return held._local_tensor if isinstance(held, DTensor) else held


def _as_the_parameter(value: Tensor, shard: Tensor, held: Any) -> Any:
    """A state of a shard's shape as a DTensor in the parameter's layout; counters and the like unchanged."""
    if not isinstance(value, DTensor) or not isinstance(held, Tensor) or held.shape != shard.shape or not held.dim():
        return held
    return lying_as(value, held)


class _Summing(TorchFunctionMode):
    """Sums partial results at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return pytree.tree_map_only(DTensor, _summed, func(*args, **(kwargs or {})))


def _summed(value: DTensor) -> DTensor:
    if not any(placement.is_partial() for placement in value.placements):
        return value
    found: DTensor = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return found


class SummedOptimizer(Optimizer):
    """Makes the steps of `inner` on DTensors; it shares its groups and its state."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        try:
            with _Summing():
                self.inner.step()
        except (NotImplementedError, RuntimeError) as error:
            name = type(self.inner).__name__
            raise RunError(
                f"{name} cannot update parameters that are split over ranks, because torch's DTensor cannot: {str(error).splitlines()[0]}; "
                "take another optimizer, or a plan that stores parameters whole (--zero 0 --scheme data)"
            ) from error
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the inner optimizer's."""
        self.inner.load_state_dict(dict(state_dict))
        self._share()
