"""Mutants of every kind of file that is read: one message and an exit code, or an answer; never a traceback, a hang, or another file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from benchmarks.fuzz.kinds import KINDS, seeds
from benchmarks.fuzzing import fuzz

COUNT, SLOW_COUNT = 8, 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fuzz") / "seeds"
    seeds(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_mutants(kind: str, folder: Path) -> None:
    tally = fuzz(kind, 0, COUNT, folder)
    assert tally.found == [] and tally.codes.total() == COUNT


def test_a_checkpoint_without_a_number_of_its_optimizer(folder: Path, tmp_path: Path) -> None:
    """Found by mutant 83 of the checkpoints: a KeyError of torch's optimizer."""
    saved = tmp_path / "saved"
    shutil.copytree(folder / "saved", saved)
    path = saved / "step-00000001" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    assert manifest["scalars"].pop("optimizer.0.weight.step")
    path.write_text(json.dumps(manifest))
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(PlanError, match="does not hold what AdamW keeps"):
        autopar.resume(module, torch.optim.AdamW(module.parameters()), saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutants(kind: str, folder: Path) -> None:
    assert fuzz(kind, COUNT, SLOW_COUNT, folder).found == []


def test_seeds_are_read_without_complaint(folder: Path) -> None:
    """What is mutated is right before, so that mutants are judged by their change."""
    for kind in KINDS.values():
        for file in kind.files:
            if "trace" not in file:
                kind.read(folder, file, random.Random(1))
