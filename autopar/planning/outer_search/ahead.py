"""Work ahead of the search: other processes work out figures of nodes that will come soon.

The search itself goes on exactly as it would alone. What it is about to need it asks others for, as
questions; they answer with figures (`model/figures.py`), small values under all that they depend
on. So a figure of others is one that the search would have worked out itself, and its plan is the
same whatever the number of processes, and whoever is fast. A figure that is not there, or rests on
another order, is worked out here.

Each place (devices, stages, mesh) belongs to one process, in which parts of its tables are known.
Processes are forked once a search has shown to be long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

from autopar.errors import UsageError
from autopar.forking import Forked, Gone, processes
from autopar.planning.model.figures import Entry, Figures
from autopar.search import Infeasible, NoAssignment, Sharing, Unshared, sharing

from .questions import Question

LONG = 1.0
"""CPU seconds of a search after which it is worth forking: a fork and its end take some 0.05."""
FEW = 2
"""Questions before a process below which it is asked more, so that it need not wait for them."""
MANY = 4
"""Questions before a process at most: the search may turn elsewhere before it comes to more."""

QUESTIONS = 1 << 16
"""Questions that are asked in a search at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with its number, and the shared orders that are new since the last one."""

    number: int
    question: Question
    orders: list[tuple[object, Any]]


@dataclass(slots=True, kw_only=True, eq=False)
class Other:
    """Another process, the questions before it, and how many shared orders it knows.

    `begun`: the number of the last question that it began with, in memory that both see.
    `called_off`: there too, for every number whether the question need not be begun any more.
    """

    process: Forked[Asked, list[list[Entry]]]
    begun: Any
    called_off: Any
    known: int
    before: list[Asked] = field(default_factory=list)


class Ahead:
    """Other processes that work ahead of a search.

    `work`: works on a question in such a process, for the sake of its figures. `homes`: where these
    are. `jobs`: the number of all processes (None: as many as cores).
    """

    def __init__(
        self, work: Callable[[Question], None], homes: tuple[Figures, ...], jobs: int | None
    ) -> None:
        self.work = work
        self.homes = homes
        self.count = processes(jobs)
        self.begun = time.process_time()
        self.others: list[Other] = []
        self._owners: dict[object, int] = {}
        self._asked: dict[Question, tuple[Other, Asked]] = {}

    def is_ready(self) -> bool:
        """Whether another process has time; they are forked once the search has become long."""
        if self.count > 1 and not self.others and sharing() is not None:
            if time.process_time() - self.begun < LONG:
                return False
            self._fork()
        # Answers are taken whenever there is one, so that no pipe fills up.
        for other in self.others:
            while other.process.has_answered:
                self._receive(other)
        return any(len(other.before) < FEW for other in self.others)

    def _fork(self) -> None:
        shared = sharing()
        assert shared is not None
        try:
            for _ in range(self.count - 1):
                begun = RawValue("q", -1)
                called_off = RawArray("b", QUESTIONS)
                helper = Helper(self.work, self.homes, shared, begun, called_off)
                before = [other.process for other in self.others]
                process = Forked(helper.begin, helper.answer, before)
                self.others.append(
                    Other(
                        process=process, begun=begun, called_off=called_off, known=len(shared.log)
                    )
                )
        # A machine that has no room for more processes does without.
        except OSError:
            self.end()

    def has_time_for(self, place: object) -> bool:
        """Whether a place belongs to another process, and that one has time."""
        # Every so many-th place is the search's own, which works, too.
        number = self._owners.setdefault(place, len(self._owners)) % self.count
        # Fewer are left where one was ended.
        return 0 < number <= len(self.others) and len(self.others[number - 1].before) < MANY

    def ask(self, question: Question) -> None:
        """Have the process work on a question to which its place belongs."""
        number = len(self._asked)
        known = question in self._asked or number == QUESTIONS
        if known or not self.has_time_for(question.place):
            return
        shared = sharing()
        assert shared is not None
        other = self.others[self._owners[question.place] % self.count - 1]
        # It finds the same figure only if it follows the orders that the search follows by now.
        asked = Asked(number=number, question=question, orders=shared.log[other.known :])
        try:
            other.process.post(asked)
        except Gone:
            self.end()
            return
        other.known = len(shared.log)
        other.before.append(asked)
        self._asked[question] = other, asked

    def wait(self, question: Question) -> None:
        """Wait for the answer to a question, if somebody works on it.

        Whoever has not begun with it need not do so any more.
        """
        if question not in self._asked:
            return
        other, asked = self._asked[question]
        # Both may see the old number at the same time: then both do the work, and nobody waits.
        other.called_off[asked.number] = 1
        while asked in other.before and other.begun.value >= asked.number:
            self._receive(other)

    def _receive(self, other: Other) -> None:
        try:
            answer = other.process.receive()
        # It was ended, perhaps for its memory: the search goes on alone.
        except Gone:
            self.end()
            return
        other.before.pop(0)
        for home, entries in zip(self.homes, answer, strict=True):
            home.take(entries)

    def end(self) -> None:
        """End the other processes; from now on the search works alone."""
        # Figures that nobody answers any more are worked out here.
        self.count = 1
        for other in self.others:
            other.before.clear()
            other.process.end()
        self.others.clear()
        self._asked.clear()
        for home in self.homes:
            home.take_no_more()


class Helper:
    """The work of another process: it follows the shared orders of the search, and adds none.

    The fields are those of `Ahead` and `Other`.
    """

    def __init__(
        self,
        work: Callable[[Question], None],
        homes: tuple[Figures, ...],
        shared: Sharing,
        begun: Any,
        called_off: Any,
    ) -> None:
        self.work = work
        self.homes = homes
        self.shared = shared
        self.begun = begun
        self.called_off = called_off

    def begin(self) -> None:
        """Begin as a copy of the search."""
        self.shared.is_copy = True
        for home in self.homes:
            home.begin_telling()

    def answer(self, asked: Asked) -> list[list[Entry]]:
        """The figures that come of the work on a question."""
        self.shared.extend(asked.orders)
        self.begun.value = asked.number
        if not self.called_off[asked.number]:
            # The search itself finds out, and says, why something is not possible.
            with suppress(Unshared, Infeasible, NoAssignment, UsageError):
                self.work(asked.question)
        return [home.tell() for home in self.homes]
