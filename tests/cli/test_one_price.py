"""Seconds come from one place: where a step cannot be priced, no command has a price."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from autopar.cli import run
from autopar.costmodel.step.mesh_prices import MeshPrices
from tests.cli.test_cli import _example

SIZES = ("--batch", "8", "--dim", "sequence=16")
FOUR = ("--cluster", "dgx-h100", "--devices", "4")
SCRIPT = """pretrain_gpt.py --num-layers 2 --tensor-model-parallel-size 2 --bf16 \\
    --micro-batch-size 2 --global-batch-size 8
"""


class Unpriced(Exception):
    """A collective or a place of a mesh was asked for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model, a plan of it, and a script that trains it."""
    path = tmp_path_factory.mktemp("price")
    model = str(_example()(path / "gpt2.onnx", layers=2, hidden=64, heads=4, vocabulary=512))
    plan = str(path / "plan.json")
    assert run(["plan", model, *SIZES, *FOUR, "--scheme", "zero3", "-o", plan]) == 0
    (path / "train.sh").write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "gpt2.onnx", *SIZES, *FOUR),
        ("compare", "gpt2.onnx", *SIZES, *FOUR),
        ("import", "train.sh", "--model", "gpt2.onnx", *SIZES, *FOUR),
        ("explain", "plan.json", "--model", "gpt2.onnx"),
        ("what-if", "plan.json", "--model", "gpt2.onnx", "--memory", "20GiB"),
    ],
    ids=lambda words: words[0],
)
def test_no_command_has_a_second_way_to_a_step(
    words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpriced(*given: object, **named: object) -> NoReturn:
        raise Unpriced

    monkeypatch.setenv("AUTOPAR_CACHE", "")
    monkeypatch.chdir(folder)
    with monkeypatch.context() as without:
        for name in ("place", "lines", "seconds", "collective"):
            without.setattr(MeshPrices, name, unpriced)
        with pytest.raises(Unpriced):
            run(words)
    assert run(words) == 0
