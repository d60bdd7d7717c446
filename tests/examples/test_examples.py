"""The examples run on ranks and equal one device; the documents' figures come out of plans."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import NoPlanFits
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=(pytest.mark.slow, pytest.mark.ci))])
def test_the_network_of_mindspore_trains_as_on_one_device(ranks: int) -> None:
    """On eight ranks those that no cut needs hold copies."""
    module = example("from_mindspore")
    wanted = module.alone()
    for losses in run_ranks(module.train, ranks, module.planned(ranks), timeout=120):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_between_its_products_stands_one_all_gather() -> None:
    module = example("from_mindspore")
    autopar.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=4, full_batch=True
    )
    plan = autopar.plan(module.build(), (module.batch(0),), cluster="local-cpu", mode="infer")

    def work() -> list[tuple[str, int]]:
        model = autopar.parallelize(module.build(), plan, outputs="split")
        model(module.batch(0))
        with torch.no_grad(), CollectiveLog() as log:
            model.local_outputs(module.batch(0))
        return [(collective.kind, collective.nbytes) for _, collective in log.issued]

    assert run_ranks(work, 4, timeout=60) == [[("all_gather", 32 * 32 * 4)]] * 4
    assert [(c.kind, c.nbytes) for c in plan.collectives] == [("all_gather", 32 * 32 * 4)]


def test_the_products_of_oneflow_in_three_forms() -> None:
    module = example("from_oneflow")
    for result in run_ranks(module.run, module.RANKS, timeout=60):
        assert set(result) == {"data", "model", "pipeline"} and max(result.values()) < 1e-5


def _alone(module: ModuleType, steps: int) -> list[float]:
    """The losses of Ray's example on one device."""
    torch.manual_seed(0)
    net = module.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(*module.batch(step))
        loss.backward()
        optimizer.step()
        results.append(float(loss.detach()))
    return results


def test_what_a_worker_of_ray_runs_is_the_training_of_one_device() -> None:
    module = example("ray_train")

    def work() -> tuple[list[float], list[dict[str, float]]]:
        told: list[dict[str, float]] = []
        return module.train_loop({"steps": 3, "cluster": "local-cpu"}, told.append), told

    wanted = _alone(module, 3)
    for losses, told in run_ranks(work, 2, timeout=60):
        assert losses == pytest.approx(wanted, rel=1e-5) and [one["loss"] for one in told] == losses


def test_a_program_that_is_pickled_by_value_takes_autopar_along() -> None:
    """Ray sends functions of `__main__` so, with the modules that they name."""
    actual = cloudpickle.loads(cloudpickle.dumps({"autopar": autopar}))["autopar"]
    assert actual is autopar and actual.plan is autopar.plan


@pytest.mark.slow
@pytest.mark.ci
def test_ray_runs_the_example(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    program = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", "2"]
    environment = os.environ | {"HOME": str(tmp_path)}  # where Ray puts its results
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    told = re.search(r"^losses: (\[.*\])$", done.stdout, re.MULTILINE)
    assert told is not None and "world_size=2" in said and "idle" not in said, said
    assert ast.literal_eval(told[1]) == pytest.approx(_alone(example("ray_train"), 5), rel=1e-5)


@pytest.mark.slow
@pytest.mark.ci
def test_gpt3_on_64_stages_of_6_hosts_of_8_devices(tmp_path: Path) -> None:
    """175 B parameters on 3,072 A100: planned so, priced, and within their memory."""
    path = example("gpt2_onnx").write_gpt2(
        tmp_path / "gpt3.onnx", layers=96, heads=96, hidden=12288, vocabulary=51200, positions=2048
    )
    wanted: dict[str, Any] = {
        "batch": 1536,
        "dims": {"sequence": 2048},
        "dtype": "bfloat16",
        "cluster": "dgx-a100-80g",
    }
    plan = autopar.plan(str(path), devices=3072, scheme="64x6x8", **wanted)
    assert plan.devices == 3072 and len(plan.stages) == 64 and plan.mesh_.shape == (6, 8)
    assert [axis.level for axis in plan.mesh] == [
        "nic",
        "nvlink",
    ]  # data parallel between hosts, model parallel inside
    assert 1 < plan.predicted.step < 60 and plan.predicted.memory < 80e9
    sizes = (torch.tensor(parameter.shape).prod() for parameter in plan.parameters.values())
    assert int(sum(sizes)) == pytest.approx(175e9, rel=0.01)


@pytest.mark.slow
@pytest.mark.ci
def test_170_billion_parameters_need_680_gigabytes() -> None:
    """In float32 they fill 680 GB, so no fewer than nine devices of 80 GB hold them."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(41232, 41232, bias=False) for _ in range(100)))
        x = torch.empty(1, 41232)
    assert sum(p.numel() * 4 for p in model.parameters()) == pytest.approx(680e9, rel=1e-3)
    with pytest.raises(NoPlanFits) as error:
        autopar.plan(model, (x,), devices=8, cluster="dgx-a100-80g", mode="infer")
    assert error.value.minimum == pytest.approx(85e9, rel=0.01)
    plan = autopar.plan(model, (x,), devices=16, cluster="dgx-a100-80g", mode="infer")
    assert plan.predicted.memory == pytest.approx(680e9 / 16, rel=0.01)


@pytest.mark.slow
def test_a_trainer_of_transformers_trains_as_one_device_does() -> None:
    pytest.importorskip("accelerate")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/hf_trainer.py"]
    # Torchrun says more than the rank does, so that the rank's own line is looked for.
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [row for row in done.stdout.splitlines() if row.startswith('{"plan"')]
    losses = json.loads(line)
    assert losses["plan"] == pytest.approx(losses["device"], rel=1e-3) and len(losses["plan"]) == 3
