"""`sampler`: the samples of every batch, the same on any plan and number of ranks.

The order of an epoch is a permutation drawn from the seed and the epoch alone. The position counts
samples, not batches, so a training resumed with another batch size continues at the next sample,
none of them twice and none left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from autopar.errors import PlanError, UsageError, unknown
from autopar.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

Batch = TypeVar("Batch")
LASTS = ("drop", "wrap")


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler: `DataLoader(dataset, batch_sampler=...)`.

    Each pass over it is the rest of an epoch. `own`: the part of every batch that this rank reads.
    `epoch`, `done`: the position: samples of the epoch that are done.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: str = "drop",
        own: slice | None = None,
    ) -> None:
        if last not in LASTS:
            raise UsageError(unknown("way with the last samples", last, LASTS))
        # A batch larger than the data would never be full, and an epoch would have no step.
        if not 1 <= batch <= length:
            raise UsageError(f"a batch of {batch} cannot be taken from {length} samples")
        self.length = length
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.last = last
        self.own = own if own is not None else slice(None)
        self.epoch = 0
        self.done = 0
        self._counted = False

    def __len__(self) -> int:
        """The remaining batches of this epoch."""
        samples = self.length - self.done
        return samples // self.batch if self.last == "drop" else -(-samples // self.batch)

    def order(self, epoch: int) -> list[int]:
        """All samples in the order of an epoch."""
        if not self.shuffle:
            return list(range(self.length))
        # Hashed, so that no other pair of seed and epoch has the same order, as with their sum.
        drawn = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "big") >> 1)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each remaining batch of the epoch.

        After the last one the next epoch begins.
        """
        order = self.order(self.epoch)
        at = self.done
        for _ in range(len(self)):
            taken = order[at : at + self.batch]
            # The first samples again, to fill the last batch.
            taken += order[: self.batch - len(taken)]
            at += self.batch
            if not self._counted:
                self.done = min(at, self.length)
            yield taken[self.own]
        if not self._counted:
            self._next()

    def counted(self, loader: Iterable[Batch], *, endless: bool = False) -> Iterator[Batch]:
        """The batches of a loader over this sampler, counted when they are done.

        A batch counts as done when the caller comes back for the next. A loader with workers asks
        for batches long before they are trained on; without this they would count then. The loader
        also does not draw from torch's generator here, as loaders do at the beginning of every
        epoch. `endless`: one epoch after the other, along with `autopar.steps`:
        `zip(autopar.steps(...), sampler.counted(loader, endless=True))`.
        """
        # From here on the sampler does not count what workers fetch ahead.
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
        """Go to the start of the next epoch."""
        self.epoch = self.epoch + 1
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the training, for `autopar.save`.

        In a loop over `counted` it includes the present batch.
        """
        done = min(self.done + self.batch, self.length) if self._counted else self.done
        return {
            "epoch": self.epoch,
            "done": done,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position; the samples and their order must be the same."""
        for name in ("length", "seed", "shuffle"):
            if state_dict.get(name) != getattr(self, name):
                raise PlanError(
                    f"the sampler's {name} is {getattr(self, name)},"
                    f" that of the checkpoint {state_dict.get(name)}"
                )
        epoch = state_dict.get("epoch")
        done = state_dict.get("done")
        if not isinstance(epoch, int) or not isinstance(done, int):
            valid = False
        else:
            valid = epoch >= 0 and 0 <= done <= self.length
        if not valid:
            raise PlanError(
                f"the checkpoint's position, epoch {epoch} and {done} samples,"
                f" is none among {self.length} samples"
            )
        self.epoch = int(state_dict["epoch"])
        self.done = int(state_dict["done"])
        # The checkpoint was saved behind the last whole batch of an epoch.
        if len(self) == 0:
            self._next()


def _undrawn(loader: Iterable[Batch]) -> Iterator[Batch]:
    """A loader's iterator, made without a draw from torch's generator.

    The loader seeds its workers from it, so it is restored.
    """
    state = torch.get_rng_state()
    batches = iter(loader)
    torch.set_rng_state(state)
    return batches


def sampler(
    dataset: Sized | int,
    plan: Plan | ParallelModule | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    last: str = "drop",
) -> ResumableSampler:
    """A resumable batch sampler of a dataset (or a number of samples), the same on any plan.

    Every rank gets the whole batch, as `parallelize` takes it. For a module that takes this rank's
    part (a context without `full_batch`), give that module as `plan`. `batch`: another size than
    the plan's first input has. `last`: samples that fill no batch: "drop" leaves them out of this
    epoch, "wrap" fills up with the first samples of it.
    """
    length = dataset if isinstance(dataset, int) else len(dataset)
    own = None
    size = batch
    if isinstance(plan, ParallelModule):
        graph = plan.engine.graph
        parts = plan.batch_parts
        shapes = (graph.tensors[name].shape for name in graph.inputs)
        size = size or next((shape[0] for shape in shapes if shape), None)
        # The ranks of a part lie one behind another, from the first of their stage.
        if parts is not None and size is not None and plan.engine.world.groups is not None:
            share = size // parts.count
            rank = plan.engine.world.rank - parts.first
            own = slice(rank * share, (rank + 1) * share)
    elif plan is not None:
        specs = plan.model.inputs.values()
        size = size or next((spec.shape[0] for spec in specs if spec.shape), None)
    if size is None:
        raise UsageError("say how many samples a batch has: batch=..., or give the plan")
    return ResumableSampler(length, size, seed=seed, shuffle=shuffle, last=last, own=own)
