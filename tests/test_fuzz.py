"""Mutants of every kind of file that is read: one message and an exit code, or an answer; never a
traceback, a hang, or another file.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import cast

import onnx
import pytest
import torch
from torch import nn

import autopar
from autopar.cli import run
from autopar.errors import NoPlanFits, PlanError
from benchmarks.fuzz.kinds import KINDS, Kind, seeds
from benchmarks.fuzzing import fuzz
from benchmarks.fuzzing_guided import Found, target
from tests.plan_files import decide, first, operator

COUNT = 8
SLOW_COUNT = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "seeds"
    seeds(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_mutants(kind: str, folder: Path) -> None:
    tally = fuzz(kind, 0, COUNT, folder)
    assert tally.faults == [] and tally.codes.total() == COUNT


def test_bytes_that_are_led_by_coverage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the reader takes or refuses in words are no finding; an error that it was not made
    for is one.
    """
    held = tmp_path / "in"
    shutil.copytree(folder, held)
    one = target("cluster", "cluster.json", held)
    for data in ((folder / "cluster.json").read_bytes(), b"{", b""):
        one(data)

    def broken(*_: object) -> None:
        raise KeyError("nodes")

    monkeypatch.setitem(
        cast(dict[str, Kind], KINDS), "cluster", Kind(files=("cluster.json",), read=broken)
    )
    with pytest.raises(Found, match="KeyError: \"'nodes'\""):
        one(b"{}")


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


def test_a_staged_plan_with_an_unknown_strategy(folder: Path, tmp_path: Path) -> None:
    """Found by mutants of plans with stages: a KeyError where the plan is named."""
    data = json.loads((folder / "staged.json").read_text())
    name = first(data)
    decide(data, name, ["</script>"] * len(operator(data, name)["strategy"]))
    plan = tmp_path / "plan.json"
    model = str(folder / "model.onnx")
    plan.write_text(json.dumps(data))
    for command in (
        ["explain", str(plan)],
        ["report", str(plan), "-o", str(tmp_path / "out.html"), "--no-compare"],
    ):
        with pytest.raises(PlanError, match=r"strategy of '/layers\.0/MatMul'"):
            run([*command, "--model", model])


def test_a_plan_to_reuse_with_a_strategy_for_more_axes(folder: Path, tmp_path: Path) -> None:
    """Found by mutant 10485 of the plans: a ValueError where its strategies are pinned."""
    data = json.loads((folder / "plan.json").read_text())
    name = first(data)
    decide(data, name, operator(data, name)["strategy"] * 2)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="a strategy for 2 mesh axes, not 1"):
        run(
            [
                "plan",
                str(folder / "model.onnx"),
                "--cluster",
                "dgx-h100",
                "--devices",
                "2",
                "--reuse",
                str(tmp_path / "plan.json"),
            ]
        )


def test_a_batch_that_is_a_large_prime(folder: Path, tmp_path: Path) -> None:
    """Found by a mutant of the model: as many micro-batches as samples took 8 GiB and a minute."""
    model = onnx.load(str(folder / "model.onnx"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**31 - 1
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(NoPlanFits):
        run(
            [
                "plan",
                str(tmp_path / "model.onnx"),
                "--cluster",
                "dgx-h100",
                "--devices",
                "2",
                "--no-compare",
            ]
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutants(kind: str, folder: Path) -> None:
    assert fuzz(kind, COUNT, SLOW_COUNT, folder).faults == []


def test_seeds_are_read_without_complaint(folder: Path) -> None:
    """The seeds are right, so that mutants are judged by their change."""
    for kind in KINDS.values():
        for file in kind.files:
            if "trace" not in file:
                kind.read(folder, file, random.Random(1))


def test_a_checkpoint_with_a_number_for_a_pair(folder: Path, tmp_path: Path) -> None:
    """Found by mutant 60187 of the checkpoints: a TypeError where AdamW's betas were one number."""
    saved = tmp_path / "saved"
    shutil.copytree(folder / "saved", saved)
    path = saved / "step-00000001" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    manifest["groups"][0]["options"]["betas"] = 3
    path.write_text(json.dumps(manifest))
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(
        PlanError, match="option 'betas' of the optimizer is 3, which is of another form"
    ):
        autopar.resume(module, torch.optim.AdamW(module.parameters()), saved)


def test_operators_of_stages_are_told_by_the_mesh_of_their_stage(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by mutant 60274 of the plans: a ValueError where the mesh of the plan itself had no
    axes.
    """
    data = json.loads((folder / "staged.json").read_text())
    plan = tmp_path / "plan.json"
    name = first(data)
    plan.write_text(json.dumps({**data, "mesh": []}))
    run(["explain", str(plan), "--json"])
    assert json.loads(capsys.readouterr().out)["operators"][0]["strategy"] == {
        "gpu": operator(data, name)["strategy"][0]
    }
    decide(data, name, [])
    plan.write_text(json.dumps({**data, "mesh": []}))
    with pytest.raises(PlanError, match="a strategy for 0 mesh axes, not 1"):
        run(["explain", str(plan), "--json"])
