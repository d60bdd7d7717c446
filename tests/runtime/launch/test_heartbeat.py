"""Signs of life of launched ranks: the thread that gives them ends before its process does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import threading, time
from autopar.runtime.launch import in_steps
from autopar.runtime.launch.heartbeat import watch_in_steps

began = threading.Event()

class Slow:
    def set(self, key, word):
        began.set()
        time.sleep(0.3)
        print(word, flush=True)

    def check(self, keys):
        return False

watch_in_steps(Slow(), 0, 2)
for _ in in_steps(1):
    began.wait()
"""


def test_the_thread_has_left_the_store_when_the_process_ends() -> None:
    """The interpreter would unwind it in the middle of torch's C++, which aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["1", "done"]
