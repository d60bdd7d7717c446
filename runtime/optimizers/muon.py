"""Muon over the parameters of a planned module: whole matrices by their owners, AdamW for the rest.

    M = M + (1 - momentum) (G - M)
    O = Newton-Schulz of G + momentum (M - G)
    W = (1 - lr decay) W - lr s O                    s = sqrt(max(1, m / n))

for a matrix W [m, n] of a hidden layer with gradient G (K. Jordan,
https://kellerjordan.github.io/posts/muon). With `adjust_lr_fn="match_rms_adamw"` s is
0.2 sqrt(max(m, n)), so that the learning rate and the decay of AdamW fit (Liu et al.,
arXiv:2502.16982). A batch of matrices [experts, m, n] is updated matrix by matrix. All is as in
`torch.optim.Muon` and `torch.optim.AdamW` on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from autopar.errors import PlanError, UsageError, unknown
from autopar.order.actions import Action, Word
from autopar.order.owners import Owners, owned_tensors, owners_of
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.closures import Closure, loss_of
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.ranks.current_action import at, named, record
from autopar.sharding.matrices import hidden_matrices

from .matrix_exchange import updates_of
from .newton_schulz import newton_schulz

ADJUSTMENTS = ("original", "match_rms_adamw")
OTHERS: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
"""Options of AdamW in groups that have none."""


class Muon(Optimizer):
    """Muon for matrices of hidden layers, AdamW for all other parameters.

    `module`: from `parallelize`. `others`: options of AdamW where they differ (`lr`,
    `weight_decay`, `betas`, `eps`). There are three groups of parameters: matrices, other tensors,
    and vectors.
    """

    def __init__(
        self,
        module: ParallelModule | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        adjust_lr_fn: str | None = None,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        if adjust_lr_fn is not None and adjust_lr_fn not in ADJUSTMENTS:
            raise UsageError(unknown("adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS))
        valid = ("lr", "weight_decay", *OTHERS)
        for name in others or {}:
            if name not in valid:
                raise UsageError(unknown("option of AdamW", name, valid))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "adjust_lr_fn": adjust_lr_fn,
            "matrices": False,
            **OTHERS,
        }
        self._owned: _OwnMatrices | None = None
        groups = module
        if isinstance(module, ParallelModule):
            self._owned = _OwnMatrices(module)
            groups = muon_groups(
                {**module.graph_parameters(), **module.stand_ins()}, self._owned.matrices
            )
        elif isinstance(module, nn.Module):
            raise UsageError(
                f"autopar.Muon takes a module that autopar.parallelize made, not a "
                f"{type(module).__name__}; torch.optim.Muon is for others"
            )
        super().__init__(_with_others(groups, others or {}), defaults)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        directions: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if group["matrices"]:
                directions.update((value, self._direction(value, group)) for value in values)
            elif values:
                self._adamw(values, group)
        # Matrices are updated last, all at once: ranks meet there.
        updates = _alone(directions) if self._owned is None else self._owned.updates(directions)
        for group in self.param_groups:
            for value in group["params"]:
                if value in updates:
                    _apply(value, updates[value], group)
        return loss

    def _direction(self, value: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This rank's shard of what the update of a matrix is made of, as it is sent."""
        assert value.grad is not None
        own = self.state[value]
        if not own:
            own["momentum_buffer"] = torch.zeros_like(value)
        gradient = local_of(value.grad)
        mean = local_of(own["momentum_buffer"])
        # The momentum is elementwise, so each shard has its own.
        momentum = group["momentum"]
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum).to(torch.bfloat16)

    def _adamw(self, values: list[Tensor], group: Mapping[str, Any]) -> None:
        """Update these parameters by torch's AdamW, on this rank's shards."""
        for value in values:
            own = self.state[value]
            if not own:
                own["step"] = torch.zeros(())
                own["exp_avg"] = torch.zeros_like(value)
                own["exp_avg_sq"] = torch.zeros_like(value)
        states = [self.state[value] for value in values]
        first, second = group["betas"]
        adamw(
            [local_of(value) for value in values],
            [local_of(value.grad) for value in values if value.grad is not None],
            [local_of(own["exp_avg"]) for own in states],
            [local_of(own["exp_avg_sq"]) for own in states],
            [],
            [own["step"] for own in states],
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class _OwnMatrices:
    """The matrices of a planned module, and the owners of those of this rank's chunks."""

    def __init__(self, module: ParallelModule) -> None:
        self.module = module
        self.engine = module.engine
        execution = self.engine.execution
        self.matrices = hidden_matrices(self.engine.graph)
        if alone := sorted(self.matrices & frozenset(execution.schedule.reductions.local)):
            raise PlanError(f"Muon cannot update {alone[0]!r}, which each rank has for itself")
        self.owners: dict[int, Owners] = {}
        for number in module.engine.storages.own:
            chunk = execution.chunks[number]
            tensors = owned_tensors(chunk.whole.program, self.matrices)
            if tensors:
                self.owners[number] = owners_of(chunk.mesh, tensors, chunk.stored)

    def updates(self, directions: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The updates of this rank's shards.

        Collective: every rank of a stage calls it.
        """
        values = self.module.graph_parameters()
        updates: dict[Tensor, Tensor] = {}
        # Without a backward pass no rank has gradients, and none sends anything.
        if not directions:
            return updates
        for number, owners in self.owners.items():
            shards = {
                owned.name: directions[values[owned.name]]
                if values[owned.name] in directions
                # Ranks send equal messages, whichever gradients a caller has taken away.
                else torch.zeros_like(local_of(values[owned.name]), dtype=torch.bfloat16)
                for exchange in owners.exchanges
                for owned in exchange.members
            }
            layouts = self.engine.execution.chunks[number].stored
            action = Action(word=Word.UPDATE, chunk=number)
            record(action)
            with at(action), named(action):
                made = updates_of(owners, self.engine.groups, layouts, shards, newton_schulz)
            updates.update((values[name], update) for name, update in made.items())
        return {value: update for value, update in updates.items() if value in directions}


def muon_groups(parameters: Mapping[str, Tensor], matrices: frozenset[str]) -> list[dict[str, Any]]:
    """The groups of Muon: matrices of hidden layers, other tensors, and vectors."""
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    others = [value for name, value in trained.items() if name not in matrices]
    return [
        {"params": [trained[name] for name in trained if name in matrices], "matrices": True},
        {"params": [value for value in others if value.dim() > 1], "matrices": False},
        {"params": [value for value in others if value.dim() <= 1], "matrices": False},
    ]


def _with_others(groups: Any, others: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups, with the options of AdamW in those that are no matrices."""
    made = []
    for group in groups:
        if not isinstance(group, dict) or "matrices" not in group:
            raise UsageError(
                "autopar.Muon takes a planned module itself: autopar.Muon(module, lr=...)"
            )
        made.append(dict(group) if group["matrices"] else {**others, **group})
    return made


def _alone(directions: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The updates of matrices that this process holds whole."""
    updates = {}
    for value, direction in directions.items():
        if isinstance(value, DTensor):
            raise UsageError("autopar.Muon takes a planned module itself, not its parameters")
        each = direction if direction.dim() > 2 else direction[None]
        made = torch.stack([newton_schulz(matrix) for matrix in each])
        updates[value] = made.view_as(direction)
    return updates


def _apply(value: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
    """Let a matrix decay, and step along its update."""
    rows, columns = value.shape[-2:]
    scale = math.sqrt(max(1, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    shard = local_of(value)
    # The decay comes before the step, in the order of torch's Muon.
    shard.mul_(1 - group["lr"] * group["weight_decay"])
    shard.add_(update, alpha=-group["lr"] * scale)
