"""`autopar checkpoint show` and `convert`: what is printed of a checkpoint, where its weights go,
and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autopar.cli import run
from autopar.errors import AutoparError, PlanError
from autopar.runtime.training.resuming import resume
from autopar.runtime.training.saving import save


def _saved(folder: Path) -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step in (4, 5):
        save(module, optimizer, folder, step=step, extra={"note": "mine"})


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(tmp_path)
    run(["checkpoint", "show", str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "step 5 of Linear, saved by 1 ranks",
        "plan none",
        "optimizer AdamW, 1 groups",
        "2 8 2 float32",
        "step-00000005 (latest)",
    ):
        assert text in shown, text
    run(["checkpoint", "show", str(tmp_path / "step-00000004"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["optimizer"], told["extra"]) == (
        4,
        7,
        "AdamW",
        {"note": "mine"},
    )


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds no checkpoint"):
        run(["checkpoint", "show", str(tmp_path)])
    _saved(tmp_path)
    (tmp_path / "step-00000005" / "rank-00000.safetensors").unlink()
    with pytest.raises(
        PlanError,
        match=r"damaged: rank-00000.safetensors is missing; name='step-00000004' is the one before",
    ):
        run(["checkpoint", "show", str(tmp_path)])


def test_weights_leave_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint to Hugging Face's files under other names, these to a checkpoint, and that into
    a module.
    """
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    save(module, None, tmp_path / "runs", step=1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run(
        [
            "checkpoint",
            "convert",
            str(tmp_path / "runs"),
            "-o",
            str(tmp_path / "weights"),
            "--add",
            "net.",
        ]
    )
    assert "weights of 7 tensors" in capsys.readouterr().out
    held = load_file(tmp_path / "weights" / "model.safetensors")
    assert held.keys() == {f"net.{name}" for name in before}
    run(
        [
            "checkpoint",
            "convert",
            str(tmp_path / "weights"),
            "-o",
            str(tmp_path / "again"),
            "--strip",
            "net.",
            "--json",
        ]
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["tensors"], told["path"]) == (
        "checkpoint",
        7,
        str(tmp_path / "again" / "step-00000000"),
    )
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    resumed = resume(other, None, tmp_path / "again")
    assert resumed is not None and resumed.step == 0
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_another_type_and_another_step(tmp_path: Path) -> None:
    _saved(tmp_path / "runs")
    run(
        [
            "checkpoint",
            "convert",
            str(tmp_path / "runs"),
            "-o",
            str(tmp_path / "out"),
            "--name",
            "step-00000004",
            "--dtype",
            "bfloat16",
        ]
    )
    run(
        [
            "checkpoint",
            "convert",
            str(tmp_path / "out" / "model.safetensors"),
            "-o",
            str(tmp_path / "back"),
            "--dtype",
            "float64",
        ]
    )
    with pytest.raises(PlanError, match="'weight' is float32"):
        resume(nn.Linear(3, 2), None, tmp_path / "back")
    assert resume(nn.Linear(3, 2).to(torch.bfloat16).double(), None, tmp_path / "back") is not None


REFUSED: dict[str, tuple[list[str], str]] = {
    "nothing there": (["none", "-o", "out"], "does not exist"),
    "no weights": (
        ["empty", "-o", "out"],
        "holds neither model.safetensors.index.json nor a .safetensors file",
    ),
    "there already": (["runs", "-o", "empty"], "is there already"),
    "another step": (
        ["runs", "-o", "out", "--name", "step-00000009"],
        "unknown checkpoint 'step-00000009': valid are step-00000004",
    ),
    "no such prefix": (["runs", "-o", "out", "--strip", "model."], "does not begin with 'model.'"),
    "a name among weights": (
        ["weights", "-o", "out", "--name", "step-00000004"],
        "holds no checkpoints",
    ),
    "damaged weights": (
        ["damaged.safetensors", "-o", "out"],
        "cannot be read as a safetensors file",
    ),
    "an integer type": (
        ["runs", "-o", "out", "--dtype", "int8"],
        "unknown --dtype 'int8': valid are ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _saved(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 40)
    run(["checkpoint", "convert", "runs", "-o", "weights"])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(AutoparError, match=REFUSED[case][1]):
        run(["checkpoint", "convert", *REFUSED[case][0]])
    assert sorted(tmp_path.iterdir()) == before
