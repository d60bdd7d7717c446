"""A simulator of schedules on links: full-duplex ports, one per device and level or shared by
several devices, and levels of links.

    a rank starts its round k when all that it sends and receives in round k - 1 is done; a message
    starts when both of its ranks have
    a message takes latency, then bytes / min(share of the sender's port, share of the receiver's
    port)

The messages that use a port at once divide it equally. Two ranks talk over the outermost level on
which they are apart; on level l `shared_by` neighbouring devices have one port. A switch (the rank
after the last) has as many ports as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ClusterError
from tests.costmodel.collectives.schedules.schedule import Schedule

SAME_TIME = 1e-12
"""Events nearer than this, relative to the time between events, are one (1)."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A level of links: seconds per message, B/s of a port each way, and how many neighbouring
    devices have one port together.
    """

    latency: float
    rate: float
    shared_by: int = 1


def outermost(a: int, b: int, sizes: Sequence[int]) -> int:
    """The level over which ranks a and b talk, where `sizes` branches make up each level from the
    inside out.
    """
    for level, unit in enumerate(np.cumprod(sizes)):
        if a // unit == b // unit:
            return level
    return len(sizes) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """The messages of a schedule as arrays: ranks, round, bytes, latency, rate, and the ports that
    they occupy.
    """

    ends: Ints  # [messages, 2]
    round: Ints
    nbytes: NDArray[np.float64]
    latency: NDArray[np.float64]
    rate: NDArray[np.float64]
    ports: Ints  # [messages, 2]
    count: int


def _traffic(
    schedule: Schedule, nbytes: float, sizes: Sequence[int], links: Sequence[Link]
) -> _Traffic:
    rows = [(one, number) for number, messages in enumerate(schedule.rounds) for one in messages]
    names: dict[tuple[object, ...], int] = {}
    ports = []
    latency = []
    rate = []
    switch = schedule.ranks
    for index, (one, _) in enumerate(rows):
        level = (
            len(links) - 1
            if switch in (one.source, one.destination)
            else outermost(one.source, one.destination, sizes)
        )
        link = links[level]
        latency.append(link.latency)
        rate.append(link.rate)
        for way, rank in (("out", one.source), ("in", one.destination)):
            key = ("switch", index, way) if rank == switch else (level, way, rank // link.shared_by)
            ports.append(names.setdefault(key, len(names)))
    return _Traffic(
        ends=np.array([(one.source, one.destination) for one, _ in rows], dtype=np.int64).reshape(
            -1, 2
        ),
        round=np.array([number for _, number in rows], dtype=np.int64),
        nbytes=np.array([schedule.nbytes(one, nbytes) for one, _ in rows]),
        latency=np.array(latency),
        rate=np.array(rate),
        ports=np.array(ports, dtype=np.int64).reshape(-1, 2),
        count=len(names),
    )


class _Rounds:
    """Where every rank stands: the messages of its present round that are not done, and the rounds
    that it still has.
    """

    def __init__(self, traffic: _Traffic, ranks: int) -> None:
        self.traffic = traffic
        rounds = int(traffic.round.max()) + 1
        self.left = np.zeros((rounds, ranks), dtype=np.int64)
        np.add.at(self.left, (traffic.round[:, None], traffic.ends), 1)
        self.starts = np.searchsorted(traffic.round, np.arange(rounds + 1))
        self.at = np.zeros(ranks, dtype=np.int64)
        self.begun = np.zeros(len(traffic.round), dtype=bool)

    def finish(self, messages: Ints) -> None:
        """The messages are done."""
        np.subtract.at(
            self.left, (self.traffic.round[messages][:, None], self.traffic.ends[messages]), 1
        )

    def begin(self) -> Ints:
        """Messages both of whose ranks have reached their round, and that have not begun."""
        rounds = len(self.left)
        here = np.flatnonzero(self.at < rounds)
        for rank in here[self.left[self.at[here], here] == 0]:
            busy = np.flatnonzero(self.left[self.at[rank] :, rank])
            self.at[rank] = self.at[rank] + busy[0] if len(busy) else rounds
        low = int(self.at.min())
        if low == rounds:
            return np.zeros(0, dtype=np.int64)
        high = int(self.at[self.at < rounds].max())
        some = slice(self.starts[low], self.starts[high + 1])
        ready = ~self.begun[some] & (
            self.at[self.traffic.ends[some]] == self.traffic.round[some][:, None]
        ).all(axis=1)
        starting = np.flatnonzero(ready) + self.starts[low]
        self.begun[starting] = True
        return np.asarray(starting, dtype=np.int64)


def simulate(
    schedule: Schedule, nbytes: float, sizes: Sequence[int], links: Sequence[Link]
) -> float:
    """Seconds of a schedule for a collective of `nbytes`, over levels of `sizes` branches and their
    `links`, from the inside out.
    """
    if math.prod(sizes) != schedule.ranks or len(sizes) != len(links):
        raise ClusterError(
            f"levels of {tuple(sizes)} branches and {len(links)} links do not hold "
            f"{schedule.ranks} ranks"
        )
    traffic = _traffic(schedule, nbytes, sizes, links)
    if not len(traffic.round):
        return 0.0
    rounds = _Rounds(traffic, schedule.ranks + 1)
    active = rounds.begin()
    waiting = traffic.latency[active]
    left = traffic.nbytes[active]
    now = 0.0
    while len(active):
        flowing = waiting <= 0
        load = np.bincount(traffic.ports[active[flowing]].ravel(), minlength=traffic.count)
        rate = traffic.rate[active] / np.maximum(load[traffic.ports[active]].max(axis=1), 1)
        need = np.where(flowing, left / rate, waiting)
        step = float(need.min())
        now += step
        ended = need <= step * (1 + SAME_TIME)
        left = np.where(flowing, np.maximum(left - step * rate, 0.0), left)
        waiting = np.where(flowing, 0.0, np.where(ended, 0.0, waiting - step))
        done = ended & (flowing | (left == 0))
        if done.any():
            rounds.finish(active[done])
            fresh = rounds.begin()
            active = np.concatenate([active[~done], fresh])
            waiting = np.concatenate([waiting[~done], traffic.latency[fresh]])
            left = np.concatenate([left[~done], traffic.nbytes[fresh]])
    assert rounds.begun.all(), "some messages never began"
    return now
