"""`sampler`: the samples of every batch, the same on any plan and number of ranks, and the training's position.

The order of an epoch is a permutation drawn from the seed and the epoch alone. The position counts samples, not
batches, so a training resumed with another batch size continues at the next sample, none of them twice and none left
out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from autopar.errors import PlanError, UsageError, unknown
from autopar.plan import Plan

from ..module import ParallelModule

Batch = TypeVar("Batch")
LASTS = ("drop", "wrap")


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler: `DataLoader(dataset, batch_sampler=...)`. Each pass over it is the rest of an epoch.

    `own`: the part of every batch that this rank reads. `epoch`, `done`: the position: samples of the epoch that are
    done.
    """

    def __init__(
        self, length: int, batch: int, *, seed: int = 0, shuffle: bool = True, last: str = "drop", own: slice | None = None
    ) -> None:
        if last not in LASTS:
            raise UsageError(unknown("way with the last samples", last, LASTS))
        if not 1 <= batch <= length:
            raise UsageError(f"a batch of {batch} cannot be taken from {length} samples")
        self.length, self.batch, self.seed, self.shuffle, self.last = length, batch, seed, shuffle, last
        self.own = own if own is not None else slice(None)
        self.epoch, self.done = 0, 0
        self._counted = False

    def __len__(self) -> int:
        """The remaining batches of this epoch."""
        left = self.length - self.done
        return left // self.batch if self.last == "drop" else -(-left // self.batch)

    def order(self, epoch: int) -> list[int]:
        """All samples in the order of an epoch."""
        if not self.shuffle:
            return list(range(self.length))
        drawn = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "big") >> 1)
        found: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each remaining batch of the epoch; after the last one the next epoch begins."""
        order, at = self.order(self.epoch), self.done
        for _ in range(len(self)):
            taken = order[at : at + self.batch]
            taken += order[: self.batch - len(taken)]  # the first samples again, to fill the last batch
            at += self.batch
            if not self._counted:
                self.done = min(at, self.length)
            yield taken[self.own]
        if not self._counted:
            self._next()

    def counted(self, loader: Iterable[Batch], *, endless: bool = False) -> Iterator[Batch]:
        """The batches of a loader over this sampler; a batch counts as done when the caller comes back for the next.

        A loader with workers asks for batches long before they are trained on; without this they would count then. The
        loader also does not draw from torch's generator here, as loaders do at the beginning of every epoch. `endless`:
        one epoch after the other, along with `autopar.steps`: `zip(autopar.steps(...), sampler.counted(loader,
        endless=True))`.
        """
        self._counted = True
        try:
            going = True
            while going:
                for batch in _undrawn(loader):
                    yield batch
                    self.done = min(self.done + self.batch, self.length)
                self._next()
                going = endless
        finally:
            self._counted = False

    def _next(self) -> None:
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the training, for `autopar.save`; in a loop over `counted` it includes the present batch."""
        done = min(self.done + self.batch, self.length) if self._counted else self.done
        return {"epoch": self.epoch, "done": done, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there; the samples and their order must be the same."""
        for name in ("length", "seed", "shuffle"):
            if state_dict.get(name) != getattr(self, name):
                raise PlanError(f"the sampler's {name} is {getattr(self, name)}, that of the checkpoint {state_dict.get(name)}")
        epoch, done = state_dict.get("epoch"), state_dict.get("done")
        if not (isinstance(epoch, int) and isinstance(done, int) and epoch >= 0 and 0 <= done <= self.length):
            raise PlanError(f"the checkpoint's position, epoch {epoch} and {done} samples, is none among {self.length} samples")
        self.epoch, self.done = epoch, done
        if len(self) == 0:
            self._next()


def _undrawn(loader: Iterable[Batch]) -> Iterator[Batch]:
    """A loader's iterator; it seeds its workers from torch's generator, which is restored."""
    state = torch.get_rng_state()
    found = iter(loader)
    torch.set_rng_state(state)
    return found


def sampler(
    dataset: Sized | int,
    plan: Plan | ParallelModule | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    last: str = "drop",
) -> ResumableSampler:
    """A resumable batch sampler of a dataset (or a number of samples): the same samples in the same order on any plan.

    Every rank gets the whole batch, as `parallelize` takes it. For a module that takes this rank's part (a context
    without `full_batch`), give that module as `plan`. `batch`: another size than the plan's first input has. `last`:
    samples that fill no batch: "drop" leaves them out of this epoch, "wrap" fills up with the first samples of it.
    """
    length = dataset if isinstance(dataset, int) else len(dataset)
    own = None
    size = batch
    if isinstance(plan, ParallelModule):
        graph, parts = plan.engine.graph, plan.batch_parts
        size = size or next((graph.tensors[name].shape[0] for name in graph.inputs if graph.tensors[name].shape), None)
        if parts is not None and size is not None and plan.engine.world.groups is not None:
            share, rank = size // parts.count, plan.engine.world.rank - parts.first
            own = slice(rank * share, (rank + 1) * share)
    elif plan is not None:
        size = size or next((spec.shape[0] for spec in plan.model.inputs.values() if spec.shape), None)
    if size is None:
        raise UsageError("say how many samples a batch has: batch=..., or give the plan")
    return ResumableSampler(length, size, seed=seed, shuffle=shuffle, last=last, own=own)
