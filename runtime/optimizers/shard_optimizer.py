"""Optimizers over the parameters of a planned module that work on this rank's shards.

An elementwise update is the same on a shard as on the whole, and plain tensors are updated several
times as fast as DTensors, with every kernel that torch has. Parameters, gradients, `state` and
`state_dict` are DTensors all the same. Whether an update is elementwise is known by trying it on a
small tensor and on its halves. Any other update (norms, means of rows) runs on DTensors; their
partial results are summed at once, because torch cannot change those in place.
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
from autopar.runtime.parameters.closures import Closure, loss_of
from autopar.runtime.parameters.optimizer_states import keep_integers, lying_as
from autopar.runtime.parameters.storage import local_of

Groups = Iterable[Tensor] | Iterable[dict[str, Any]]


def local_optimizer(
    kind: Callable[..., Optimizer], parameters: nn.Module | Groups, **options: Any
) -> Optimizer:
    """An optimizer `kind(parameters, **options)` of a planned module's parameters.

    It works on this rank's shards if the result is the same. `parameters`: those of a module from
    `parallelize`, groups of them, or the module (meaning all its trainable parameters).
    """
    if isinstance(parameters, nn.Module):
        parameters = [value for value in parameters.parameters() if value.requires_grad]
    groups: list[dict[str, Any]] = [
        dict(group) if isinstance(group, dict) else {"params": [group]} for group in parameters
    ]
    # Groups without options of their own are one, as torch has them.
    if all(len(group) == 1 for group in groups):
        groups = [{"params": [value for group in groups for value in _listed(group["params"])]}]
    for group in groups:
        group["params"] = _listed(group["params"])
    split = any(_is_split(value) for group in groups for value in group["params"])
    if split and not is_elementwise(kind, options):
        return SummedOptimizer(kind(groups, **options))
    return LocalOptimizer(kind, groups, options)


def _listed(parameters: Any) -> list[Tensor]:
    """The parameters of a group as a list; a single one needs none."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _is_split(value: Tensor) -> bool:
    """Whether a parameter lies in parts on several ranks."""
    return isinstance(value, DTensor) and any(
        not placement.is_replicate() for placement in value.placements
    )


def is_elementwise(kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether steps on a small matrix equal those on its halves, each with its own optimizer."""
    generator = torch.Generator().manual_seed(0)
    # Three steps, so that state of earlier ones counts.
    start, *gradients = torch.randn(4, 4, 6, dtype=torch.float64, generator=generator)

    def steps(cut: Callable[[Tensor], Tensor]) -> Tensor:
        """A part of the matrix after some steps."""
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
    except (RuntimeError, ValueError, TypeError):
        # The optimizer needs more than a plain gradient, such as a closure.
        return False
    return all(torch.allclose(whole, parts, rtol=1e-6, atol=0) for parts in (rows, columns))


class LocalOptimizer(Optimizer):
    """Makes the steps of an optimizer on this rank's shards.

    Its groups and its state are those of the DTensors.
    """

    def __init__(
        self,
        kind: Callable[..., Optimizer],
        groups: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        self._shards: dict[Tensor, Tensor] = {
            value: _shard(value) for group in groups for value in group["params"]
        }
        self.inner = kind(
            [{**group, "params": [self._shards[p] for p in group["params"]]} for group in groups],
            **options,
        )
        super().__init__(groups, self.inner.defaults)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter with its shard; a replaced one takes the state of its predecessor."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for group, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            # Schedulers change the learning rate in the groups that they see, which are ours.
            own.update((name, value) for name, value in group.items() if name != "params")
            own["params"] = [self._current(value) for value in group["params"]]
            pairs += zip(group["params"], own["params"], strict=True)
        return pairs

    def _current(self, value: Tensor) -> Tensor:
        """The shard of a parameter, which may have moved to another device or type."""
        before = self._shards[value]
        shard = _shard(value)
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
                    # The gradient's memory must be free when the caller sets its own to None.
                    shard.grad = None
        self._show(pairs)
        return loss

    def _show(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let the state be that of the inner optimizer, as DTensors."""
        for value, shard in pairs:
            if shard in self.inner.state:
                shown = self.state[value]
                for name, held in self.inner.state[shard].items():
                    # A new DTensor only where the inner optimizer has replaced its tensor.
                    if name not in shown or _shard_of_state(shown[name]) is not held:
                        shown[name] = _as_the_parameter(value, shard, held)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state as torch does; the states are DTensors that lie as their parameters do."""
        super().load_state_dict(dict(state_dict))
        keep_integers(self, state_dict)
        for value, shard in self._pairs():
            if value in self.state:
                self.inner.state[shard] = {
                    name: _shard_of_state(held) for name, held in self.state[value].items()
                }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does."""
        super().add_param_group(param_group)
        # Torch's constructor calls this method, too, for groups that the inner optimizer has.
        if len(self.inner.param_groups) < len(self.param_groups):
            parameters = self.param_groups[-1]["params"]
            self._shards.update((value, _shard(value)) for value in parameters)
            shards = [self._shards[value] for value in parameters]
            self.inner.add_param_group({**param_group, "params": shards})


def _shard(value: Tensor) -> Tensor:
    """The tensor that an optimizer updates in place of a parameter."""
    return value._local_tensor if isinstance(value, DTensor) else value


def _shard_of_state(held: Any) -> Any:
    """The part of a state that this rank has."""
    return held._local_tensor if isinstance(held, DTensor) else held


def _as_the_parameter(value: Tensor, shard: Tensor, held: Any) -> Any:
    """A state of a shard's shape as a DTensor in the parameter's layout.

    Counters and the like are unchanged.
    """
    if not isinstance(value, DTensor) or not isinstance(held, Tensor):
        return held
    # A number may have the shape of a parameter that is one.
    if held.shape != shard.shape or not held.dim():
        return held
    return lying_as(value, held)


class _Summing(TorchFunctionMode):
    """Sums partial results of every function at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return pytree.tree_map_only(DTensor, _summed, func(*args, **(kwargs or {})))


def _summed(value: DTensor) -> DTensor:
    """A tensor whose partial axes are summed."""
    if not any(placement.is_partial() for placement in value.placements):
        return value
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    summed: DTensor = value.redistribute(placements=placements)
    return summed


class SummedOptimizer(Optimizer):
    """Makes the steps of `inner` on DTensors; it shares its groups and its state."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share()

    def _share(self) -> None:
        """Take the inner optimizer's groups and state, which loading replaces."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        try:
            with _Summing():
                self.inner.step()
        except (NotImplementedError, RuntimeError) as error:
            name = type(self.inner).__name__
            first = str(error).splitlines()[0]
            raise RunError(
                f"{name} cannot update parameters that are split over ranks,"
                f" because torch's DTensor cannot: {first}; take another optimizer,"
                " or a plan that stores parameters whole (--zero 0 --scheme data)"
            ) from error
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state into the inner optimizer."""
        self.inner.load_state_dict(dict(state_dict))
        self._share()
