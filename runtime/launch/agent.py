"""`torchrun` that ends with 0 if its ranks did: SIGTERM goes to the ranks alone.

Torch's agent answers SIGTERM by an exception, whatever its ranks do: torchrun ends with 1 even if
all of them saved and ended with 0. Here the option --signals-to-handle takes the signal away from
torch. The handler sends it to the ranks of this machine and waits for them, while the agent stands
still and restarts none. If all end with 0, the agent goes on, finds that all succeeded and ends
with 0. If not, or if they take too long, it gets torch's exception. It also gets it if other
machines go on without this one, since an agent that ends well closes the rendezvous for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException

from .termination import OTHERS_STAY, TERM_GRACE

OTHERS = "SIGINT,SIGHUP,SIGQUIT"
"""The signals for torch's own agent."""
_POLL = 0.05
_RANK = b"LOCAL_RANK="


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `torchrun` with the arguments of the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = run.parse_args(words)  # type: ignore[no-untyped-call]
    signals = [name for name in options.signals_to_handle.split(",") if name.strip() != "SIGTERM"]
    options.signals_to_handle = ",".join(signals) or OTHERS
    with tempfile.TemporaryDirectory() as place:
        os.environ[OTHERS_STAY] = str(Path(place) / "others stay")
        signal.signal(signal.SIGTERM, _hand_on)
        run.run(options)  # type: ignore[no-untyped-call]


def _hand_on(number: int, frame: FrameType | None) -> None:
    """Hand SIGTERM on, and come back only where all ranks have ended with 0."""
    ranks = ranks_of(os.getpid())
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + TERM_GRACE
    codes = [_code(pid) for pid in ranks]
    while None in codes and time.monotonic() < deadline:
        time.sleep(_POLL)
        codes = [_code(pid) for pid in ranks]
    if not ranks or any(code != 0 for code in codes) or Path(os.environ[OTHERS_STAY]).exists():
        raise SignalException(
            f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number)
        )


def ranks_of(agent: int) -> list[int]:
    """The processes that an agent has started as ranks, by their environment."""
    ranks = []
    for place in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError, ValueError):
            stat = (place / "stat").read_text(encoding="ascii", errors="replace")
            # The name of the program stands in brackets, and may hold brackets and spaces itself.
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent != agent:
                continue
            environment = (place / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(_RANK) for entry in environment):
                ranks.append(int(place.name))
    return ranks


def _code(pid: int) -> int | None:
    """A child's exit code, negative for the signal that ended it; None: it runs.

    The agent can still read it.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # The agent has read it already and will report it.
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
