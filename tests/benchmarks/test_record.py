"""The record of published runs: the page, its figures and the stated intervals follow from it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from autopar.costmodel.calibration import intervals
from autopar.costmodel.cluster.residual import Residual
from benchmarks.validating.held_out import of_memory, of_steps
from benchmarks.validating.record import SAMPLED, read_record, write_record
from benchmarks.validating.rows import checked
from benchmarks.validating.scores import Group, Sample
from benchmarks.validating.seen import KERNELS, PROFILE, UNFITTED, unseeing
from benchmarks.validating.steps import predict
from benchmarks.validating.tables import tables
from benchmarks.validating.training import sample
from benchmarks.validating.variants import AS_IT_RAN, NO_KERNELS, NO_PROFILE

ROOT = Path(__file__).resolve().parents[2]
POINT = 0.01
PRICED = read_record()


def test_the_tables_of_the_page_are_those_of_the_record() -> None:
    page = (ROOT / "docs" / "published-runs.md").read_text(encoding="utf-8")
    assert tables(PRICED) in page


def test_the_errors_of_the_page_are_those_of_the_record() -> None:
    told = json.loads((ROOT / "docs" / "published-runs.json").read_text(encoding="utf-8"))
    for group in PRICED[AS_IT_RAN]:
        errors = [
            abs(s.predicted / s.measured - 1)
            for s in group.samples
            if s.predicted and s.measured is not None
        ]
        if errors:
            assert np.mean(errors) == pytest.approx(told[group.name]["mean_error"], abs=POINT)


@pytest.mark.parametrize(
    ("how", "stated"),
    [
        (AS_IT_RAN, intervals.STEP),
        (NO_PROFILE, intervals.NO_PROFILE),
        (NO_KERNELS, intervals.BY_DATA_SHEET),
    ],
)
def test_stated_intervals_are_those_of_the_record(how: str, stated: dict[str, Residual]) -> None:
    """Within one point: a change that moves them further states them anew."""
    held = of_steps(PRICED[how])
    assert set(held) == set(stated)
    for kind, one in held.items():
        ends = (stated[kind].low, stated[kind].middle, stated[kind].high)
        assert (one.residual.low, one.residual.middle, one.residual.high) == pytest.approx(
            ends, abs=POINT
        ), kind
        assert one.coverage >= 0.85, kind


def test_the_stated_interval_of_memory_is_that_of_the_record() -> None:
    held = of_memory(PRICED[AS_IT_RAN])
    assert held is not None and held.coverage >= 0.85
    for name in ("low", "middle", "high"):
        assert getattr(held.residual, name) == pytest.approx(
            getattr(intervals.MEMORY, name), abs=POINT
        )


def test_the_record_is_what_the_model_predicts() -> None:
    """A row of each group, priced again in every way, is within one point of its line."""
    lines = {
        (how, group.name, s.label): s
        for how, groups in PRICED.items()
        for group in groups
        for s in group.samples
    }
    with SAMPLED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 10
    for row in rows:
        run = checked(row, SAMPLED, 0)
        for how, less in (
            (AS_IT_RAN, row),
            (NO_PROFILE, unseeing(row, run.group, PROFILE)),
            (NO_KERNELS, {**row, UNFITTED: KERNELS}),
        ):
            again = sample(less, run, predict)
            assert isinstance(again, Sample) and again.predicted and again.measured
            line = lines.get((how, run.group, again.label.partition(":")[0]))
            if line is None and how != AS_IT_RAN:
                continue
            assert line is not None and line.predicted
            told = line.predicted / again.measured
            assert again.predicted / again.measured == pytest.approx(told, abs=POINT), row["id"]


def test_a_record_keeps_what_tables_need(tmp_path: Path) -> None:
    one = Sample(
        label="a-1 GPT: 8 GPUs",
        measured=2.0,
        predicted=1.5,
        memory=3e9,
        told_memory=2e9,
        was_oom=False,
        told_oom=True,
        device="H100",
        scale={"devices": 8.0},
    )
    write_record(tmp_path / "r.csv", {AS_IT_RAN: [Group(name="g", samples=(one,))]})
    (group,) = read_record(tmp_path / "r.csv")[AS_IT_RAN]
    (again,) = group.samples
    assert (again.label, again.device, again.scale["devices"]) == ("a-1 GPT", "H100", 8.0)
    assert (again.measured, again.predicted, again.memory, again.told_memory) == (
        one.measured,
        one.predicted,
        one.memory,
        one.told_memory,
    )
    assert (again.was_oom, again.told_oom, again.kind) == (False, True, one.kind)
