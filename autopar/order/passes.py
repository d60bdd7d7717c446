"""Expansion of passes of chunks to all actions of a rank.

Passes become segments, with actions of their units around them.

The passes of a rank are a list of visits of segments. A unit in mode "per_pass" is gathered before
a visit that needs it, unless it is still there. It is released after the visit, unless one of the
next `prefetch` visits (at least the next) needs it again. Other units are gathered once and
released at the end. A gather is issued `prefetch` visits before the visit that needs it, so that it
overlaps their computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .actions import Action, Word
from .units import Mode, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Units of one segment: those that its passes read, and those that its backward completes."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduced: tuple[int, ...]


class Chunk(Protocol):
    """The properties of a chunk that decide its order."""

    @property
    def units(self) -> Sequence[Unit]:
        """The chunk's units of parameters."""

    def needs(self) -> Sequence[Need]:
        """The units that each segment of the chunk needs."""

    def moves(self, unit: int) -> bool:
        """Whether gathering a unit does anything."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """An action of the list, with the units that have to be there."""

    action: Action
    needed: frozenset[tuple[int, int]] = frozenset()
    computes: bool = False


def one_stage(micro_batches: int, *, train: bool) -> Iterator[Action]:
    """Micro-batch after micro-batch, each with its backward pass."""
    for number in range(micro_batches):
        yield Action(word=Word.FORWARD, micro_batch=number)
        if train:
            yield Action(word=Word.BACKWARD, micro_batch=number)


def phases(actions: Sequence[Action]) -> list[str]:
    """The phase of every action, forward or backward; a gather has that of the pass behind it."""
    backwards = []
    phase = "forward"
    for action in reversed(actions):
        if action.word is Word.FORWARD:
            phase = "forward"
        elif action.word in (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT, Word.REDUCE):
            phase = "backward"
        backwards.append(phase)
    return backwards[::-1]


def expand(
    chunks: Mapping[int, Chunk], passes: Iterable[Action], *, prefetch: int
) -> tuple[Action, ...]:
    """All actions of a rank that holds these chunks and runs these passes, sends and receives."""
    needs = {number: tuple(chunk.needs()) for number, chunk in chunks.items()}
    order = list(passes)
    visits = [visit for action in order for visit in _visits(action, needs.get(action.chunk, ()))]
    before, behind = _gathers(chunks, visits, prefetch)
    # Later passes overwrite earlier ones: the last is that of the order, whatever its number.
    last = {
        action.chunk: action.micro_batch
        for action in order
        if action.word in (Word.BACKWARD, Word.BACKWARD_WEIGHT)
    }
    actions: list[Action] = []
    for number, visit in enumerate(visits):
        actions += (
            Action(word=Word.GATHER, chunk=chunk, unit=unit)
            for chunk, unit in before.get(number, ())
        )
        actions.append(visit.action)
        actions += (
            Action(word=Word.RELEASE, chunk=chunk, unit=unit)
            for chunk, unit in behind.get(number, ())
        )
        action = visit.action
        # Gradients of weights are complete behind B, or behind W where these are apart.
        if (
            visit.computes
            and action.word in (Word.BACKWARD, Word.BACKWARD_WEIGHT)
            and action.segment is not None
        ):
            chunk = chunks[action.chunk]
            for unit in needs[action.chunk][action.segment].reduced:
                if (
                    chunk.units[unit].mode is not Mode.ONCE
                    or action.micro_batch == last[action.chunk]
                ):
                    actions.append(
                        Action(
                            word=Word.REDUCE,
                            chunk=action.chunk,
                            unit=unit,
                            micro_batch=action.micro_batch,
                        )
                    )
    return tuple(actions)


def _visits(action: Action, needs: Sequence[Need]) -> Iterator[_Visit]:
    """A pass as visits of its segments, backwards from the last; other actions stay as they are."""
    if action.word not in (Word.FORWARD, Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT):
        yield _Visit(action)
        return
    numbers = range(len(needs)) if action.word is Word.FORWARD else reversed(range(len(needs)))
    for number in numbers:
        need = needs[number]
        units = need.backward
        if action.word is Word.FORWARD:
            units = need.forward
        elif action.word is Word.BACKWARD_WEIGHT:
            # W multiplies saved inputs by gradients, and reads no parameter.
            units = ()
        one = Action(
            word=action.word, chunk=action.chunk, micro_batch=action.micro_batch, segment=number
        )
        yield _Visit(one, frozenset((action.chunk, unit) for unit in units), computes=True)


def _gathers(
    chunks: Mapping[int, Chunk], visits: Sequence[_Visit], prefetch: int
) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[tuple[int, int]]]]:
    """The units to gather before each visit, and to release behind it, by the visit's number."""
    computed = [number for number, visit in enumerate(visits) if visit.computes]
    before: dict[int, list[tuple[int, int]]] = {}
    behind: dict[int, list[tuple[int, int]]] = {}
    held: set[tuple[int, int]] = set()
    final: dict[tuple[int, int], int] = {}
    for place, number in enumerate(computed):
        now = sorted(visits[number].needed)
        issued = computed[max(place - prefetch, 0)]
        for unit in now:
            # A unit that a gather would not change is read where it is stored.
            if unit not in held and chunks[unit[0]].moves(unit[1]):
                before.setdefault(issued, []).append(unit)
                held.add(unit)
            final[unit] = number
        # A unit that is needed so soon would be gathered again before it is released.
        soon = frozenset[tuple[int, int]]().union(
            *(visits[n].needed for n in computed[place + 1 : place + 1 + max(prefetch, 1)])
        )
        gone = {
            u
            for u in held & visits[number].needed
            if chunks[u[0]].units[u[1]].mode is Mode.PER_PASS and u not in soon
        }
        behind.setdefault(number, []).extend(sorted(gone))
        held -= gone
    # Gathered once a step, these go behind their last reader.
    for unit in sorted(held):
        behind.setdefault(final[unit], []).append(unit)
    return before, behind
