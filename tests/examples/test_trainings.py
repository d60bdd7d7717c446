"""The examples of trainings and inference run on ranks, equal one device, and go on where they
were.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from autopar.runtime.launch import run_ranks
from autopar.runtime.training.latest import latest_in

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = "Whoever reads this far has read a text of bytes. " * 60
GPT = """
[model]
config = "config.json"
[data]
tokens = "book.txt"
type = "uint8"
sequence = 8
batch = 4
[optimizer]
lr = 0.01
[training]
folder = "run"
steps = 3
"""


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT, encoding="ascii")
    return tmp_path / "book.txt"


@pytest.mark.parametrize(
    "options", [("--outputs", "whole"), ("--outputs", "split", "--scheme", "megatron")]
)
def test_inference(options: tuple[str, ...]) -> None:
    """Whole or split: the last batch is filled up, and what fills it is dropped."""
    module = example("infer")
    actual = module.main(["--ranks", "2", *options])
    assert (
        torch.equal(actual, module.build()(module.samples()).argmax(-1))
        and len(actual) == module.SAMPLES
    )


def test_a_resnet_out_of_an_onnx_file(tmp_path: Path) -> None:
    """Two ranks train as one does, and what they wrote gives in another runtime what they had
    learnt.
    """
    module = example("train_resnet_onnx")
    losses = [
        module.main(
            ["--file", str(tmp_path / f"{ranks}.onnx"), "--ranks", str(ranks), "--steps", "12"]
        )
        for ranks in (1, 2)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[0][-1] < losses[0][0]
    runtime = import_module("onnxruntime")
    x, corner = module.pictures(99)
    scores = [
        runtime.InferenceSession(str(tmp_path / f"{name}.onnx")).run(None, {"picture": x.numpy()})[
            0
        ]
        for name in ("1", "1-trained", "2-trained")
    ]
    assert np.allclose(scores[1], scores[2], atol=1e-4) and not np.allclose(
        scores[0], scores[1], atol=1e-2
    )
    loss = [
        float(torch.nn.functional.cross_entropy(torch.from_numpy(one), corner)) for one in scores
    ]
    assert loss[1] < loss[0]


def test_a_loop_of_accelerate_or_none() -> None:
    """Without Accelerate what stands for it is used; the losses are those of one device."""
    module = example("accelerate_loop")
    module.accelerator = module._Alone
    alone = run_ranks(module.train, 1)
    ranks = run_ranks(module.train, 2)
    assert (
        ranks[0] == pytest.approx(alone[0], rel=1e-5)
        and len(alone[0]) == 8
        and alone[0][-1] < alone[0][0]
    )


def _run(command: list[str], folder: Path, **environment: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _torchrun(ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]


@pytest.mark.slow
@pytest.mark.ci
def test_accelerate_makes_the_group(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    assert "epoch 1: loss" in _run([*_torchrun(2), str(EXAMPLES / "accelerate_loop.py")], tmp_path)


@pytest.mark.slow
@pytest.mark.ci
def test_gpt_goes_on_on_other_ranks(book: Path) -> None:
    """One rank to step 8, and three ranks to 4 and one from there."""
    losses = []
    for folder, parts in (("alone", [(1, 8)]), ("parts", [(3, 4), (1, 8)])):
        for ranks, steps in parts:
            start = [sys.executable] if ranks == 1 else _torchrun(ranks)
            own = [
                "book.txt",
                "--folder",
                folder,
                "--steps",
                str(steps),
                "--save-every",
                "2",
                "--scheme",
                "zero3",
            ]
            _run([*start, str(EXAMPLES / "train_gpt.py"), *own], book.parent)
        lines = (book.parent / folder / "losses.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)[:2] for line in lines])
    assert [step for step, _ in losses[1]] == list(range(8)) == [step for step, _ in losses[0]]
    # The schedule's length differs up to the break, and dropout draws by counter: the steps before
    # it are compared.
    assert losses[1][0][1] == pytest.approx(losses[0][0][1], rel=1e-4)
    assert losses[1][-1][1] < losses[1][0][1]


@pytest.mark.slow
@pytest.mark.ci
def test_a_frozen_llama_learns_in_its_adapters(book: Path) -> None:
    """A folder of Hugging Face on two ranks: the base is not in what was learnt, and nothing of it
    changed.
    """
    module = example("finetune_llama")
    torch.manual_seed(1)
    module.small().save_pretrained(book.parent / "llama")
    own = ["book.txt", "--model", "llama", "--folder", "run", "--steps", "6"]
    said = _run([*_torchrun(2), str(EXAMPLES / "finetune_llama.py"), *own], book.parent)
    losses = [
        float(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("step ")
    ]
    assert losses[5] < losses[0]
    safetensors = import_module("safetensors.torch")
    learnt = safetensors.load_file(book.parent / "run" / "adapters.safetensors")
    assert len(learnt) == 2 * 2 * len(module.ADAPTED) and all(
        name.endswith((".up", ".down")) for name in learnt
    )
    assert all(float(value.abs().max()) > 0 for value in learnt.values())
    _run(
        [sys.executable, "-m", "autopar", "checkpoint", "convert", "run", "-o", "out"], book.parent
    )
    whole = safetensors.load_file(book.parent / "out" / "model.safetensors")
    before = safetensors.load_file(book.parent / "llama" / "model.safetensors")
    kept = {
        name.replace(".base.", "."): value for name, value in whole.items() if name not in learnt
    }
    assert (
        all(torch.equal(kept[name], value) for name, value in before.items() if name in kept)
        and len(set(kept) & set(before)) > 10
    )


def _stub(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def scheduled(book: Path) -> Path:
    """A folder with a training, and commands of a scheduler's machine that run on this one."""
    transformers = import_module("transformers")
    sizes: dict[str, Any] = {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 128,
        "n_positions": 8,
    }
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(book.parent)
    (book.parent / "gpt.toml").write_text(GPT, encoding="utf-8")
    commands = book.parent / "commands"
    commands.mkdir()
    _stub(commands, "scontrol", "echo localhost")
    _stub(commands, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"')
    _stub(commands, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    _stub(commands, "python", f'exec {sys.executable} "$@"')
    return book.parent


def _port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_job_of_slurm(scheduled: Path) -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text(encoding="utf-8").replace("29500", str(_port()))
    (scheduled / "job.sbatch").write_text(text, encoding="utf-8")
    slurm = {
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
    }
    path = f"{scheduled / 'commands'}{os.pathsep}{os.environ['PATH']}"
    said = _run(["bash", "job.sbatch"], scheduled, PATH=path, **slurm)
    assert "begins on 2 ranks" in said and latest_in(scheduled / "run") == "step-00000003"


@pytest.mark.slow
@pytest.mark.ci
def test_the_job_of_kubernetes(scheduled: Path) -> None:
    """The command of a pod, with what Kubeflow's operator puts into its environment."""
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    policy = job["spec"]["elasticPolicy"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    given |= {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_MAX_RESTARTS": "1",
    }
    given |= {"PET_RDZV_ENDPOINT": f"localhost:{_port()}", "PET_RDZV_ID": job["metadata"]["name"]}
    command = [part.replace("/runs", str(scheduled)) for part in container["command"]]
    path = f"{scheduled / 'commands'}{os.pathsep}{os.environ['PATH']}"
    said = _run(
        [shutil.which(command[0], path=path) or command[0], *command[1:]],
        scheduled,
        PATH=path,
        **given,
    )
    assert "begins on 2 ranks" in said and latest_in(scheduled / "run") == "step-00000003"
    assert worker["replicas"] == policy["maxReplicas"] and policy["minReplicas"] == 1
