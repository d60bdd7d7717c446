"""Two hosts, which are network namespaces of this machine: a training loses one, goes on with the
other, and takes the first again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
HOSTS = ("autopar1", "autopar2")
PORT = 29517


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces joined by a wire, 10.98.0.1 and 10.98.0.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    try:
        made = all(
            _ip("netns", "add", name) and _ip("-n", name, "link", "set", "lo", "up")
            for name in HOSTS
        )
        made = made and _ip(
            "link",
            "add",
            "ap1",
            "netns",
            HOSTS[0],
            "type",
            "veth",
            "peer",
            "name",
            "ap2",
            "netns",
            HOSTS[1],
        )
        for number, name in enumerate(HOSTS, 1):
            made = made and _ip(
                "-n", name, "addr", "add", f"10.98.0.{number}/24", "dev", f"ap{number}"
            )
            made = made and _ip("-n", name, "link", "set", f"ap{number}", "up")
        if not made:
            pytest.skip("this machine makes no network namespaces, or no wire between them")
        yield
    finally:
        for name in HOSTS:
            _ip("netns", "del", name)


class _Run:
    """The training of both hosts, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int) -> None:
        """Start the launcher of a host, with two ranks."""
        command = [
            "ip",
            "netns",
            "exec",
            HOSTS[host - 1],
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1:2",
        ]
        command += [
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "9",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"10.98.0.1:{PORT}",
        ]
        command += [
            "--rdzv-id",
            "one",
            "--rdzv-conf",
            f"is_host={int(host == 1)}",
            "--local-addr",
            f"10.98.0.{host}",
            str(SCRIPT),
        ]
        command += [
            "book.txt",
            "--folder",
            "run",
            "--steps",
            "100000",
            "--save-every",
            "10",
            "--scheme",
            "zero3",
            "--width",
            "32",
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"ap{host}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with (self.folder / f"host{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log
            )

    def losses(self) -> list[tuple[int, float, int]]:
        """Step, loss and devices of every step that was made."""
        path = self.folder / "run" / "losses.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [
            tuple(json.loads(line))
            for line in text.splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def until(self, condition: Callable[[int, int], bool]) -> int:
        """Wait until step and devices of the last step are such; the step."""
        end = time.monotonic() + 200
        while time.monotonic() < end:
            losses = self.losses()
            if losses and condition(losses[-1][0], losses[-1][2]):
                return losses[-1][0]
            time.sleep(0.2)
        raise AssertionError(
            "\n".join(
                path.read_text(errors="replace")[-3000:] for path in self.folder.glob("host*.log")
            )
        )

    def end(self, number: signal.Signals) -> None:
        """End all launchers."""
        for agent in self.agents.values():
            agent.send_signal(number)
        for agent in self.agents.values():
            agent.wait(60)


@pytest.mark.slow
@pytest.mark.ci
def test_a_host_is_lost_and_comes_back(tmp_path: Path, hosts: None) -> None:
    (tmp_path / "book.txt").write_text("Two hosts are better than one. " * 400, encoding="ascii")
    run = _Run(tmp_path)
    try:
        run.start(1)
        run.start(2)
        run.until(lambda step, devices: step >= 15 and devices == 4)
        run.agents[2].kill()
        run.agents[2].wait()
        lost = run.until(lambda step, devices: devices == 2)
        run.until(lambda step, devices: step >= lost + 10)
        run.start(2)
        back = run.until(lambda step, devices: devices == 4 and step > lost)
        run.until(lambda step, devices: step >= back + 10)
        run.end(signal.SIGTERM)
    finally:
        run.end(signal.SIGKILL)
    said = (tmp_path / "host1.log").read_text(errors="replace")
    assert "autopar: SIGTERM: saved after" in said
    last: dict[int, float] = {}
    for step, loss, _ in run.losses():
        # A step that is made again, on other ranks, has the loss that it had.
        assert loss == pytest.approx(last.get(step, loss), rel=1e-4), step
        last[step] = loss
    assert sorted(last) == list(range(len(last)))
