"""`autopar checkpoint show`: what is printed of a checkpoint, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cli import run
from autopar.errors import PlanError
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
    for text in ("step 5 of Linear, saved by 1 ranks", "plan none", "optimizer AdamW, 1 groups", "2 8 2 float32", "step-00000005 (latest)"):
        assert text in shown, text
    run(["checkpoint", "show", str(tmp_path / "step-00000004"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["optimizer"], told["extra"]) == (4, 7, "AdamW", {"note": "mine"})


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds no checkpoint"):
        run(["checkpoint", "show", str(tmp_path)])
    _saved(tmp_path)
    (tmp_path / "step-00000005" / "rank-00000.safetensors").unlink()
    with pytest.raises(PlanError, match=r"damaged: rank-00000.safetensors is missing; name='step-00000004' is the one before"):
        run(["checkpoint", "show", str(tmp_path)])
