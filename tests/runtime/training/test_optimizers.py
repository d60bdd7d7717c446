"""Every optimizer's state comes back: bit for bit under the same plan, and under other plans."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RunError
from autopar.plan_parts import SchedulePlan, StagePlan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.training.latest import find_checkpoint
from autopar.runtime.training.manifest import read_manifest
from autopar.runtime.training.resuming import resume
from autopar.runtime.training.saving import save
from tests.runtime.training.nets import BATCH, language, plan_of, tokens

MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda m: autopar.local_optimizer(torch.optim.Adafactor, m, lr=0.1),
    "fused adamw": lambda m: autopar.local_optimizer(torch.optim.AdamW, m, lr=0.1, fused=True),
    "lamb": lambda m: autopar.Lamb(m.parameters(), lr=0.1),
    "muon": lambda m: autopar.Muon(m, lr=0.1),
    "rprop": lambda m: autopar.local_optimizer(torch.optim.Rprop, m, lr=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.1),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.1),
    "small adamw": lambda m: autopar.SmallAdamW(m.parameters(), lr=0.1),
    "local small adamw": lambda m: autopar.local_optimizer(autopar.SmallAdamW, m, lr=0.1),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
}

FAST = ["adafactor", "local small adamw", "muon"]


def _made(
    scheme: str, devices: int, name: str, seed: int
) -> tuple[ParallelModule, torch.optim.Optimizer]:
    module = autopar.parallelize(language(seed), plan_of(scheme, devices), (tokens(0),))
    return module, MAKE[name](module)


def _steps(module: ParallelModule, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    return [float(module.train_step(tokens(step), optimizer)) for step in steps]


def _saved_and_back(folder: str, names: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    results = {}
    for name in names:
        module, optimizer = _made("zero3", 2, name, 0)
        torch.manual_seed(3)
        _steps(module, optimizer, range(2))
        save(module, optimizer, f"{folder}/{name}", step=2)
        losses = _steps(module, optimizer, range(2, 4))
        results[name] = losses, _resumed(f"{folder}/{name}", "zero3", 2, name)
    return results


def _resumed(folder: str, scheme: str, devices: int, name: str) -> list[float]:
    module, optimizer = _made(scheme, devices, name, 1)
    assert resume(module, optimizer, folder) is not None
    return _steps(module, optimizer, range(2, 4))


def _under_stages(folder: str, names: list[str]) -> dict[str, list[float]]:
    return {name: _resumed(f"{folder}/{name}", "stages", 2, name) for name in names}


@pytest.mark.parametrize(
    "names",
    [FAST, pytest.param(sorted({*MAKE} - {*FAST}), marks=(pytest.mark.slow, pytest.mark.ci))],
)
def test_states_come_back(tmp_path: Path, names: list[str]) -> None:
    plan_of("zero3", 2)
    plan_of("stages", 2)
    here = run_ranks(_saved_and_back, 2, str(tmp_path), names)[0]
    there = run_ranks(_under_stages, 2, str(tmp_path), names)[0]
    for name in names:
        assert here[name][0] == here[name][1], name
        # Muon computes updates in bfloat16, where noise of gradients may round otherwise.
        tolerance = 1e-2 if name == "muon" else 1e-5
        assert there[name] == pytest.approx(here[name][0], rel=tolerance), name


class Counting(torch.optim.SGD):
    """Keeps a number of each shard."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Remember how long each shard's gradient is."""
        for value in self.param_groups[0]["params"]:
            self.state[value]["length"] = float(local_of(value.grad).norm())


def _counting(folder: str) -> str:
    module = autopar.parallelize(language(), plan_of("zero3", 2), (tokens(0),))
    optimizer = Counting(module.parameters(), lr=0.1)
    _steps(module, optimizer, range(1))
    try:
        save(module, optimizer, folder, step=1)
    except RunError as error:
        return str(error)
    return ""


def test_numbers_of_shards_are_refused(tmp_path: Path) -> None:
    """A number of each shard has no place in a checkpoint for any plan; the refusal is the same
    everywhere, and leaves nothing.
    """
    plan_of("zero3", 2)
    results = run_ranks(_counting, 2, str(tmp_path / "saved"))
    assert results[0] == results[1] and "a checkpoint holds one number for all ranks" in results[0]
    # The lock of a folder stays: another script may wait for it.
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["training.lock"]


def _small_on(scheme: str, devices: int, folder: str, seed: int) -> list[float]:
    """Resume where there is something, train and save: the losses."""
    module, optimizer = _made(scheme, devices, "local small adamw", seed)
    before = resume(module, optimizer, folder)
    torch.manual_seed(3)
    start = 0 if before is None else before.step
    losses = _steps(module, optimizer, range(start, start + 3))
    assert {t.dtype for s in optimizer.state.values() for t in s.values() if t.dim()} == {
        torch.int16
    }
    save(module, optimizer, folder, step=start + 3)
    return losses


@pytest.mark.slow
@pytest.mark.ci
def test_moments_of_sixteen_bits_go_from_plan_to_plan(tmp_path: Path) -> None:
    """Shards have powers of two of their own, the checkpoint has numbers: any plan goes on with
    them.
    """
    plans = (("zero3", 2), ("data", 2), ("alone", 1), ("zero1", 2), ("megatron x data", 4))
    for scheme, devices in plans:
        plan_of(scheme, devices)
    run_ranks(_small_on, 2, "zero3", 2, str(tmp_path / "first"), 0)
    results = []
    for scheme, devices in plans:
        shutil.copytree(tmp_path / "first", tmp_path / scheme)
        results.append(run_ranks(_small_on, devices, scheme, devices, str(tmp_path / scheme), 1)[0])
    for (scheme, _), losses in zip(plans, results, strict=True):
        assert losses == pytest.approx(results[0], rel=2e-5), scheme
    path = find_checkpoint(tmp_path / "first")
    assert path is not None
    held = read_manifest(path)[0].named("optimizer.")
    assert {name.rpartition(".")[2] for name in held} == {"mean", "variance"} and {
        entry.dtype for entry in held.values()
    } == {"float32"}


class Normed(nn.Module):
    """Statistics in both halves, so that of two stages each changes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _normed(plan: Any, folder: str) -> None:
    torch.manual_seed(0)
    module = autopar.parallelize(Normed(), plan, (torch.zeros(BATCH, 8),))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        module.train_step(
            torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)), optimizer
        )
    save(module, optimizer, folder, step=2)


def test_statistics_of_every_stage_are_saved(tmp_path: Path) -> None:
    alone = autopar.plan(Normed(), (torch.zeros(BATCH, 8),), devices=1, cluster="local-cpu")
    names = list(alone.operators)
    cuts = [
        StagePlan(first=first, mesh=alone.mesh, forward=0.0, backward=0.0, memory=0.0)
        for first in (names[0], names[len(names) // 2])
    ]
    stages = alone.model_copy(
        update={"stages": tuple(cuts), "schedule": SchedulePlan(pipeline="1f1b")}
    )
    run_ranks(_normed, 2, stages, str(tmp_path / "stages"))
    run_ranks(_normed, 1, alone, str(tmp_path / "alone"))
    states = []
    for name in ("stages", "alone"):
        module = Normed()
        assert resume(module, None, tmp_path / name) is not None
        states.append(module.state_dict())
        path = find_checkpoint(tmp_path / name)
        assert path is not None and read_manifest(path)[0].tensors[
            "model.layers.3.1.running_var"
        ].shape == (8,)
    assert all(
        torch.allclose(value, states[1][name], atol=1e-6) for name, value in states[0].items()
    )
    assert int(states[0]["layers.3.1.num_batches_tracked"]) == 2 and not torch.equal(
        states[0]["layers.3.1.running_var"], torch.ones(8)
    )
