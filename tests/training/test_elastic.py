"""A training that goes on with other ranks: the same samples, the same losses, a plan that is
searched once for each number.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.folder_lock import LOCK
from autopar.training.replanning import PLANS

SCRIPT = Path(__file__).with_name("elastic_script.py")


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NETS = _script()
INPUTS = (torch.zeros(NETS.BATCH, dtype=torch.long),) * 2


def _elastic(folder: str, **options: Any) -> Any:
    """The training of the script."""
    torch.manual_seed(0)

    def optimizer(module: Any) -> torch.optim.Optimizer:
        return autopar.local_optimizer(torch.optim.AdamW, module, lr=1.0)

    return autopar.elastic(
        NETS.Net(),
        INPUTS,
        folder,
        data=NETS.Numbers(),
        seed=4,
        optimizer=optimizer,
        **{"scheme": "zero3", **options},
    )


def _trained(folder: str, count: int, options: dict[str, Any]) -> tuple[list[Any], str, int]:
    """Steps up to a number: number, loss, samples and learning rate of each; where the plan was
    from; devices.
    """
    run = _elastic(folder, **options)
    schedule = run.track(
        "schedule", torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.02 / (1 + step))
    )
    loader = DataLoader(NETS.Numbers(), batch_sampler=run.sampler)
    results = []
    for step, batch in run.steps(count, loader, save_every=2, wait=None):
        rate = run.optimizer.param_groups[0]["lr"]
        results.append(
            (step, float(run.module.train_step(batch, run.optimizer)), batch[0].tolist(), rate)
        )
        schedule.step()
    return results, run.replanned.origin, run.plan.devices


def _require_equal(actual: list[Any], wanted: list[Any]) -> None:
    assert [(step, samples) for step, _, samples, _ in actual] == [
        (step, samples) for step, _, samples, _ in wanted
    ]
    assert [loss for _, loss, _, _ in actual] == pytest.approx(
        [loss for _, loss, _, _ in wanted], rel=1e-5
    )
    assert [rate for *_, rate in actual] == pytest.approx([rate for *_, rate in wanted])


FEW = ((2, 2), (1, 6))
MANY = ((3, 2), (2, 4), (1, 6), (3, 8))
PLANNED = [
    "planned anew",
    "planned with the strategies for 3 devices",
    "planned anew",
    "planned before",
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("parts", "wanted_origins"),
    [
        (FEW, ["planned anew"] * 2),
        pytest.param(MANY, PLANNED, marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_on_other_ranks_it_is_the_same_training(
    tmp_path: Path, parts: tuple[tuple[int, int], ...], wanted_origins: list[str]
) -> None:
    """On other numbers of ranks the losses, samples and learning rates of one rank throughout, over
    the end of an epoch.
    """
    last = parts[-1][1]
    wanted = run_ranks(_trained, 1, str(tmp_path / "whole"), last, {})[0][0]
    actual = []
    origins = []
    for ranks, until in parts:
        part, origin, devices = run_ranks(_trained, ranks, str(tmp_path / "parts"), until, {})[-1]
        assert devices == ranks
        actual += part
        origins.append(origin)
    _require_equal(actual, wanted)
    assert origins == wanted_origins
    kept = [f"step-{step:08d}" for step in (last - 2, last)]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "latest",
        PLANS,
        *kept,
        LOCK,
    ]


def _refused(folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(AutoparError) as raised:
        _trained(folder, 1, options)
    return str(raised.value)


def test_every_rank_says_why_there_is_no_plan(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(_refused, 2, str(tmp_path), {"scheme": "zeri3"})):
        assert "unknown scheme 'zeri3'" in said and said.startswith("rank 0 cannot take part") == (
            rank > 0
        )


def _misused(folder: str) -> list[str]:
    run = _elastic(folder)
    schedule = run.track("schedule", torch.optim.lr_scheduler.StepLR(run.optimizer, 1))
    said = []
    for call in (
        lambda: run.track("schedule", schedule),
        lambda: next(run.steps(3, save_every=0)),
        lambda: autopar.elastic(NETS.Net(), INPUTS, optimizer=lambda module: run.optimizer),
        lambda: autopar.elastic(
            NETS.Net(), INPUTS, folder, optimizer=lambda module: run.optimizer, schem="data"
        ),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        said.append(str(raised.value))
    list(run.steps(1))
    again = _elastic(folder)
    with pytest.raises(AutoparError) as refused:
        again.track("scheduler", schedule)
    bare = autopar.elastic(
        NETS.Net(),
        INPUTS,
        folder + "/bare",
        optimizer=lambda module: torch.optim.SGD(module.parameters()),
    )
    with pytest.raises(UsageError) as without:
        next(bare.steps(3, []))
    return [*said, str(refused.value), str(without.value)]


@pytest.mark.gloo
def test_what_is_called_wrongly_is_refused(tmp_path: Path) -> None:
    (actual,) = run_ranks(_misused, 1, str(tmp_path))
    wanted = (
        "is tracked already",
        "save_every is 0",
        "needs a folder",
        "Perhaps you meant 'scheme'",
        "'schedule'",
        "elastic(..., data=",
    )
    assert len(actual) == len(wanted) and all(
        word in said for word, said in zip(wanted, actual, strict=True)
    ), actual


def _torchrun(folder: Path, ranks: int, steps: int, *disturbances: str, restarts: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    command += [
        "--max-restarts",
        str(restarts),
        str(SCRIPT),
        str(folder),
        str(steps),
        "0.2",
        *disturbances,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _log(folder: Path) -> dict[int, list[Any]]:
    """The last line on every step."""
    return {
        step: rest
        for step, *rest in map(
            json.loads, (folder / "log").read_text(encoding="utf-8").splitlines()
        )
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The losses of one rank, undisturbed."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    _torchrun(folder, 1, 8)
    return _log(folder)


def _require_log(
    actual: dict[int, list[Any]], wanted: dict[int, list[Any]], devices: list[int]
) -> None:
    assert sorted(actual) == sorted(wanted)
    assert [actual[step][1] for step in sorted(actual)] == [
        wanted[step][1] for step in sorted(wanted)
    ]
    assert [actual[step][0] for step in sorted(actual)] == pytest.approx(
        [wanted[step][0] for step in sorted(wanted)], rel=1e-5
    )
    assert [actual[step][2] for step in sorted(actual)] == devices


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("disturbance", ["always SIGKILL 1 5", "always raise 0 5"])
def test_a_rank_that_keeps_failing_is_left_out(
    tmp_path: Path, alone: dict[int, list[Any]], disturbance: str
) -> None:
    """Also the first one, which the others otherwise listen to."""
    said = _torchrun(tmp_path / "run", 3, 8, disturbance, restarts=3)
    actual = _log(tmp_path / "run")
    _require_log(actual, alone, [actual[step][2] for step in range(8)])
    assert actual[0][2] == 3 and actual[7][2] == 2 and "is left out" in said
    assert not (tmp_path / "run" / "saved" / "lives").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_two_faults_in_a_row(tmp_path: Path, alone: dict[int, list[Any]]) -> None:
    """Each rank fails once: nobody is left out."""
    said = _torchrun(tmp_path / "run", 2, 8, "once SIGKILL 1 5", restarts=2)
    assert "is left out" not in said
    _require_log(_log(tmp_path / "run"), alone, [2] * 8)


DEAF = """
import os, pathlib, time
with pathlib.Path("started").open("a") as file:
    file.write(os.environ["RANK"])
time.sleep(60)
"""


def _sent_sigterm(folder: Path, script: list[str], begun: Callable[[], bool]) -> tuple[int, str]:
    """How `autopar.torchrun` ends that is sent SIGTERM once the training has begun, and what was
    said.
    """
    command = [
        sys.executable,
        "-m",
        "autopar.torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        *script,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as program:
        end = time.monotonic() + 120
        while not begun() and time.monotonic() < end and program.poll() is None:
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=120)
    return program.returncode, said


@pytest.mark.slow
@pytest.mark.ci
def test_sigterm_to_the_launcher_that_knows_of_saves(
    tmp_path: Path, alone: dict[int, list[Any]]
) -> None:
    """All ranks save and end with 0, and so does the launcher; the next one goes on from there."""
    log = tmp_path / "run" / "log"
    (tmp_path / "run").mkdir()
    script = [str(SCRIPT), str(tmp_path / "run"), "8", "0.5"]
    code, said = _sent_sigterm(
        tmp_path,
        script,
        lambda: log.exists() and len(log.read_text(encoding="utf-8").splitlines()) >= 2,
    )
    made = len(_log(tmp_path / "run"))
    assert (
        code == 0
        and f"autopar: SIGTERM: saved after {made} steps, and ended" in said
        and 2 <= made < 8
    ), said
    _torchrun(tmp_path / "run", 2, 8)
    _require_log(_log(tmp_path / "run"), alone, [2] * 8)


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_that_do_not_save_are_told_of(tmp_path: Path) -> None:
    """They end by the signal, are not started again, and the launcher fails as torchrun does."""
    (tmp_path / "deaf.py").write_text(DEAF, encoding="utf-8")
    started = tmp_path / "started"
    code, said = _sent_sigterm(
        tmp_path,
        ["deaf.py"],
        lambda: started.exists() and len(started.read_text(encoding="utf-8")) == 2,
    )
    assert (
        code == 1
        and "SignalException" in said
        and sorted(started.read_text(encoding="utf-8")) == ["0", "1"]
    )


def _machine(folder: Path, port: int, *, host: bool, launcher: str) -> subprocess.Popen[str]:
    """The launcher of one of two machines, with one rank; 100 steps of half a second, or as many as
    the log of steps gets to.
    """
    command = [
        sys.executable,
        "-m",
        launcher,
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
        "--rdzv-id",
        "one",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command += [
        "--rdzv-conf",
        f"is_host={int(host)},last_call_timeout=5",
        str(SCRIPT),
        str(folder),
        "8",
        "1.0",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "autopar.torchrun"])
def test_one_of_two_machines_is_taken_away(
    tmp_path: Path, alone: dict[int, list[Any]], launcher: str
) -> None:
    """Both save; the one that stays goes on by itself to the end."""
    folder = tmp_path / "run"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    with (
        _machine(folder, port, host=True, launcher=launcher) as stays,
        _machine(folder, port, host=False, launcher=launcher) as goes,
    ):
        end = time.monotonic() + 200
        while not ((folder / "log").exists() and len(_log(folder)) >= 2) and time.monotonic() < end:
            time.sleep(0.1)
        goes.send_signal(signal.SIGTERM)
        _, said = stays.communicate(timeout=300)
        goes.communicate(timeout=60)
    assert (
        stays.returncode == 0
        and "to be started again without a machine that was taken away" in said
    ), said
    actual = _log(folder)
    _require_log(actual, alone, [actual[step][2] for step in range(8)])
    assert actual[0][2] == 2 and actual[7][2] == 1 and "is left out" not in said
