"""Progress of the ranks: who waits for whom, and the circles in which nobody can go on.

A *host* is a rank's program; it waits for an operation of a queue, or for others to make a group.
The operation at the head of a *queue* waits for other ranks, whose queues have other heads or none.
A rank that has waited for long tells the others through the store. A circle of ranks none of which
changes for some ticks of their own is a deadlock, however slow the machine is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from autopar.errors import RunError

PATIENCE = 1.0
"""Seconds of waiting after which a rank tells the others what it waits for."""
TICK = 0.25
"""Seconds between two looks at the others."""

AUTOGRAD = "autopar-autograd"
"""The name of the thread on which backward passes run while the program waits."""

STILL = 4
"""Ticks for which each rank of a circle says the same before it is taken for a deadlock."""

Node = tuple[str, int, str]
"""A host ("host", rank, "") or a queue ("queue", rank, name of the group)."""


class RuleBroken(RunError):
    """A program breaks a rule of NCCL (exit code 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The operation at the head of a queue.

    `peers`: the ranks that it has not met yet. `ranks`: the group.
    """

    text: str
    collective: bool
    peers: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The wait of a host: for a queue, or for `peers` to make the group."""

    text: str
    group: str
    peers: tuple[int, ...] = ()


class Progress:
    """The queues and waits of this rank, and the watch over those of all ranks."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank = rank
        self.failure: Exception | None = None
        self._size = size
        self._store = store
        self._lock = threading.Lock()
        self._version = 0
        self._beat = 0
        self._heads: dict[str, tuple[float, Head]] = {}
        self._waits: dict[int, tuple[float, Wait]] = {}
        threading.Thread(target=self._watch, name="autopar-progress", daemon=True).start()

    # --- events of this rank ---

    def head(self, group: str, head: Head | None) -> None:
        """Note the head of a queue; None if the queue is empty."""
        with self._lock:
            self._version += 1
            if head is None:
                self._heads.pop(group, None)
            else:
                self._heads[group] = time.monotonic(), head

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Inside, the host waits."""
        thread = threading.current_thread()
        # Threads beside the program, which save checkpoints for example, do not hold it up.
        host = thread is threading.main_thread() or thread.name == AUTOGRAD
        if not host:
            yield
            return
        self._note(thread.ident, wait)
        try:
            yield
        finally:
            self._note(thread.ident, None)

    def _note(self, thread: int | None, wait: Wait | None) -> None:
        assert thread is not None
        with self._lock:
            self._version += 1
            if wait is None:
                self._waits.pop(thread, None)
            else:
                self._waits[thread] = time.monotonic(), wait

    def check(self) -> None:
        """Raise the failure of this rank, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        """Let every wait and operation of this rank end with a failure; the first one counts."""
        if self.failure is None:
            self.failure = failure

    # --- the watch ---

    def _watch(self) -> None:
        suspects: dict[int, tuple[int, int]] = {}
        while self.failure is None:
            time.sleep(TICK)
            try:
                if self._tell():
                    suspects = self._look(suspects)
            except Exception:
                # The store ends with the process that serves it, and so does this one.
                return

    def _tell(self) -> bool:
        """Post this rank's state, if it has waited for long."""
        with self._lock:
            entries = (*self._heads.values(), *self._waits.values())
            began = min((since for since, _ in entries), default=time.monotonic())
            waits = [wait for _, wait in self._waits.values()]
            self._beat += 1
            state = {
                "version": self._version,
                "beat": self._beat,
                "host": asdict(waits[-1]) if waits else None,
                "heads": {group: asdict(head) for group, (_, head) in self._heads.items()},
            }
        if time.monotonic() - began < PATIENCE:
            return False
        # Ranks that go on say nothing, so that the store has nothing to do.
        self._store.set(f"progress/{self.rank}", json.dumps(state))
        return True

    def _look(self, suspects: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Look for a circle; the ranks in it, with their versions and beats."""
        keys = {rank: f"progress/{rank}" for rank in range(self._size)}
        states = {
            rank: json.loads(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }
        circle = find_circle(states)
        seen = {rank: (states[rank]["version"], states[rank]["beat"]) for _, rank, _ in circle}
        versions = {rank: version for rank, (version, _) in seen.items()}
        if not seen or versions != {rank: version for rank, (version, _) in suspects.items()}:
            return seen
        # Every rank has said the same for a while, also where the machine leaves it little time.
        if all(beat - suspects[rank][1] >= STILL for rank, (_, beat) in seen.items()):
            self.fail(RuleBroken(deadlock(circle, states)))
        return suspects


def _edges(node: Node, states: Mapping[int, Mapping[str, Any]]) -> Iterator[Node]:
    """The nodes for which a node waits."""
    kind, rank, group = node
    state = states.get(rank)
    if state is None:
        return
    if kind == "host":
        wait = state["host"]
        if wait is not None and not wait["peers"]:
            yield "queue", rank, wait["group"]
        elif wait is not None:
            yield from (("host", peer, "") for peer in wait["peers"])
        return
    head = state["heads"].get(group)
    # Without a head the queue is between two operations, if its thread has not had the processor.
    for peer in head["peers"] if head is not None else ():
        other = states.get(peer, {}).get("heads", {}).get(group)
        if other is None:
            yield "host", peer, ""
        # Heads that are about to meet hold nobody up.
        elif not _meets(head, rank, other):
            yield "queue", peer, group


def _meets(head: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> bool:
    """Whether two heads of one group are about to meet."""
    if head["collective"] or other["collective"]:
        return bool(head["collective"] and other["collective"])
    return rank in other["peers"]


def find_circle(states: Mapping[int, Mapping[str, Any]]) -> list[Node]:
    """Nodes each of which waits for the next, and the last for the first; empty if there are none.

    `states`: of the ranks that have waited for long.
    """
    done: set[Node] = set()
    for rank, state in sorted(states.items()):
        starts: list[Node] = [("host", rank, "")]
        starts += [("queue", rank, group) for group in state["heads"]]
        for start in starts:
            circle = _circle_from(start, states, done)
            if circle:
                return circle
    return []


def _circle_from(
    start: Node, states: Mapping[int, Mapping[str, Any]], done: set[Node]
) -> list[Node]:
    """A circle that is reached from a node, by a search in depth."""
    path = [start]
    rest = [_edges(start, states)]
    while path:
        follower = next(rest[-1], None)
        if follower is None:
            done.add(path.pop())
            rest.pop()
        elif follower in path:
            return path[path.index(follower) :]
        elif follower not in done:
            path.append(follower)
            rest.append(_edges(follower, states))
    return []


def deadlock(circle: Sequence[Node], states: Mapping[int, Mapping[str, Any]]) -> str:
    """A circle in words, a line for each of its nodes."""
    lines = []
    for kind, rank, group in circle:
        if kind == "host":
            lines.append(f"  rank {rank} waits for {states[rank]['host']['text']}")
            continue
        head = states[rank]["heads"][group]
        ranks = ", ".join(map(str, head["ranks"]))
        peers = ", ".join(map(str, head["peers"]))
        lines.append(
            f"  next in rank {rank}'s queue of the group ({ranks}) is {head['text']}, "
            f"which waits for rank {peers}"
        )
    return "no rank can go on, each waits for the next:\n" + "\n".join(lines)
