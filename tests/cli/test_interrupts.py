"""Ctrl-C ends the command line with exit code 130 and a line, and the best plan so far is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.plan import Plan
from tests.test_outputs import model  # noqa: F401

LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
LOADING = (
    LISTENING
    + """
import builtins, os
before = builtins.__import__
def imported(name, *rest):
    if name == "numpy" or "outputs" in name:
        os.kill(os.getpid(), signal.SIGINT)
    return before(name, *rest)
builtins.__import__ = imported
from autopar.__main__ import main
main()
"""
)
SEARCHING = (
    LISTENING
    + """
import os, sys
import autopar.api
from autopar.plan import Plan
before = autopar.api.fastest_plan
def searched(*args, **kwargs):
    plan = before(*args, **kwargs)
    for _ in range(int(os.environ["PRESSED"])):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pass
    stopped = plan.provenance.model_copy(update={"complete": False})
    return plan.model_copy(update={"provenance": stopped})
autopar.api.fastest_plan = searched
from autopar.__main__ import main
main()
"""
)


def python(program: str, *words: str, pressed: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {"PRESSED": str(pressed), "PATH": "/usr/bin:/bin", "AUTOPAR_CACHE": ""}
    command = [sys.executable, "-c", program, *words]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=root
    )


def test_while_loading() -> None:
    done = python(LOADING, "cluster", "list")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "autopar: interrupted\n")


@pytest.mark.parametrize("pressed", [1, 2])
def test_while_searching(model: Path, pressed: int) -> None:  # noqa: F811
    """The first keeps what was found; the second ends at once."""
    saved = model.parent / "plan.json"
    words = [
        "plan",
        str(model),
        "--devices",
        "2",
        "--cluster",
        "local-cpu",
        "--stages",
        "1",
        "-o",
        str(saved),
    ]
    done = python(SEARCHING, *words, pressed=pressed)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert saved.exists() == (pressed == 1)
    if pressed == 1:
        assert f"the best plan so far is saved to {saved}" in done.stderr
        assert (
            "Beside known schemes" not in done.stdout and not Plan.load(saved).provenance.complete
        )


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.1, 0.3, 1.0, 2.0])
def test_at_any_time(model: Path, delay: float) -> None:  # noqa: F811
    program = LISTENING + "from autopar.__main__ import main; main()"
    words = ["plan", str(model), "--devices", "64", "--cluster", "p5"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode in (0, 130) and "Traceback" not in errors
