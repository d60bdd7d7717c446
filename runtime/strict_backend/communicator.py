"""A communicator: the queue of a group on one rank, whose operations start one after the other.

An operation starts when the one before it is over. It first meets the ranks that it concerns: they
exchange statements of what they are about to do, and end with an error if these do not agree. So a
send waits for its receive. Then it runs on Gloo, and ends late (`lateness`). Its results reach the
program's tensors when the program waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from autopar.runtime.ranks.current_action import present

from .lateness import Lateness, now, wait_until
from .progress import Head, Progress, RuleBroken, Wait
from .statements import BYTES, REMEMBERED, Statement, collective_difference, message_difference

CONTROL = 7001
"""The tag of statements between two ranks; messages have the tags behind it."""
POLL = 0.2
"""Seconds after which a wait looks whether this rank has failed."""
HANDLES = 1024
"""Handles of past operations that a communicator keeps."""

Gloo = Any
"""The backend below, a `ProcessGroupGloo`."""
Results = Sequence[tuple[Tensor, Tensor]]
"""Tensors of the program, and the values that they get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation in a queue.

    `run`: executes it on Gloo. `messages`: by rank in the group, the messages to and from it; None
    for a collective. `outgoing`, `incoming`: the parts of an all-to-all. `members`: the group made
    by a split. `limit`: how late the others may be, if not as the group has it.
    """

    kind: str
    facts: str
    run: Callable[[Gloo], Results]
    messages: Mapping[int, tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    outgoing: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    limit: timedelta | None = None


@dataclass(slots=True)
class _Issued:
    """An operation with its rank's statement and the outcome."""

    operation: Operation | None
    statement: Statement
    done: threading.Event = field(default_factory=threading.Event)
    results: Results = ()
    failure: Exception | None = None
    end: float = 0.0


class Work(dist.Work):
    """The handle of an operation: results are in place once it has been waited for."""

    def __init__(self, issued: _Issued, communicator: Communicator) -> None:
        super().__init__()
        self._issued = issued
        self._communicator = communicator

    def wait(self, timeout: object = None) -> bool:
        """Wait for the operation, and put its results in place."""
        issued = self._issued
        progress = self._communicator.progress
        if not issued.done.is_set():
            text = f"{issued.statement} in the group {self._communicator.ranks}"
            with progress.waiting(Wait(text=text, group=self._communicator.name)):
                while not issued.done.wait(POLL):
                    progress.check()
        if issued.failure is not None:
            raise issued.failure
        # A stated time is sat out here, and not in the queue, whose thread may wake up late.
        wait_until(issued.end)
        results = issued.results
        issued.results = ()
        for target, value in results:
            target.data.copy_(value)
        self._communicator.over(self)
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over; without `wait` its results are not in place."""
        # What Gloo has run may still be under way on a link of stated times.
        over = self._issued.done.is_set() and self._issued.end <= now()
        if over and not self._issued.results:
            self._communicator.over(self)
        return over

    def is_success(self) -> bool:
        """Whether the operation is over and has not failed."""
        return self.is_completed() and self._issued.failure is None


class Communicator:
    """The queue of a group on this rank.

    `ranks`: the group's ranks, by their numbers in the world. `place`: this rank's among them.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], gloo: Gloo, progress: Progress) -> None:
        self.name = name
        self.ranks = ranks
        self.place = ranks.index(progress.rank)
        self.progress = progress
        # torch holds the half of a handle that is written in C++, these hold the other half. torch
        # waits for a handle once for every tensor of its operation.
        self._under_way: set[Work] = set()
        self._over: deque[Work] = deque(maxlen=HANDLES)
        self._gloo = gloo
        self._lateness = Lateness(name, ranks, f"{progress.rank} {ranks}")
        self._before: deque[str] = deque(maxlen=REMEMBERED)
        self._queue: queue.SimpleQueue[_Issued] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"autopar-queue {ranks}", daemon=True).start()

    def issue(self, operation: Operation) -> Work:
        """Put an operation at the end of the queue."""
        self.progress.check()
        action = present().action
        statement = Statement(
            rank=self.progress.rank,
            kind=operation.kind,
            facts=operation.facts,
            action=str(action) if action is not None else "",
            outgoing=operation.outgoing,
            incoming=operation.incoming,
            members=operation.members,
            start=now(),
        )
        issued = _Issued(operation, statement)
        work = Work(issued, self)
        self._under_way.add(work)
        self._queue.put(issued)
        return work

    def over(self, work: Work) -> None:
        """Note that an operation's results are in place."""
        if work in self._under_way:
            self._under_way.discard(work)
            self._over.append(work)

    def _serve(self) -> None:
        """Run the operations of the queue, one after the other."""
        while True:
            issued = self._queue.get()
            operation = issued.operation
            assert operation is not None
            try:
                self.progress.check()
                statement = replace(
                    issued.statement,
                    before=tuple(self._before),
                    start=self._lateness.start(issued.statement.start),
                )
                # Nothing is sent before all agree, so no rank can read another's data as its own.
                start = self._meet(operation, statement)
                with torch.no_grad():
                    issued.results = operation.run(self._gloo)
                issued.end = self._lateness.end(operation.kind, start)
                self._before.append(str(issued.statement))
            except Exception as error:
                issued.failure = error
                self.progress.fail(error)
            self.progress.head(self.name, None)
            # Only the results live on, not the tensors that the operation has read.
            issued.operation = operation = None
            issued.done.set()

    # --- meeting the others ---

    def _meet(self, operation: Operation, own: Statement) -> float:
        """Exchange statements with the ranks that the operation concerns, and compare them.

        Returns the time at which the last of them starts.
        """
        if operation.messages is None:
            others = [rank for rank in self.ranks if rank != own.rank]
            self._at_head(own, others, collective=True)
            met = self._statements_of_all(own, operation.limit)
            difference = collective_difference(met)
        else:
            met, difference = self._meet_peers(operation.messages, own)
        if difference:
            action = f", action {own.action}" if own.action else ""
            raise RuleBroken(f"rank {own.rank}{action}, group {self.ranks}: {difference}")
        # A collective moves nothing before the last rank has come.
        return max(own.start, *(statement.start for statement in met))

    def _at_head(self, own: Statement, peers: Sequence[int], *, collective: bool) -> None:
        head = Head(text=str(own), collective=collective, peers=tuple(peers), ranks=self.ranks)
        self.progress.head(self.name, head)

    def _statements_of_all(self, own: Statement, limit: timedelta | None) -> list[Statement]:
        """The statements of all ranks of the group, by rank."""
        options = AllgatherOptions()
        if limit is not None:
            options.timeout = limit
        mine = _tensor_of(own)
        all_of_them = torch.empty(len(self.ranks), BYTES, dtype=torch.uint8)
        self._gloo._allgather_base(all_of_them, mine.view(1, -1), options).wait()
        self._at_head(own, (), collective=True)
        return [_statement_in(row) for row in all_of_them]

    def _meet_peers(
        self, messages: Mapping[int, tuple[tuple[str, ...], tuple[str, ...]]], own: Statement
    ) -> tuple[list[Statement], str]:
        """Exchange statements about the messages with every rank that has some.

        Returns theirs, and a disagreement.
        """
        # All statements leave before one is waited for: a batch may be a circle of ranks.
        pending = [self.ranks[peer] for peer in messages]
        self._at_head(own, pending, collective=False)
        sent = []
        coming = []
        met = []
        for peer, (outgoing, incoming) in messages.items():
            said = replace(own, outgoing=outgoing, incoming=incoming)
            message = _tensor_of(said)
            answer = torch.empty(BYTES, dtype=torch.uint8)
            # The tensors stay in these lists until the messages have gone.
            sent.append((self._gloo.send([message], peer, CONTROL), message))
            coming.append((self._gloo.recv([answer], peer, CONTROL), answer, said))
        for work, answer, said in coming:
            work.wait()
            other = _statement_in(answer)
            pending.remove(other.rank)
            self._at_head(own, pending, collective=False)
            met.append(other)
            difference = message_difference(said, other)
            if difference:
                return met, difference
        for work, _ in sent:
            work.wait()
        return met, ""


def _tensor_of(statement: Statement) -> Tensor:
    return torch.frombuffer(bytearray(statement.to_bytes()), dtype=torch.uint8)


def _statement_in(message: Tensor) -> Statement:
    return Statement.from_bytes(message.numpy().tobytes())
