"""Streams of a device: computation on one, communication on others, each in order of issue.

What is issued, and in which order, does not depend on the time. So a step is recorded first, as a
score of operations (`score.py` lists them), and then played. Stretches
that are alike are recorded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from .reasons import Reason
from .score import ALONE, Entry, Links, Op, Player

COMPUTE = "compute"
PHASE_NAMES = ("forward", "backward", "update")
"""The phases of computation, in the order of their numbers."""

Sent: TypeAlias = int
"""A transfer, by its number."""
NOTHING: Sent = -1
"""A transfer that takes no time."""


class Event(NamedTuple):
    """The work of a stream from `start` to `end`; `phase` is forward, backward or update."""

    name: str
    kind: str
    stream: str
    phase: str
    start: float
    end: float


class Work(NamedTuple):
    """A stretch of computation; `issued`: seconds for which the host issues it."""

    name: str
    kind: str
    seconds: float
    issued: float = 0.0


class Wait(NamedTuple):
    """Computation that stood still for a transfer, `times` times as long as `seconds`.

    `sent`: the transfer. `phase`: of the computation. `late`: the part of the seconds that is due
    to other transfers, those before it on its stream and those beside it on its links.
    """

    sent: Event
    reason: Reason
    phase: str
    seconds: float
    late: float
    times: int = 1


class Stretch(NamedTuple):
    """Entries in a row, and the number of transfers among them."""

    entries: Sequence[Entry]
    sent: int


@dataclass(frozen=True, kw_only=True)
class Played:
    """A played score: `now` is the end of its computation, in seconds like `slowed` and `spent`.

    `slowed`: by which transfers slowed computation down. `spent`: on computation, by phase.
    """

    entries: Sequence[Entry]
    names: Sequence[str]
    player: Player

    @property
    def now(self) -> float:
        return self.player.now

    @property
    def slowed(self) -> float:
        return self.player.slowed

    @property
    def spent(self) -> Mapping[str, float]:
        return dict(zip(PHASE_NAMES, self.player.spent, strict=True))

    @cached_property
    def communication(self) -> float:
        """Seconds of all transfers, each as if alone."""
        sent: list[float] = []
        mark = 0
        for entry in self.entries:
            if entry.op is Op.SEND:
                sent.append(entry.seconds)
            elif entry.op is Op.MARK:
                mark = len(sent)
            elif entry.op is Op.REPEAT:
                sent.append(entry.number * math.fsum(sent[mark:]))
        return math.fsum(sent)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Computations and transfers in the order of issue."""
        return tuple(event for _, event in self._numbered_events())

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The waits of computation, in their order."""
        events = dict(self._numbered_events())
        waits: list[Wait] = []
        mark = 0
        for index, (phase, entry) in enumerate(self._with_phases()):
            for sent, seconds, late in self.player.waited.get(index, ()):
                ends = entry.op is Op.FINISH or entry.reason is Reason.END
                reason = Reason.END if ends else self.entries[sent].reason
                waits.append(Wait(events[sent], reason, phase, seconds, late))
            if entry.op is Op.MARK:
                mark = len(waits)
            elif entry.op is Op.REPEAT:
                waits += [one._replace(times=entry.number) for one in waits[mark:]]
        return tuple(waits)

    def _numbered_events(self) -> Iterator[tuple[int, Event]]:
        times = zip(self.player.starts, self.player.ends, strict=True)
        for index, ((phase, entry), (start, end)) in enumerate(
            zip(self._with_phases(), times, strict=True)
        ):
            if entry.op in (Op.COMPUTE, Op.SEND):
                stream = COMPUTE if entry.op is Op.COMPUTE else self.names[entry.number]
                yield index, Event(entry.name, entry.kind, stream, phase, start, end)

    def _with_phases(self) -> Iterator[tuple[str, Entry]]:
        phase = PHASE_NAMES[0]
        for entry in self.entries:
            if entry.op is Op.PHASE:
                phase = PHASE_NAMES[entry.number]
            yield phase, entry


class Streams:
    """Records a step; one stream has all computation.

    `slowdown`: factor on the seconds of computation while anything is sent. `uses`: the links that
    a stream sends over, if any, and how busy it keeps each. `blocking`: the host waits for every
    computation. `ends`: whether all passes are over.
    """

    def __init__(
        self,
        slowdown: float,
        uses: Mapping[str, Mapping[str, float]] | None = None,
        *,
        blocking: bool = False,
    ) -> None:
        self.slowdown = slowdown
        self.blocking = blocking
        self.uses = uses or {}
        self.entries: list[Entry] = []
        self.ends = False
        self._sent = 0
        self._phase = PHASE_NAMES[0]
        self._numbers: dict[str, int] = {}
        self._stretches: dict[Hashable, Stretch] = {}

    @property
    def phase(self) -> str:
        """The phase to which computation counts from here on."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase != self._phase:
            self.entries.append(Entry(Op.PHASE, PHASE_NAMES.index(phase)))
            self._phase = phase

    # --- recording ---

    def compute(self, name: str, kind: str, seconds: float, issued: float = 0.0) -> None:
        """Compute for `seconds`, longer while something is sent, issued for as long as it says."""
        if seconds > 0 or issued > 0:
            self.entries.append(Entry(Op.COMPUTE, 0, seconds, name, kind, issued=issued))

    def compute_all(self, works: Iterable[Work]) -> None:
        """Compute one after the other, each longer while something is sent."""
        for work in works:
            self.compute(*work)

    def send(self, name: str, kind: str, stream: str, seconds: float, reason: Reason) -> Sent:
        """Communicate on `stream`, behind the computation so far."""
        # A group of one rank sends nothing, and keeps no stream busy.
        if seconds <= 0:
            return NOTHING
        number = self._numbers.setdefault(stream, len(self._numbers))
        self.entries.append(Entry(Op.SEND, number, seconds, name, kind, reason))
        self._sent += 1
        return self._sent - 1

    def wait(self, sent: Sent) -> None:
        """Let computation wait until a transfer is over."""
        if sent != NOTHING:
            # Counted from here, so that stretches may be recorded anywhere.
            reason = Reason.END if self.ends else Reason.VALUES
            self.entries.append(Entry(Op.WAIT, self._sent - sent, reason=reason))

    def mark(self) -> None:
        """Begin what `repeat` repeats."""
        self.entries.append(Entry(Op.MARK))

    def repeat(self, times: int) -> None:
        """Count what was played since the mark so many times more, without playing it."""
        self.entries.append(Entry(Op.REPEAT, times))

    def finish(self) -> None:
        """Wait for all that is under way."""
        self.entries.append(Entry(Op.FINISH))

    # --- stretches that are alike ---

    def stretch(self, key: Hashable, record: Callable[[], None]) -> None:
        """Append what `record` records, which is the same wherever the key is.

        It may wait for its own transfers only.
        """
        if key in self._stretches:
            self.append(self._stretches[key])
        else:
            start = len(self.entries)
            before = self._sent
            record()
            self._stretches[key] = Stretch(self.entries[start:], self._sent - before)

    def stretches(self, sending: Iterator[Sent]) -> list[Stretch]:
        """Return the stretches up to each transfer and behind the last one, appending none."""
        start = len(self.entries)
        before = self._sent
        stretches = []
        for _ in itertools.chain(sending, [NOTHING]):
            stretches.append(Stretch(self.entries[start:], self._sent - before))
            del self.entries[start:]
            self._sent = before
        return stretches

    def append(self, stretch: Stretch) -> Sent:
        """Append a stretch; returns its last transfer, if it has any."""
        self.entries += stretch.entries
        self._sent += stretch.sent
        return self._sent - 1 if stretch.sent else NOTHING

    # --- playing ---

    def play(self) -> Played:
        """Play all that has been recorded."""
        group_of = _shared(self.uses)
        groups = [group_of.get(stream, ALONE) for stream in self._numbers]
        shares = [self.uses.get(stream, {}) for stream in self._numbers]
        player = Player(Links(groups, shares), self.slowdown, blocking=self.blocking)
        player.play(self.entries)
        return Played(entries=self.entries, names=list(self._numbers), player=player)


def _shared(uses: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """The groups of streams that share links, directly or by way of others."""
    together: list[set[str]] = []
    for stream, links in uses.items():
        near = [some for some in together if any(links.keys() & uses[one] for one in some)]
        together = [some for some in together if some not in near] + [{stream}.union(*near)]
    # A link that only one stream sends over needs no sharing.
    several = [some for some in together if len(some) > 1]
    return {stream: number for number, some in enumerate(several) for stream in some}
