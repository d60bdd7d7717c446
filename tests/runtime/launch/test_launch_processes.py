"""Ranks from any process, also one in which a backward pass has run, and nothing left of them when
it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.runtime.processes import alive

WORK = """
import os, time
import torch
import torch.distributed as dist

def step(scale):
    weight = torch.full((3,), dist.get_rank() + 1.0, requires_grad=True)
    (weight.sum() * scale).backward()
    dist.all_reduce(weight.grad)
    return float(weight.grad[0]), torch.get_default_dtype(), os.environ.get("GIVEN"), os.getcwd()

def fails():
    if dist.get_rank() == 1:
        raise LookupError("the reason")
    dist.barrier()

def stays(folder):
    with open(os.path.join(folder, str(dist.get_rank())), "x") as file:
        file.write(str(os.getpid()))
    time.sleep(100)
"""
DIRECTLY = """
from autopar.runtime.launch import run_ranks
import work
"""
AFTER_BACKWARD = """
import os, sys, time
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.ones(1)
torch.randn(2, requires_grad=True).sum().backward()
from autopar.runtime.launch import local_ranks, run_ranks
from autopar.errors import RunError
if local_ranks.can_fork():  # torch was built without devices, so no thread was started
    local_ranks.can_fork = lambda: False
import work
"""


def _script(tmp_path: Path, text: str) -> list[str]:
    """A program in a folder of its own, with `work` beside it."""
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    return [sys.executable, str(script)]


def _output(tmp_path: Path, text: str) -> str:
    done = subprocess.run(
        _script(tmp_path, text), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_start_after_a_backward_pass(tmp_path: Path) -> None:
    """Through the server: the first call starts it, later ones are quick; the ranks find the scene
    of the caller.
    """
    printed = _output(
        tmp_path,
        AFTER_BACKWARD
        + """
from autopar.runtime.launch import fork_server
torch.set_default_dtype(torch.float64)
os.environ["GIVEN"] = "yes"
servers = set()
os.chdir(os.path.dirname(__file__))
for count in (2, 4):
    start = time.monotonic()
    outcomes = run_ranks(work.step, count, 2.0)
    assert outcomes == [(2.0 * count, torch.float64, "yes", os.getcwd())] * count, outcomes
    print(f"{count} ranks: {time.monotonic() - start:.2f} s")
    servers.add(fork_server._server().process.pid)
assert len(servers) == 1, servers
try:
    run_ranks(work.fails, 3)
except RunError as error:
    assert "rank 1 failed:" in str(error) and "LookupError: the reason" in str(error), error
else:
    raise AssertionError("no error")
""",
    )
    print(printed)
    assert "4 ranks" in printed


@pytest.mark.slow
@pytest.mark.ci
def test_what_a_notebook_defines_reaches_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    text = """
class Net(torch.nn.Linear):
    pass
net, scale = Net(2, 1), torch.full((1, 2), 3.0)
def gradient():
    net(scale).sum().backward()
    return net, net.weight.grad.tolist()
for copied, gradient in run_ranks(gradient, 2):
    assert type(copied) is Net and torch.equal(copied.weight, net.weight), copied
    assert gradient == [[3.0, 3.0]], gradient
"""
    _output(tmp_path, AFTER_BACKWARD + text)


@pytest.mark.slow
@pytest.mark.ci
def test_what_cannot_be_handed_over_is_refused(tmp_path: Path) -> None:
    text = """
sys.modules["cloudpickle"] = None
def mine():
    pass
for function in (mine, lambda: None):
    try:
        run_ranks(function, 2)
    except RunError as error:
        assert f"to which {function.__qualname__} cannot be handed" in str(error), error
        assert "install cloudpickle" in str(error), error
    else:
        raise AssertionError("no error")
try:
    run_ranks(work.step, 2, open(os.devnull))
except RunError as error:
    assert "step cannot be handed: cannot pickle" in str(error).replace("TypeError: ", ""), error
"""
    _output(tmp_path, AFTER_BACKWARD + text)


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


SLOW = (pytest.mark.slow, pytest.mark.ci)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("head", "number"),
    [
        pytest.param(DIRECTLY, signal.SIGTERM, id="forked-TERM"),
        pytest.param(DIRECTLY, signal.SIGHUP, id="forked-HUP", marks=SLOW),
        pytest.param(DIRECTLY, signal.SIGKILL, id="forked-KILL"),
        pytest.param(DIRECTLY, signal.SIGINT, id="forked-INT"),
        pytest.param(AFTER_BACKWARD, signal.SIGKILL, id="clean-KILL", marks=SLOW),
        pytest.param(AFTER_BACKWARD, signal.SIGINT, id="clean-INT", marks=SLOW),
    ],
)
def test_ranks_end_with_their_parent(tmp_path: Path, head: str, number: signal.Signals) -> None:
    """Nothing is left: no process, no file in the folder for temporary ones, no shared memory."""
    pids = tmp_path / "pids"
    temporary = tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    # Where a shell has started the tests in the background, an interrupt is ignored, by its
    # children too.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = _script(tmp_path, heard + head + f"run_ranks(work.stays, 3, {str(pids)!r})")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as program:
        assert _until(
            lambda: (
                len([path for path in pids.iterdir() if path.read_text(encoding="ascii")]) == 3
                or program.poll() is not None
            )
        )
        ranks = [int(path.read_text(encoding="ascii")) for path in pids.iterdir()]
        assert len(ranks) == 3 and all(map(alive, ranks))
        os.kill(program.pid, number)
        assert program.wait(30) == -number
    assert _until(lambda: not any(map(alive, ranks)))
    assert not [
        path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")
    ]  # torch's own, for all time
    assert not {
        name
        for name in set(os.listdir("/dev/shm")) - shared
        if name.startswith(("torch", "pym", "autopar"))
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ranks_run", [False, True])
def test_ctrl_c_ends_the_command_line(tmp_path: Path, ranks_run: bool) -> None:
    """The whole foreground group gets the signal, as from a terminal: one line, exit 130, no
    process and no file left.
    """
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 8]) for name in "xy")
    graph = helper.make_graph(
        [node],
        "product",
        [x],
        [y],
        [onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "model.onnx",
    )
    command = [sys.executable, "-m", "autopar"]
    plan = [
        *command,
        "plan",
        "model.onnx",
        "--cluster",
        "local-cpu",
        "--devices",
        "2",
        "--mesh",
        "2",
        "-o",
        "plan.json",
    ]
    subprocess.run(plan, cwd=tmp_path, check=True, capture_output=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    run = [
        *command,
        "run",
        "plan.json",
        "--model",
        "model.onnx",
        "--nproc",
        "2",
        "--steps",
        "100000000",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        run,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        assert _until(
            lambda: not ranks_run or len(children.read_text(encoding="ascii").split()) == 2
        )
        time.sleep(0.3)
        ranks = [int(pid) for pid in children.read_text(encoding="ascii").split()]
        os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert (program.returncode, errors) == (130, "autopar: interrupted\n")
    assert len(ranks) == (2 if ranks_run else 0) and not any(map(alive, ranks))
    assert (
        sorted(
            path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")
        )
        == before
    )
