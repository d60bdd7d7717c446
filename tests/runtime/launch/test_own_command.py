"""A command starts itself again on every GPU, which stand-ins play here."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

from autopar.cli.entry import run
from autopar.errors import RunError
from autopar.runtime.launch import own_command
from autopar.runtime.launch.own_command import relaunched


class _Process:
    """Ranks that end at once, with a line about how they were started."""

    def __init__(self, words: list[str], **options: Any) -> None:
        self.stderr = io.StringIO(" ".join(words[1:]) + "\n")

    def wait(self) -> int:
        return 7


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(own_command.subprocess, "Popen", _Process)
    monkeypatch.setattr(sys, "argv", ["autopar", "calibrate", "-o", "x.json"])


@pytest.mark.parametrize(("nproc", "ranks"), [(None, 4), (2, 2), (9, 4)])
def test_a_rank_for_each_gpu(gpus: None, nproc: int | None, ranks: int) -> None:
    ranks_ended = relaunched(nproc)
    assert ranks_ended is not None and ranks_ended.code == 7
    assert f"--nproc-per-node {ranks} -m autopar calibrate -o x.json" in ranks_ended.tail


def test_not_without_gpus_for_another_backend_or_under_a_launcher(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert relaunched(None, "gloo") is None and relaunched(None, "nccl") is not None
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert relaunched(None) is None
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert relaunched(None) is None


def test_one_gpu_has_nobody_to_talk_to(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert relaunched(None) is not None
    with pytest.raises(RunError, match="2 ranks, and the machine has 1 GPU; with --backend gloo"):
        relaunched(None, least=2)


@pytest.mark.parametrize(
    "words", [["calibrate", "-o", "x.json"], ["bench", "collectives"], ["doctor", "--quick"]]
)
def test_commands_that_measure_end_as_their_ranks(gpus: None, words: list[str]) -> None:
    assert run(words) == 7
