"""Optimizer state in host memory on real ranks: one device's numbers, in any schedule, from the
command line, and across checkpoints.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import run as command
from autopar.costmodel import Cluster, dump, load_cluster
from autopar.plan import Plan
from autopar.planning.planner import search_plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.parameters.host_states import HostStates
from tests.end_to_end.models import write_residual
from tests.end_to_end.parity import failures, subject
from tests.end_to_end.plans import request

from . import train_script


def local(**figures: float) -> Cluster:
    """Ranks of this machine, with a host of their own."""
    cluster = load_cluster("local-cpu").sized(2)
    return replace(
        cluster, name="here", device=replace(cluster.device, host_bandwidth=1e9, **figures)
    )


def half(plan: Plan) -> Plan:
    """The plan with the state of every other parameter back on the device."""
    names = list(plan.parameters)[::2]
    on_device = {
        name: plan.parameters[name].model_copy(update={"state": "device"}) for name in names
    }
    return Plan.model_validate_json(
        plan.model_copy(update={"parameters": plan.parameters | on_device}).to_json()
    )


@pytest.mark.parametrize("name", ["gpt2", pytest.param("residual_onnx", marks=pytest.mark.slow)])
def test_weights_of_one_device(name: str, tmp_path: Path) -> None:
    """Three steps of AdamW: stored whole and split, with micro-batches and without, all state in
    host memory or half of it.
    """
    model = subject(name, tmp_path, train=True)
    wanted = request((2,), train=True)
    named = []
    for count, zero in ((1, 0), (1, 3), (2, 2)):
        plan = search_plan(
            model.model.graph, replace(wanted, offload="optimizer", micro_batches=count, zero=zero)
        )
        assert all(parameter.state == "host" for parameter in plan.parameters.values())
        named += [
            (f"all {count} {zero}", Plan.model_validate_json(plan.to_json())),
            (f"half {count} {zero}", half(plan)),
        ]
    assert not failures(model, wanted, named)


def _legs(folder: str, plans: Sequence[Plan]) -> tuple[list[float], list[str], list[str]]:
    """One leg of an ordinary training loop under each plan, with checkpoints between; what kind of
    optimizer each leg has.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    seen: list[float] = []
    kinds = []
    keys = []
    for number, (plan, steps) in enumerate(zip(plans, train_script.LEGS, strict=True)):
        model = autopar.parallelize(train_script.build(seed=number), plan, (train_script.batch(0),))
        optimizer = autopar.host_states(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        kinds.append(type(optimizer).__name__)
        if number:
            weights, state = get_state_dict(model, optimizer)
            checkpoint.load(
                {"model": weights, "optimizer": state}, checkpoint_id=Path(folder, str(number - 1))
            )
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        if isinstance(optimizer, HostStates):
            assert len(optimizer.held) == sum(
                parameter.state == "host" for parameter in plan.parameters.values()
            )
        seen += train_script.train(model, optimizer, steps)
        weights, state = get_state_dict(model, optimizer)
        keys.append(json.dumps(sorted(state["state"])))
        checkpoint.save(
            {"model": weights, "optimizer": state}, checkpoint_id=Path(folder, str(number))
        )
    return seen, kinds, keys


def test_the_usual_loop_across_checkpoints(tmp_path: Path) -> None:
    """Clipped norms and checkpoints that are carried on under plans with state in host memory,
    without, and with half of it.
    """
    plans = []
    for scheme, offload in (
        ("zero3", "optimizer"),
        ("megatron", "none"),
        ("megatron", "optimizer"),
    ):
        made = autopar.plan(
            train_script.build(),
            (train_script.batch(0),),
            cluster=local(),
            scheme=scheme,
            offload=offload,
        )
        plans.append(made if len(plans) < 2 else half(made))
    expected = pytest.approx(train_script.on_one_device(), rel=1e-9)
    for seen, kinds, keys in run_ranks(_legs, 2, str(tmp_path), plans, timeout=300.0):
        assert seen == expected
        assert kinds == ["HostStates", "AdamW", "HostStates"]
        assert len(set(keys)) == 1


def _forgetful(plan: Plan) -> list[float]:
    model = autopar.parallelize(train_script.build(), plan, (train_script.batch(0),))
    return train_script.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(6))


def test_without_the_line_the_training_is_the_same() -> None:
    plan = autopar.plan(
        train_script.build(),
        (train_script.batch(0),),
        cluster=local(),
        scheme="zero3",
        offload="optimizer",
    )
    for seen in run_ranks(_forgetful, 2, plan, timeout=120.0):
        assert seen == pytest.approx(train_script.on_one_device(), rel=1e-9)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --offload optimizer`, `run --check`, `explain`: what is in host memory, its bytes, and
    what it costs.
    """
    cluster = tmp_path / "here.json"
    plan = tmp_path / "plan.json"
    model = write_residual(tmp_path / "residual.onnx")
    cluster.write_text(dump(local()), encoding="utf-8")
    made = [
        "plan",
        str(model),
        "--cluster",
        str(cluster),
        "-o",
        str(plan),
        "--offload",
        "optimizer",
        "--no-compare",
    ]
    assert command(made) == 0
    told = capsys.readouterr().out
    count = len(Plan.load(plan).parameters)
    assert f"optimizer state of {count} of {count} parameters in host memory: " in told
    assert "of the update for the way there and back" in told
    assert command(["run", str(plan), "--model", str(model), "--check", "--steps", "3"]) == 0
    assert "as priced" in capsys.readouterr().out
    assert command(["explain", str(plan)]) == 0
    assert capsys.readouterr().out.count(", optimizer state in host memory") == count
