"""Units under way, round by round: as the runtime, the player and the memory of a step see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from .scheduled import Scheduled
from .unit_collectives import Chain


class Moving(Protocol):
    """A chain under way, whose first collective has been issued."""

    def go_on(self) -> None:
        """Wait for the collective under way and issue the next one, if there is another."""

    def finish(self) -> None:
        """Wait for all collectives of the chain."""


M = TypeVar("M", bound=Moving)
Begin = Callable[[Chain], M]
"""Issues the first collective of a chain."""


class _Travel(Generic[M]):
    """The chains of a unit."""

    def __init__(self, chains: Sequence[Chain], begin: Begin[M]) -> None:
        self._chains = chains
        self._begin = begin
        self._moving: list[M] = []

    def advance(self, number: int) -> None:
        # Chains under way first: their collectives were due before those of chains that begin.
        for moving in self._moving:
            moving.go_on()
        self._moving += [self._begin(chain) for chain in self._chains if chain.begins == number]

    def finish(self) -> None:
        for moving in self._moving:
            moving.finish()


class UnitTravel(Generic[M]):
    """The gathers and reductions of a plan's units while they are under way."""

    def __init__(self, plan: Scheduled) -> None:
        self._followers = plan.followers()
        self._chains = plan.chains
        self._coming: dict[int, _Travel[M]] = {}
        self._going: dict[tuple[int, int], _Travel[M]] = {}

    def gather(self, unit: int, number: int, begin: Begin[M]) -> None:
        """Issue a round of gathering a unit."""
        if number == 0:
            self.wait([unit])
            self._coming[unit] = _Travel(self._chains.gather(unit), begin)
        # Between two parts of a step another call may have gathered the unit whole.
        if unit in self._coming:
            self._coming[unit].advance(number)

    def is_coming(self, unit: int) -> bool:
        """Whether a unit is on its way."""
        return unit in self._coming

    def wait(self, units: Iterable[int]) -> None:
        """Wait until units that are on their way are gathered."""
        for unit in units:
            if unit in self._coming:
                self._coming.pop(unit).finish()

    def reduce(
        self, unit: int, number: int, micro_batch: int, *, last: bool, begin: Begin[M]
    ) -> None:
        """Issue a round of reducing a unit's gradients."""
        if number == 0:
            # What starts from the unit's values is to be home, and its own of micro-batches before.
            before = {unit, *self._followers.get(unit, ())}
            # Those of later micro-batches may have begun meanwhile, and go on.
            for key in [key for key in self._going if key[0] in before and key[1] <= micro_batch]:
                self._going.pop(key).finish()
            self._going[unit, micro_batch] = _Travel(self._chains.reduction(unit, last=last), begin)
        self._going[unit, micro_batch].advance(number)

    def settle(self) -> None:
        """Wait for all reductions, in the order in which they were begun."""
        for travel in self._going.values():
            travel.finish()
        self._going.clear()

    def forget(self) -> None:
        """Drop the remains of an interrupted step."""
        self._going.clear()
        self._coming.clear()
