"""`Crew`: the ranks that measure together, where each of them runs, and one clock for all."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import RunError

PINGS = 20
"""Round trips that measure the difference of two hosts' clocks; the shortest one counts."""
_PR_SET_TIMERSLACK = 29


class Crew:
    """A rank among those that measure together; every rank of the process group makes one.

    Control messages go over Gloo, whatever backend is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
        # A GPU's own collectives would disturb what is measured.
        self.control = (
            dist.group.WORLD if self.backend == "gloo" else dist.new_group(backend="gloo")
        )
        # By default the kernel may end a sleep 50 microseconds late.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        places = self._everyone((_host(), _network()))
        self.nodes = _numbered(places)
        self.per_node = self.world // (max(self.nodes) + 1)
        if self.nodes != [rank // self.per_node for rank in range(self.world)]:
            raise RunError(
                f"the ranks lie on nodes {self.nodes}; give every node as many ranks,"
                " and neighbouring ranks the same node"
            )
        first_host, _ = places[0]
        self.offset = self._clock_offset([host == first_host for host, _ in places])
        self.margin = self._control_latency()

    @property
    def node_count(self) -> int:
        """Number of nodes; ranks of one node share a host and its network namespace."""
        return self.world // self.per_node

    def now(self) -> float:
        """Seconds on the clock of rank 0."""
        return time.monotonic() + self.offset

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def start(self) -> float:
        """Return at the same time on all ranks, and say which.

        It sleeps, since ranks may share a core.
        """
        self.barrier()
        at = torch.tensor([self.now() + self.margin], dtype=torch.float64)
        # The start lies so far ahead that the slowest rank has heard of it by then.
        dist.broadcast(at, 0, group=self.control)
        while (seconds := float(at) - self.now()) > 0:
            time.sleep(seconds)
        return float(at)

    def timed(self, call: Callable[[], None], calls: int) -> torch.Tensor:
        """The planned start of each call, and every rank's entry and exit, on all ranks.

        The result is [ranks, calls, 3].
        """
        mine = torch.empty(calls, 3, dtype=torch.float64)
        for index in range(calls):
            start = self.start()
            entered = self.now()
            call()
            # A call of NCCL returns when it is enqueued, not when it is done.
            self.synchronize()
            mine[index] = torch.tensor([start, entered, self.now()], dtype=torch.float64)
        return self.gathered(mine)

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked, on all ranks."""
        tensors = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(tensors, mine, group=self.control)
        return torch.stack(tensors)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _everyone(self, mine: tuple[str, str]) -> list[tuple[str, str]]:
        """The host and network of every rank."""
        places: list[tuple[str, str]] = [("", "")] * self.world
        dist.all_gather_object(places, mine, group=self.control)
        return places

    def _control_latency(self) -> float:
        """Seconds that cover an agreement on a start."""
        times = []
        for _ in range(5):
            start = time.monotonic()
            self.barrier()
            times.append(time.monotonic() - start)
        # A broadcast takes about as long as a barrier; half a millisecond is for a late wake-up.
        mine = torch.tensor([2 * statistics.median(times) + 5e-4], dtype=torch.float64)
        return float(self.gathered(mine).max())

    def _clock_offset(self, same_clock: list[bool]) -> float:
        """The correction of this host's clock (Cristian 1989).

        Rank 0 is taken to have answered half the shortest round trip ago.
        """
        offset = 0.0
        for rank in (r for r in range(self.world) if not same_clock[r]):
            if self.rank == rank:
                trips = [self._ping() for _ in range(PINGS)]
                # The shortest trip has waited least, so its middle is closest to the answer.
                offset = min(trips)[1]
            elif self.rank == 0:
                for _ in range(PINGS):
                    self._pong(rank)
        return offset

    def _ping(self) -> tuple[float, float]:
        """The duration of a round trip to rank 0, and the correction of the clock that it gives."""
        answer = torch.zeros(1, dtype=torch.float64)
        sent = time.monotonic()
        dist.send(answer, 0, group=self.control)
        dist.recv(answer, 0, group=self.control)
        trip = time.monotonic() - sent
        # Rank 0 read its clock half a trip ago, when this rank's showed `sent + trip / 2`.
        return trip, float(answer) - (sent + trip / 2)

    def _pong(self, rank: int) -> None:
        """Answer a round trip of another rank with the time here."""
        question = torch.zeros(1, dtype=torch.float64)
        dist.recv(question, rank, group=self.control)
        dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), rank, group=self.control)


def _host() -> str:
    """The boot id of the running kernel; its processes share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.exists() else platform.node()


def _network() -> str:
    """A name of the network namespace.

    Ranks in different ones reach each other over a network, even on one host.
    """
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return platform.node()


def _numbered(names: list[tuple[str, str]]) -> list[int]:
    """Numbers of names in the order of first appearance."""
    first = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [first[name] for name in names]
