"""The benchmark of steps: that the contenders train one and the same model, its rows, and its
command line.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from autopar.runtime.launch import run_ranks
from benchmarks import runtime
from benchmarks.running import races
from benchmarks.running.bubbles import Bubble, bubble, waiting
from benchmarks.running.contenders import RIVALS, plan_of, shares
from benchmarks.running.gpt2 import Shape, batch
from benchmarks.running.models import model
from benchmarks.running.races import LeftOut, Row, race

SMALL = Shape(width=128, layers=2, batch=4, sequence=8, vocabulary=32)
STEPS = 3


def _losses() -> dict[str, list[float]]:
    """On a rank: the losses of the steps of every rival."""
    results = {}
    for name, rival in RIVALS.items():
        step = rival.build(SMALL)
        results[name] = [races.whole_loss(step(number), shares(name)) for number in range(STEPS)]
    return results


def _alone() -> list[float]:
    """The same on one rank, without any of the rivals' code."""
    module = model(SMALL)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = module(*batch(SMALL, number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_all_rivals_train_the_same_model() -> None:
    """All rivals compute the same, so that only their speed is compared."""
    (wanted,) = run_ranks(_alone, 1, timeout=60.0)
    assert wanted[0] != wanted[-1]
    for actual in run_ranks(_losses, 2, timeout=60.0):
        assert actual == {name: pytest.approx(wanted, rel=1e-5) for name in RIVALS}


def test_stages_hold_the_model_once() -> None:
    whole = model(SMALL)
    parts = [whole.stage(index, 2) for index in range(2)]
    assert sorted(p.numel() for part in parts for p in part.parameters()) == sorted(
        p.numel() for p in whole.parameters()
    )
    tokens, _ = batch(SMALL)
    assert parts[1](parts[0](tokens)).shape == (4, 8, 32)


def test_a_race() -> None:
    row = race("ddp", SMALL, 2, 2)
    assert isinstance(row, Row)
    assert (row.scheme, row.rival, row.ranks, row.width) == ("data", "ddp", 2, 128)
    assert (
        row.ratio > 0.0
        and row.ours_s > 0.0
        and row.rival_s > 0.0
        and row.loss_error < runtime.CLOSE
    )
    # The model and what the optimizer keeps of it lie in memory, in float32: the weights and two
    # moments.
    weights = sum(p.numel() for p in model(SMALL).parameters()) * 4 / 1e6
    for peak in (row.ours_mb, row.rival_mb):
        assert peak is None or 3 * weights < peak < 100 * weights
    assert row.memory_ratio is None or (
        row.ours_mb and row.rival_mb and row.memory_ratio == row.ours_mb / row.rival_mb
    )
    runtime.show(row)
    assert {
        "scheme",
        "rival",
        "ranks",
        "width",
        "ours_s",
        "rival_s",
        "ratio",
        "memory_ratio",
    } <= row.as_json().keys()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("rival", RIVALS)
def test_every_race(rival: str) -> None:
    """Pipelines may be refused, with the reason."""
    row = race(rival, SMALL, 2, 1, memory=False)
    assert (isinstance(row, LeftOut) and RIVALS[rival].stages and row.why) or (
        isinstance(row, Row) and row.loss_error < runtime.CLOSE
    )


def test_what_is_left_out_says_why() -> None:
    row = race("torch-1f1b", Shape(width=64, layers=3), 2, 1)
    assert isinstance(row, LeftOut) and "3 layers make no 2 equal stages" in row.why
    row = race("ddp", Shape(width=64, layers=1, batch=4, sequence=8, vocabulary=32), 0, 1)
    assert isinstance(row, LeftOut) and "at least 1" in row.why


def test_plans_have_the_stages_that_they_are_asked_for() -> None:
    plan = plan_of(SMALL, 2, RIVALS["torch-1f1b"].asked, stages=True)
    assert (
        len(plan.stages) == 2
        and plan.schedule.pipeline == "1f1b"
        and plan.schedule.micro_batches == 4
    )
    assert not plan_of(SMALL, 2, RIVALS["ddp"].asked, stages=False).stages


def test_the_share_that_a_thread_waits() -> None:
    def work() -> None:
        time.sleep(0.05)
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    # Where others have the processor, more is waited.
    assert 0.2 < waiting(work) < 1.0
    assert waiting(lambda: time.sleep(0.05)) > 0.9


def test_a_bubble() -> None:
    """A row, or why there is none."""
    actual = bubble("1f1b", SMALL, 2, 2, 1)
    assert (isinstance(actual, LeftOut) and actual.why) or (
        isinstance(actual, Bubble) and 0.0 < actual.priced < 1.0
    )


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, int]] = []

    def told(rival: str, shape: Shape, ranks: int, rounds: int, *, memory: bool) -> Row | LeftOut:
        asked.append((rival, shape.width, ranks))
        head: dict[str, Any] = {
            "scheme": RIVALS[rival].scheme,
            "rival": rival,
            "ranks": ranks,
            "width": shape.width,
        }
        if RIVALS[rival].stages:
            return LeftOut(**head, why="no stages yet")
        figures = {"memory_ratio": 1.5, "ours_mb": 3.0, "rival_mb": 2.0, "loss_error": 0.5}
        return Row(**head, ours_s=2.0, rival_s=1.0, ratio=2.0, **figures)  # type: ignore[arg-type]

    def waits(schedule: str, shape: Shape, stages: int, micro_batches: int, rounds: int) -> Bubble:
        return Bubble(
            schedule=schedule, stages=stages, micro_batches=micro_batches, measured=0.25, priced=0.2
        )

    monkeypatch.setattr(runtime, "race", told)
    monkeypatch.setattr(runtime, "bubble", waits)
    runtime.main(["--quick", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert {row["rival"] for row in written["rows"]} | {
        row["rival"] for row in written["left_out"]
    } == set(RIVALS)
    assert {"schedule", "stages", "micro_batches", "measured", "priced"} == written["bubbles"][
        0
    ].keys()
    assert {ranks for _, _, ranks in asked} == {2} and {
        rival for rival, width, _ in asked if width == 512
    } == set(runtime.QUICK_WIDE)
    asked.clear()
    runtime.main(["--rivals", "ddp", "torch-gpipe", "--widths", "128"])
    printed = capsys.readouterr().out
    assert asked == [(rival, 128, ranks) for ranks in (2, 4) for rival in ("ddp", "torch-gpipe")]
    assert (
        "losses differ by 0.5" in printed
        and "left out: no stages yet" in printed
        and "25.0%, priced 20.0%" in printed
    )
    with pytest.raises(SystemExit):
        runtime.main(["--rivals", "horovod"])
    assert "unknown rival 'horovod'" in capsys.readouterr().err
