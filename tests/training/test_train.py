"""`autopar train`: a training out of a file, which goes on where it was, with figures that tell
each step once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import run
from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.latest import latest_in
from autopar.runtime.training.manifest import read_manifest
from autopar.training.config import load_config
from autopar.training.loop import model_of, train
from autopar.training.metrics import METRICS, forget_from
from tests.end_to_end.small_types import small_configuration

FILE = """
[model]
config = "config.json"
dtype = "float32"
[data]
tokens = "text.txt"
type = "uint8"
sequence = 8
batch = 4
[optimizer]
lr = 0.01
weight_decay = 0.1
clip = 1.0
[schedule]
name = "cosine"
warmup = 2
[training]
folder = "run"
steps = 6
save_every = 2
log_every = 1
[plan]
scheme = "zero1"
"""
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, y):
        return (self.up(x) - y).square().mean()

def net():
    return Net(), (torch.zeros(4, 4), torch.zeros(4, 4))

def data():
    return [(torch.full((4,), float(n)), torch.ones(4)) for n in range(20)]

def no_data():
    return 5
"""


PICTURES = """
import torch

def data():
    return [{"pixel_values": torch.full((3, 32, 32), n / 8), "labels": torch.tensor(1)}
            for n in range(24)]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a small GPT-2 and a text of bytes."""
    transformers = import_module("transformers")
    sizes = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 128,
        "n_positions": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    transformers.GPT2Config(
        **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ).save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(
        "Each training goes on where it was. " * 40, encoding="ascii"
    )
    (tmp_path / "train.toml").write_text(FILE, encoding="utf-8")
    return tmp_path / "train.toml"


def _figures(folder: Path) -> list[dict[str, float]]:
    return [
        json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()
    ]


def _on_ranks(file: Path, ranks: int, steps: int, folder: str) -> None:
    config = load_config(file)
    table = config.training.model_copy(update={"steps": steps, "folder": str(file.parent / folder)})
    # The schedule is that of the whole training, however far this part goes.
    run_ranks(train, ranks, config.model_copy(update={"training": table}))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [("adamw", 1e-4), pytest.param("muon", 1e-2, marks=(pytest.mark.slow, pytest.mark.ci))],
)
def test_it_goes_on_on_other_ranks(file: Path, optimizer: str, tolerance: float) -> None:
    """The figures of each step are told once, and are those of an undisturbed training.

    Muon computes in bfloat16, where gradients may round to a neighbour.
    """
    text = FILE.replace('name = "cosine"', 'name = "constant"')
    file.write_text(text.replace("lr = 0.01", f'lr = 0.01\nname = "{optimizer}"'), encoding="utf-8")
    _on_ranks(file, 1, 4, "whole")
    _on_ranks(file, 2, 2, "parts")
    with (file.parent / "parts" / METRICS).open("a", encoding="utf-8") as stream:
        stream.write('{"step": 3, "loss": 1e9}\n{"step": ')  # of a life that was killed
    _on_ranks(file, 1, 4, "parts")
    wanted = _figures(file.parent / "whole")
    actual = _figures(file.parent / "parts")
    assert [one["step"] for one in actual] == [1, 2, 3, 4]
    for name in ("loss", "lr", "gradient_norm"):
        assert [one[name] for one in actual] == pytest.approx(
            [one[name] for one in wanted], rel=tolerance
        ), name
    assert all(
        one["tokens_per_second"] == pytest.approx(32 / one["seconds"])
        and one["predicted_seconds"] > 0
        for one in actual
    )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("plan", ["", 'scheme = "data"\nstages = 2\nmicro_batches = 2'])
def test_ranks_that_are_idle_and_stages(file: Path, plan: str, optimizer: str) -> None:
    """A rank without parameters, or without some kind, saves and goes on with the others."""
    text = FILE.replace('scheme = "zero1"', plan).replace('name = "cosine"', 'name = "constant"')
    file.write_text(text.replace("lr = 0.01", f'lr = 0.01\nname = "{optimizer}"'), encoding="utf-8")
    _on_ranks(file, 2, 2, "run")
    _on_ranks(file, 2, 4, "run")
    assert [one["step"] for one in _figures(file.parent / "run")] == [1, 2, 3, 4]
    assert latest_in(file.parent / "run") == "step-00000004"


@pytest.mark.gloo
def test_ranks_may_have_workers_that_load_data(file: Path) -> None:
    """A process that reads ahead is a child of its rank, and changes no figure."""
    _on_ranks(file, 2, 2, "alone")
    file.write_text(FILE.replace("batch = 4", "batch = 4\nworkers = 1"), encoding="utf-8")
    _on_ranks(file, 2, 2, "read ahead")
    told = [_figures(file.parent / folder) for folder in ("alone", "read ahead")]
    assert [[one["loss"] for one in lines] for lines in told] == [
        [one["loss"] for one in told[0]]
    ] * 2 and len(told[0]) == 2


def _program(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autopar", "train", *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.ci
def test_the_command_and_sigterm(file: Path) -> None:
    """Sent SIGTERM the launcher has its ranks save, and exits with 0; then the training goes on."""
    folder = file.parent / "run"
    with _program(str(file), "--ranks", "2", "--steps", "4000", folder=file.parent) as program:
        end = time.monotonic() + 120
        while latest_in(folder) is None and program.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=60)
    assert program.returncode == 0 and "autopar: SIGTERM: saved after" in said, said
    latest = latest_in(folder)
    assert latest is not None
    done = read_manifest(folder / latest)[0].step
    with _program(str(file), "--steps", str(done + 2), folder=file.parent) as program:
        out, said = program.communicate(timeout=120)
    assert (
        program.returncode == 0
        and "2 steps made" in out
        and f"goes on after {done} steps" in said
        and f"step {done + 2}/{done + 2}" in said
    )
    with _program(str(file), "--steps", str(done + 2), folder=file.parent) as program:
        out, said = program.communicate(timeout=120)
    assert program.returncode == 0 and "nothing is left to do" in out


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_and_a_dataset_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    text = FILE.replace('config = "config.json"', 'callable = "own:net"')
    text = text.replace(
        'tokens = "text.txt"\ntype = "uint8"\nsequence = 8', 'callable = "own:data"'
    )
    (tmp_path / "train.toml").write_text(text, encoding="utf-8")
    with _program("train.toml", "--steps", "8", folder=tmp_path) as program:
        out, said = program.communicate(timeout=120)
    assert program.returncode == 0 and "8 steps made" in out and "tokens/s" not in said, said
    assert _figures(tmp_path / "run")[-1]["loss"] < _figures(tmp_path / "run")[0]["loss"]
    (tmp_path / "train.toml").write_text(text.replace("own:data", "own:no_data"), encoding="utf-8")
    with _program("train.toml", folder=tmp_path) as program:
        _, said = program.communicate(timeout=120)
    assert program.returncode == 2 and "returned a int, which is no dataset" in said


@pytest.mark.gloo
def test_a_configuration_begins_with_the_weights_beside_it(file: Path) -> None:
    """The first loss is that of the stored weights, whether in the folder or named."""
    transformers = import_module("transformers")
    config = transformers.GPT2Config.from_pretrained(file.parent)
    import_module("torch").manual_seed(7)  # the training's is 0
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(file.parent)
    _on_ranks(file, 1, 1, "beside")
    (file.parent / "weights").mkdir()
    (file.parent / "model.safetensors").rename(file.parent / "weights" / "model.safetensors")
    _on_ranks(file, 1, 1, "drawn")
    named = 'dtype = "float32"\nweights = "weights"'
    file.write_text(FILE.replace('dtype = "float32"', named), encoding="utf-8")
    _on_ranks(file, 1, 1, "named")
    beside, drawn, read = (
        _figures(file.parent / folder)[0]["loss"] for folder in ("beside", "drawn", "named")
    )
    assert read == pytest.approx(beside, rel=1e-6)
    assert drawn != pytest.approx(beside, rel=1e-6)


def test_frozen_parameters_of_a_configuration_do_not_change(file: Path) -> None:
    file.write_text(FILE.replace("[data]", 'frozen = ["transformer.wte.*"]\n[data]'))
    model = model_of(load_config(file))
    trained = {tensor.name: tensor.trainable for tensor in model.graph.parameters}
    assert not trained.pop("transformer.wte.weight") and all(trained.values())
    assert not model.module.transformer.wte.weight.requires_grad


@pytest.mark.gloo
def test_a_model_of_images_is_trained(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of any type takes a dataset of its own arguments."""
    keys = small_configuration("vit")
    (file.parent / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    (file.parent / "pictures.py").write_text(PICTURES, encoding="utf-8")
    monkeypatch.syspath_prepend(file.parent)
    text = FILE.replace(
        'tokens = "text.txt"\ntype = "uint8"\nsequence = 8', 'callable = "pictures:data"'
    )
    file.write_text(text, encoding="utf-8")
    _on_ranks(file, 1, 6, "run")
    losses = [one["loss"] for one in _figures(file.parent / "run")]
    assert losses[-1] < losses[0]


def _refused(file: Path, old: str, new: str) -> str:
    text = FILE.replace(old, new)
    assert text != FILE
    file.write_text(text, encoding="utf-8")
    with pytest.raises(AutoparError) as raised:
        train(load_config(file))
    return str(raised.value)


REFUSED: dict[str, tuple[str, str, str]] = {
    "no file of tokens": ("text.txt", "none.txt", "no file of tokens"),
    "no type": ('type = "uint8"\n', "", "say of which type its numbers are"),
    "no configuration": ("config.json", "none.json", "cannot be read: No such file"),
    "no causal model": ("config.json", "train.toml", "cannot be read as a configuration"),
    "frozen by no name": (
        'config = "config.json"',
        'config = "config.json"\nfrozen = ["none.*"]',
        "no parameter of the model is named 'none.*'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(file: Path, case: str) -> None:
    old, new, said = REFUSED[case]
    assert said in _refused(file, old, new)


@pytest.mark.parametrize("option", ["--ranks", "--steps"])
def test_options_are_checked(file: Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is 0; it must be at least 1"):
        run(["train", str(file), option, "0"])


def test_lines_of_steps_that_are_made_again_go(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    forget_from(path, 3)
    assert not path.exists()
    lines: list[Any] = [json.dumps({"step": step}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join([*lines, "[]", '{"st']), encoding="utf-8")
    forget_from(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == lines[:2]


BAD = (
    OWN.replace(
        "self.up = nn.Linear(4, 4)",
        """self.up = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4,), float("-inf")))""",
    )
    + """

def bad_data():
    bad = {17, 37}
    return [
        (torch.full((4,), float("nan") if n in bad else n / 40), torch.ones(4)) for n in range(40)
    ]
"""
)


def _with_bad_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "bad_samples.py").write_text(BAD, encoding="utf-8")
    own = "".join(f"{name} = {value}\n" for name, value in settings.items())
    text = (
        '[model]\ncallable = "bad_samples:net"\n[data]\ncallable = "bad_samples:bad_data"\n'
        "batch = 4\nshuffle = false\n[optimizer]\nlr = 0.01\n[training]\n"
        f'folder = "run"\nsteps = 10\nsave_every = 2\nkeep = 1\nlog_every = 1\n{own}'
        '[plan]\nscheme = "data"\n'
    )
    (tmp_path / "train.toml").write_text(text, encoding="utf-8")
    return tmp_path / "train.toml"


def _trains(file: Path) -> str:
    try:
        train(load_config(file))
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The fifth batch has the sample 17; the checkpoint of the fourth step is kept."""
    file = _with_bad_samples(tmp_path, monkeypatch)
    for told in run_ranks(_trains, ranks, file):
        assert "the loss of step 5 is nan (epoch 0, samples 16, 17, 18, 19)" in told
        assert "the last good checkpoint is" in told and "training.skip_nonfinite" in told
    latest = latest_in(tmp_path / "run")
    assert latest is not None and read_manifest(tmp_path / "run" / latest)[0].step == 4


@pytest.mark.gloo
def test_bad_steps_are_left_out_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _with_bad_samples(tmp_path, monkeypatch, skip_nonfinite=2)
    assert run_ranks(_trains, 2, file) == ["", ""]
    file = _with_bad_samples(tmp_path / "one", monkeypatch, skip_nonfinite=1)
    for told in run_ranks(_trains, 2, file):
        assert "the loss of step 10 is nan" in told


@pytest.mark.gloo
def test_parameters_that_are_not_finite_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients overflow behind a finite loss: the checkpoint before is kept."""
    file = _with_bad_samples(tmp_path, monkeypatch, skip_nonfinite=2)
    text = file.read_text(encoding="utf-8").replace("lr = 0.01", "lr = inf")
    text = text.replace("steps = 10", "steps = 1")
    file.write_text(text, encoding="utf-8")
    for told in run_ranks(_trains, 2, file):
        assert "after 1 steps 'up." in told and "no checkpoint has been saved" in told
    assert latest_in(tmp_path / "run") is None
