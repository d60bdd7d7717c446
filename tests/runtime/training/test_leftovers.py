"""Leftovers of low-rank gradients come back from a checkpoint: bit for bit under the plan that
saved them, as a sum under others.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.training.latest import find_checkpoint
from autopar.runtime.training.manifest import read_manifest
from autopar.runtime.training.resuming import resume
from autopar.runtime.training.saving import save
from tests.runtime.training.nets import SCHEMES, language, tokens

COMPRESS = {"*weight": "powersgd-1"}


@functools.cache
def _plan(scheme: str, devices: int, compressed: bool = True) -> Plan:
    options = {"scheme": "2x2x1", "micro_batches": 2} if scheme == "stages" else SCHEMES[scheme]
    compress = COMPRESS if compressed else None
    return autopar.plan(
        language(),
        (tokens(0),),
        devices=devices,
        cluster="local-cpu",
        optimizer="sgd",
        compress=compress,
        **options,
    )


def _made(plan: Plan, seed: int) -> tuple[ParallelModule, torch.optim.Optimizer]:
    module = autopar.parallelize(language(seed), plan, (tokens(0),))
    return module, torch.optim.SGD(module.parameters(), lr=0.5)


def _steps(module: ParallelModule, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    return [float(module.train_step(tokens(step), optimizer)) for step in steps]


def _begun(plan: Plan, folder: str) -> tuple[list[float], int]:
    """The losses after a save, of the run that goes on.

    How many parameters travel as factors here.
    """
    torch.manual_seed(3)
    module, optimizer = _made(plan, 0)
    _steps(module, optimizer, range(3))
    save(module, optimizer, folder, step=3)
    factored = sum(len(stage.units.low_rank.left) for stage in module.engine.stages.values())
    return _steps(module, optimizer, range(3, 6)), factored


def _resumed(plan: Plan, folder: str, forget: bool = False) -> tuple[list[float], tuple[str, ...]]:
    """The losses of another module, which has trained elsewhere before."""
    torch.manual_seed(8)
    module, optimizer = _made(plan, 1)
    _steps(module, optimizer, range(7, 9))
    resumed = resume(module, optimizer, folder)
    assert resumed is not None
    if forget:
        for stage in module.engine.stages.values():
            stage.units.low_rank.left.clear()
    return _steps(module, optimizer, range(3, 6)), resumed.notes


@pytest.mark.parametrize(
    ("scheme", "devices"),
    [
        ("data", 2),
        *(
            pytest.param(*one, marks=(pytest.mark.slow, pytest.mark.ci))
            for one in (("megatron x data", 4), ("stages", 4))
        ),
    ],
)
def test_a_resumed_run_is_the_one_that_was_not_ended(
    tmp_path: Path, scheme: str, devices: int
) -> None:
    plan = _plan(scheme, devices)
    folder = str(tmp_path / "saved")
    begun = run_ranks(_begun, devices, plan, folder, timeout=120)
    assert any(factored for _, factored in begun)
    wanted = begun[0][0]
    assert run_ranks(_resumed, devices, plan, folder, timeout=120)[0] == (wanted, ())
    forgotten = run_ranks(_resumed, devices, plan, folder, True, timeout=120)[0][0]
    assert max(abs(a - b) for a, b in zip(forgotten, wanted, strict=True)) > 1e-4  # leftovers count


def _before_any_step(folder: str) -> list[int]:
    """Leftovers after a step, and when the module is again what it was before."""
    module, optimizer = _made(_plan("data", 2), 0)
    save(module, optimizer, folder, step=0)
    _steps(module, optimizer, range(1))
    held = [stage.units.low_rank for stage in module.engine.stages.values()]
    result = [sum(len(one.left) + len(one.factors) for one in held)]
    assert resume(module, optimizer, folder) is not None
    return [*result, sum(len(one.left) + len(one.factors) for one in held)]


def test_where_nothing_was_left_over_nothing_is(tmp_path: Path) -> None:
    _plan("data", 2)
    before, after = run_ranks(_before_any_step, 2, str(tmp_path), timeout=120)[0]
    assert before and not after


@pytest.mark.slow
@pytest.mark.ci
def test_on_other_ranks_the_sum_goes_on(tmp_path: Path) -> None:
    """From two ranks to four; to a plan that cuts the weights, too; on one device, where nothing is
    left over, it is dropped.
    """
    folder = tmp_path / "saved"
    (wanted, _), *_ = run_ranks(_begun, 2, _plan("data", 2), str(folder), timeout=120)
    path = find_checkpoint(folder)
    assert path is not None
    held = read_manifest(path)[0].named("compression.")
    assert held["qkv.weight.left"].shape == (2, 48, 16) and held["qkv.weight.factor"].shape == (
        1,
        16,
        1,
    )
    losses, notes = run_ranks(_resumed, 4, _plan("data", 4), str(folder), timeout=120)[0]
    assert losses == pytest.approx(wanted, rel=2e-5) and not notes
    shutil.copytree(folder, tmp_path / "alone")
    losses, notes = run_ranks(
        _resumed, 1, _plan("alone", 1, False), str(tmp_path / "alone"), timeout=120
    )[0]
    assert (
        losses[0] == pytest.approx(wanted[0], rel=2e-5)
        and "left over is dropped" in notes[0]
        and "qkv.weight" in notes[0]
    )
    losses, notes = run_ranks(_resumed, 4, _plan("megatron x data", 4), str(folder), timeout=120)[0]
    assert losses[0] == pytest.approx(wanted[0], rel=2e-5) and not notes


@pytest.mark.slow
@pytest.mark.ci
def test_four_ranks_hand_theirs_to_two(tmp_path: Path) -> None:
    (wanted, _), *_ = run_ranks(_begun, 4, _plan("data", 4), str(tmp_path), timeout=120)
    losses, notes = run_ranks(_resumed, 2, _plan("data", 2), str(tmp_path), timeout=120)[0]
    assert losses == pytest.approx(wanted, rel=2e-5) and not notes
