"""Expansion of passes of chunks to all actions of a rank.

Passes become visits of segments, with the rounds of units between them:

    a pair       of passes of two micro-batches takes turns, wherever exchanges of experts set off
    a gather     begins so many visits before the one that needs it as it has rounds, and issues one
                 in front of each; a unit that others start from is as much earlier; visits that
                 need no unit do not count
    a release    stands behind a visit that needs the unit, unless the unit would be gathered anew
                 before another visit is over; units that stay are released at the end
    a reduction  begins behind the visit that completes its gradients, and issues a round every
                 `STRIDE` visits, near the end of the step at every one; a last round, behind a
                 backward visit, takes the result home

All of them run beside the visits: a gather's first reader waits for it, and each round for the
round before. `prefetch` scales the visits that a gather begins ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .actions import Action, Pair, Word, one_by_one
from .units import Mode, Unit

STRIDE = 2
"""Visits between two rounds of a reduction, whose collective is under way meanwhile.

Played with 1, 2, 3, 4 and 6: Llama-3.1-8B on 64 devices 182, 161, 161, 161, 161 ms; Llama-3.1-70B
on 32 x 8 2.71, 2.38, 2.38, 2.38, 2.38 s; Qwen3-30B-A3B on 8 x 8 825, 824, 831, 829, 834 ms. From 4
on, messages that wait take more memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Units of one segment: those that its passes read, and those that its backward completes.

    `sets_off`: whether an exchange of experts sets off at the end of its forward pass, and of its
    backward pass.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduced: tuple[int, ...]
    sets_off: tuple[bool, bool] = (False, False)


class Chunk(Protocol):
    """The properties of a chunk that decide its order."""

    @property
    def units(self) -> Sequence[Unit]:
        """The chunk's units of parameters."""

    def needs(self) -> Sequence[Need]:
        """The units that each segment of the chunk needs."""

    def followers(self) -> Mapping[int, set[int]]:
        """Units that start from each unit's values."""

    def gather_rounds(self, unit: int) -> int:
        """The rounds of gathering a unit; 0 if it is read where it is stored."""

    def reduce_rounds(self, unit: int, *, last: bool) -> int:
        """The rounds of reducing a unit, `last`: in a step's last micro-batch."""

    def rests(self, unit: int, *, last: bool) -> bool:
        """Whether the last round of a reduction leaves nothing to take home."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """An action of the list, with the units that have to be there."""

    action: Action
    needed: frozenset[tuple[int, int]] = frozenset()
    computes: bool = False


Passes = Iterable[Action | Pair]
"""Passes, sends and receives; the passes of a pair are merged."""


def one_stage(micro_batches: int, *, train: bool, merges: bool = False) -> Passes:
    """Micro-batch after micro-batch, each with its backward pass.

    With `merges` a backward pass runs together with the next forward pass.
    """
    waiting: Action | None = None
    for number in range(micro_batches):
        forward = Action(word=Word.FORWARD, micro_batch=number)
        backward = Action(word=Word.BACKWARD, micro_batch=number)
        yield forward if waiting is None else (forward, waiting)
        waiting = backward if train and merges else None
        if train and not merges:
            yield backward
    if waiting is not None:
        yield waiting


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


def expand(chunks: Mapping[int, Chunk], passes: Passes, *, prefetch: int) -> tuple[Action, ...]:
    """All actions of a rank that holds these chunks and runs these passes, sends and receives."""
    needs = {number: tuple(chunk.needs()) for number, chunk in chunks.items()}
    visits = [visit for one in passes for visit in _merged(one, needs)]
    computing = [visit for visit in visits if visit.computes]
    gathers, releases = _gathers(chunks, computing, prefetch)
    reductions = _reductions(chunks, needs, computing)
    actions: list[Action] = []
    place = 0
    begun = False
    for visit in visits:
        # Messages go first, and what is behind a pass begins before the rank waits for one.
        if not begun and visit.action.word not in (Word.SEND_FORWARD, Word.SEND_BACKWARD):
            actions += (*gathers.get(place, ()), *reductions.get(place, ()))
            begun = True
        actions.append(visit.action)
        if visit.computes:
            actions += releases.get(place, ())
            place += 1
            begun = False
    return (*actions, *(() if begun else reductions.get(place, ())))


def _merged(passes: Action | Pair, needs: Mapping[int, Sequence[Need]]) -> Iterator[_Visit]:
    """The visits of a pass, or those of two passes in turn, from exchange to exchange."""
    pieces: list[list[list[_Visit]]] = []
    for action in one_by_one([passes]):
        own = needs.get(action.chunk, ())
        pieces.append([[]])
        for visit in _visits(action, own):
            pieces[-1][-1].append(visit)
            number = visit.action.segment
            way = action.word is not Word.FORWARD
            # What has set off runs under the other pass, up to where that one sets something off.
            if number is not None and own[number].sets_off[way]:
                pieces[-1].append([])
    # Passes of unlike chunks may have unlike numbers of exchanges.
    for turn in itertools.zip_longest(*pieces, fillvalue=[]):
        yield from itertools.chain.from_iterable(turn)


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


Placed = Mapping[int, Sequence[Action]]
"""Actions in front of the visit of each place, or behind it."""


def _gathers(
    chunks: Mapping[int, Chunk], visits: Sequence[_Visit], prefetch: int
) -> tuple[Placed, Placed]:
    """The rounds of gathers in front of each visit, and the releases behind it."""
    rounds = {
        (number, unit): chunk.gather_rounds(unit)
        for number, chunk in chunks.items()
        for unit in range(len(chunk.units))
    }
    ahead = _ahead(chunks, rounds)
    needed = _places(visits)
    # A visit that needs no unit, as of what lies between two recomputed layers, may be short.
    stops = sorted({place for places in needed.values() for place in places})
    number_of = {place: number for number, place in enumerate(stops)}
    # The rounds by place, in the order of the places where they were due, then of their readers.
    issued: dict[int, list[tuple[int, int, int, tuple[int, int], int]]] = {}
    behind: dict[int, list[Action]] = {}
    for unit, places in needed.items():
        if not rounds[unit]:
            continue
        per_pass = chunks[unit[0]].units[unit[1]].mode is Mode.PER_PASS
        window = max(prefetch * ahead[unit], 1)
        held = False
        for place, after in zip(places, [*places[1:], None], strict=True):
            for number in range(rounds[unit]) if not held else ():
                early = ahead[unit] - number
                due = number_of[place] - prefetch * early
                slot = stops[due] if due >= 0 else 0
                issued.setdefault(slot, []).append((due, place, -early, unit, number))
            # A unit that is needed so soon would be gathered again before it is released.
            held = after is not None and (
                not per_pass or number_of[after] - number_of[place] <= window
            )
            if not held:
                behind.setdefault(place, []).append(_of(Word.RELEASE, unit))
    gathers = {
        slot: [_of(Word.GATHER, unit, number) for *_, unit, number in sorted(some)]
        for slot, some in issued.items()
    }
    return gathers, {place: sorted(some, key=_unit) for place, some in behind.items()}


def _ahead(
    chunks: Mapping[int, Chunk], rounds: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """The rounds from a unit's first one to its reader, with those of units that start from it."""
    ahead: dict[tuple[int, int], int] = {}
    for number, chunk in chunks.items():
        followers = chunk.followers()
        # What starts from a unit's values has a higher number.
        for unit in reversed(range(len(chunk.units))):
            later = (ahead[number, other] for other in followers.get(unit, ()))
            ahead[number, unit] = rounds[number, unit] + max(later, default=0)
    return ahead


def _places(visits: Sequence[_Visit]) -> dict[tuple[int, int], list[int]]:
    """The places of the visits that need each unit."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, visit in enumerate(visits):
        for unit in visit.needed:
            places.setdefault(unit, []).append(place)
    return places


def _reductions(
    chunks: Mapping[int, Chunk], needs: Mapping[int, Sequence[Need]], visits: Sequence[_Visit]
) -> Placed:
    """The rounds of reductions in front of each visit, and behind the last one."""
    followers = {number: chunk.followers() for number, chunk in chunks.items()}
    # Gradients of weights are complete behind B, or behind W where these are apart.
    complete = [
        (place, visit.action)
        for place, visit in enumerate(visits)
        if visit.action.word in (Word.BACKWARD, Word.BACKWARD_WEIGHT)
    ]
    # Later passes overwrite earlier ones: the last is that of the order, whatever its number.
    last = {action.chunk: action.micro_batch for _, action in complete}
    ends: dict[tuple[int, int], int] = {}
    issued: dict[int, list[tuple[int, Action]]] = {}
    for place, action in complete:
        chunk = chunks[action.chunk]
        final = action.micro_batch == last[action.chunk]
        assert action.segment is not None
        for unit in needs[action.chunk][action.segment].reduced:
            if chunk.units[unit].mode is Mode.ONCE and not final:
                continue
            # Behind those that start from it, and behind its own of the micro-batch before.
            earlier = (unit, *followers[action.chunk].get(unit, ()))
            first = max(place + 1, *(ends.get((action.chunk, other), 0) for other in earlier))
            count = chunk.reduce_rounds(unit, last=final)
            dues = _dues(first, count, visits, rests=chunk.rests(unit, last=final))
            ends[action.chunk, unit] = max([first, *(due + STRIDE for due in dues)])
            for number, due in enumerate(dues):
                one = _of(Word.REDUCE, (action.chunk, unit), number, action.micro_batch)
                issued.setdefault(min(due, len(visits)), []).append((due, one))
    return {
        slot: [action for _, action in sorted(some, key=lambda pair: pair[0])]
        for slot, some in issued.items()
    }


def _dues(first: int, count: int, visits: Sequence[_Visit], *, rests: bool) -> list[int]:
    """The places where the rounds of a reduction are due, with that which takes it home."""
    # Where the step ends before the rounds do, they follow one another at every visit.
    stride = STRIDE if first + STRIDE * count <= len(visits) else 1
    dues = [first + stride * number for number in range(count)]
    home = first + stride * count
    # Backward passes are the longest, and gradients are added up there only.
    while home < len(visits) and visits[home - 1].action.word is Word.FORWARD:
        home += 1
    # Behind the last visit the end of the step waits for all that is under way.
    return dues if rests or home >= len(visits) else [*dues, home]


def _of(
    word: Word, unit: tuple[int, int], number: int | None = None, micro_batch: int | None = None
) -> Action:
    return Action(word=word, chunk=unit[0], unit=unit[1], round=number, micro_batch=micro_batch)


def _unit(action: Action) -> tuple[int, int | None]:
    return action.chunk, action.unit
