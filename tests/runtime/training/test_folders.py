"""Folders of checkpoints that lost a part, that two trainings want, that a bad step would spoil."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError, PlanError, RunError
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.folder_lock import hold
from autopar.runtime.training.latest import LATEST, find_checkpoint, latest_in
from autopar.runtime.training.manifest import MANIFEST, checkpoints_in
from autopar.runtime.training.resuming import resume
from autopar.runtime.training.saving import save
from tests.runtime.training.nets import built, language, optimizer_of, plan_of, train

PLANS = ["data", "zero3", "stages"]


def _saved(folder: str, scheme: str, steps: tuple[int, ...], keep: int | None = None) -> list[str]:
    module, optimizer = built(scheme, 2)
    for step in steps:
        save(module, optimizer, folder, step=step, keep=keep)
    return checkpoints_in(Path(folder))


def _goes_on(folder: str, scheme: str) -> tuple[int, str, list[str]]:
    """The step and notes of a resumed training, and what is left after it has saved two more."""
    module, optimizer = built(scheme, 2, seed=1)
    resumed = resume(module, optimizer, folder)
    assert resumed is not None
    for more in (100, 200):
        save(module, optimizer, folder, step=resumed.step + more, keep=2)
    return resumed.step, " ".join(resumed.notes), checkpoints_in(Path(folder))


@pytest.mark.parametrize("scheme", PLANS)
def test_without_latest_the_newest_whole_checkpoint_is_found(tmp_path: Path, scheme: str) -> None:
    plan_of(scheme, 2)
    run_ranks(_saved, 2, str(tmp_path), scheme, (100, 200, 300, 400))
    (tmp_path / LATEST).unlink()
    (tmp_path / "step-00000400" / MANIFEST).unlink()
    file = next((tmp_path / "step-00000300").glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    for step, notes, left in run_ranks(_goes_on, 2, str(tmp_path), scheme):
        assert step == 200 and "step-00000400 is passed over" in notes
        assert "step-00000300 is passed over" in notes and "is missing; step-00000200" in notes
        # Nobody knows whose the others are; that of step 200 is this training's now. The remains
        # of another step 400 do not stand in the way.
        assert set(left) == {*(f"step-0000{n}" for n in ("0100", "0300")), "step-00000400.1"} | {
            "step-00000300.1"
        }


def test_a_training_that_goes_on_prunes_what_it_wrote_in_its_lives_before(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    run_ranks(_saved, 2, str(tmp_path), "zero3", (10,))
    # Another training into the same folder keeps two of its own.
    left = run_ranks(_saved, 2, str(tmp_path), "zero3", (100, 200, 300), 2)[0]
    assert left == ["step-00000010", "step-00000200", "step-00000300"]
    step, notes, left = run_ranks(_goes_on, 2, str(tmp_path), "zero3")[0]
    assert (step, notes) == (300, "")
    assert left == ["step-00000010", "step-00000400", "step-00000500"]


def test_folders_of_which_none_is_whole_are_no_new_training(tmp_path: Path) -> None:
    save(language(), None, tmp_path, step=1)
    (tmp_path / LATEST).unlink()
    (tmp_path / "step-00000001" / MANIFEST).unlink()
    with pytest.raises(PlanError, match="none is whole"):
        resume(language(), None, tmp_path)


def test_the_largest_step_counts_where_times_are_those_of_a_copy(tmp_path: Path) -> None:
    for step in (7, 11, 9):
        save(language(), None, tmp_path, step=step)
    (tmp_path / LATEST).unlink()
    said: list[str] = []
    assert find_checkpoint(tmp_path, say=said.append) == tmp_path / "step-00000011"
    assert len(said) == 1


def _spoils(folder: str, scheme: str) -> list[Any]:
    module, optimizer = built(scheme, 2)
    train(module, optimizer, range(1))
    save(module, optimizer, folder, step=1, keep=1)
    for group in optimizer.param_groups:
        group["lr"] = float("inf")
    module.loss(torch.zeros(8, 4, dtype=torch.long)).backward()
    optimizer.step()
    with pytest.raises(RunError) as raised:
        save(module, optimizer, folder, step=2, keep=1)
    stayed = latest_in(Path(folder))
    save(module, optimizer, folder, step=3, keep=1, allow_nonfinite=True)
    return [str(raised.value), stayed, latest_in(Path(folder))]


@pytest.mark.parametrize("scheme", PLANS)
def test_nothing_that_is_not_finite_takes_the_place_of_a_checkpoint(
    tmp_path: Path, scheme: str
) -> None:
    plan_of(scheme, 2)
    for said, stayed, last in run_ranks(_spoils, 2, str(tmp_path), scheme):
        assert "has elements that are not finite" in said and "allow_nonfinite=True" in said
        assert "the last good checkpoint is" in said
        assert (stayed, last) == ("step-00000001", "step-00000003")


def _spoils_one_shard(folder: str) -> str:
    """One rank's shard has a NaN; the other knows of none."""
    module, _ = built("zero3", 2)
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            module.up.weight.to_local()[0] = float("nan")
    with pytest.raises(RunError) as raised:
        save(module, None, folder, step=2)
    return str(raised.value)


def test_a_number_of_one_shard_stops_every_rank(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    said = run_ranks(_spoils_one_shard, 2, str(tmp_path))
    assert said[0] == said[1] and "rank 1 cannot take part: after 2 steps 'up.weight'" in said[0]


def test_frozen_values_may_be_anything(tmp_path: Path) -> None:
    module = language()
    module.norm.weight.requires_grad_(False).fill_(float("-inf"))
    module.register_buffer("mask", torch.full((3,), float("-inf")))
    assert save(module, optimizer_of(module), tmp_path, step=1).done


_HOLDER = """
import sys, pathlib
from autopar.runtime.training.folder_lock import hold
hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def _held_by_another(folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    program = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "held\n"
    return program


def _refused(folder: str) -> str:
    module, _ = built("zero3", 2)
    with pytest.raises(AutoparError) as raised:
        save(module, None, folder, step=1)
    return str(raised.value)


def test_a_folder_has_one_training_at_a_time(tmp_path: Path) -> None:
    plan_of("zero3", 2)
    program = _held_by_another(tmp_path)
    try:
        for said in run_ranks(_refused, 2, str(tmp_path)):
            assert f"process {program.pid} of" in said and "trains into this folder" in said
    finally:
        program.kill()
        program.wait()
    # The lock of a process ends with it.
    assert run_ranks(_saved, 2, str(tmp_path), "zero3", (1,))[0] == ["step-00000001"]
    hold(tmp_path)
    hold(tmp_path)
    # Ranks that a training forks are its own.
    assert len(run_ranks(_saved, 2, str(tmp_path), "zero3", (2,))[0]) == 2
