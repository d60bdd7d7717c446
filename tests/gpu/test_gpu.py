"""On GPUs, where there are any: the parts of `make gpu`, the doctor, and a training that goes on
and takes the memory that was predicted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.report import GLOO_RANKS, run_part
from tests.product_code import ROOT

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="this machine has no GPU"),
]

GPT = """
[model]
config = "config.json"
dtype = "bfloat16"
[data]
tokens = "book.txt"
type = "uint8"
sequence = 128
batch = 8
[optimizer]
lr = 0.001
clip = 1.0
[training]
folder = "run"
steps = {steps}
log_every = 1
"""


def _run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "ranks"), [("kernels", 0), ("one device", 0), ("gloo", GLOO_RANKS), ("nccl", COUNT)]
)
def test_parts_of_the_report(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    monkeypatch.chdir(ROOT)
    part = run_part(name, ranks, "cuda")
    assert part.ok, part


def test_the_doctor_runs_on_all_gpus(tmp_path: Path) -> None:
    told = json.loads(_run(tmp_path, "-m", "autopar", "doctor", "--json"))
    assert told["ok"] and (told["backend"], told["ranks"]) == ("nccl", COUNT), told["parity"]


@pytest.mark.parametrize("ranks", sorted({1, COUNT}))
def test_a_training_goes_on_and_fills_what_was_predicted(tmp_path: Path, ranks: int) -> None:
    from transformers import GPT2Config

    GPT2Config(
        n_layer=4,
        n_head=8,
        n_embd=512,
        vocab_size=256,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(tmp_path)
    (tmp_path / "book.txt").write_text("A text of bytes for GPUs. " * 2000, encoding="ascii")
    for steps in (3, 6):
        (tmp_path / "gpt.toml").write_text(GPT.format(steps=steps), encoding="utf-8")
        launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        _run(tmp_path, *launched, "-m", "autopar", "train", "gpt.toml")
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [one["step"] for one in lines] == list(range(1, 7)) and lines[-1]["loss"] < lines[0][
        "loss"
    ]
    assert lines[-1]["memory"] < 1.5 * lines[-1]["predicted_memory"]
