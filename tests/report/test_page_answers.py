"""The report's answers: who sends to whom adds up, curves and reasons say what the search says, and
measurements are read as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from report_models import MEGATRON, account, perceptrons, planned

from autopar.analysis.measurements.measured_steps import read_measured
from autopar.analysis.program.exchanges import exchanges, issued_by
from autopar.api import Planned
from autopar.cli import run
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.plan_parts import AxisSpec, CollectivePlan, StagePlan
from autopar.report.page.figures import memory

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@pytest.fixture(scope="module")
def planned_model() -> Planned:
    return planned(pins=MEGATRON)


def with_collective(plan: Plan, kind: str, sizes: tuple[int, ...], axis: int) -> Plan:
    """The plan with one collective of 1000 bytes on an axis of a mesh of these sizes."""
    mesh = tuple(AxisSpec(name=f"a{i}", size=size, level="nvlink") for i, size in enumerate(sizes))
    one = CollectivePlan(
        phase="forward", kind=kind, axis=f"a{axis}", nbytes=1000, seconds=1.0, tensor="x"
    )
    return plan.model_copy(update={"mesh": mesh, "collectives": (one,)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "axis"), [((4,), 0), ((2, 8), 0), ((2, 8), 1), ((3, 2, 40), 2), ((7, 11), 0)]
)
def test_what_is_sent_is_what_devices_send(
    planned_model: Planned, kind: str, sizes: tuple[int, ...], axis: int
) -> None:
    plan = with_collective(planned_model.plan, kind, sizes, axis)
    devices = int(np.prod(sizes))
    n = sizes[axis]
    cluster = planned_model.cluster.sized(devices)
    each = 1000.0 if kind == "send" else {"all_reduce": 2.0}.get(kind, 1.0) * 1000 * (n - 1) / n
    for given in (cluster, None):
        sent = exchanges(plan, issued_by(plan, None), given)
        assert sent.matrix.sum() == pytest.approx(devices * each)
        assert sum(sent.levels.values()) == pytest.approx(devices * each)
        assert len(sent.matrix) * sent.size >= devices and len(sent.matrix) <= 48
    assert sent.size > 1 or np.trace(sent.matrix) == 0


def test_neighbours_and_nodes(planned_model: Planned) -> None:
    """A ring of 16 in two nodes of 8 crosses twice; an all-to-all crosses for 8 of a device's 15
    peers.
    """
    cluster = planned_model.cluster.sized(16)
    ring = with_collective(planned_model.plan, "all_gather", (16,), 0)
    levels = exchanges(ring, issued_by(ring, None), cluster).levels
    assert levels["nic"] / sum(levels.values()) == pytest.approx(2 / 16)
    peers = with_collective(planned_model.plan, "all_to_all", (16,), 0)
    levels = exchanges(peers, issued_by(peers, None), cluster).levels
    assert levels["nic"] / sum(levels.values()) == pytest.approx(8 / 15)
    matrix = exchanges(ring, issued_by(ring, None), cluster).matrix
    assert all(matrix[i, (i + 1) % 16] > 0 for i in range(16)) and np.count_nonzero(matrix) == 16


def test_stages_hand_on_and_back() -> None:
    plan = planned(
        layers=4,
        mesh=(2,),
        scheme="data",
        stages=2,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        zero=0,
    ).plan
    sent = exchanges(plan.model_copy(update={"collectives": ()}), [], None)
    one = plan.stages[0].handed * 4
    assert sent.matrix.tolist() == [[0, 0, one, 0], [0, 0, 0, one], [one, 0, 0, 0], [0, one, 0, 0]]
    assert sent.levels == {"between stages": pytest.approx(4 * one)}


def test_the_account_gives_the_seconds_of_the_step(planned_model: Planned) -> None:
    issued = issued_by(planned_model.plan, account(planned_model))
    assert sum(one.seconds for one in issued) == pytest.approx(account(planned_model).communication)


def test_chunks_of_a_device_fill_it_together(planned_model: Planned) -> None:
    plan = planned(
        layers=4,
        mesh=(2,),
        scheme="data",
        stages=2,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        zero=0,
    ).plan
    chunks: tuple[StagePlan, ...] = plan.stages + plan.stages
    schedule = plan.schedule.model_copy(update={"interleave": 2, "pipeline": "interleaved"})
    table = memory(
        plan.model_copy(update={"stages": chunks, "schedule": schedule}), planned_model.cluster
    ).tables[1]
    alone = memory(plan, planned_model.cluster).tables[1]
    assert len(table.rows) == len(alone.rows) == 2
    assert table.rows[0] != alone.rows[0]


def span(name: str, start: float, seconds: float, cat: str = "kernel") -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "pid": 1,
        "tid": 1,
    }


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_traces_are_measured(tmp_path: Path) -> None:
    events = [
        span("ProfilerStep#1", 0.0, 10.0, "user_annotation"),
        span("ProfilerStep#2", 10.0, 12.0, "user_annotation"),
        span("gemm", 1.0, 4.0),
        span("gemm", 3.0, 4.0),
        span("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 6.0, 3.0),
        span("gemm", 11.0, 6.0),
        span("ncclDevKernel_AllGather_RING", 30.0, 9.0),
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "broken", "ts": "now", "dur": 1},
    ]
    read = read_measured(written(tmp_path / "trace.json", {"traceEvents": events}))
    assert (read.step, read.steps) == (11.0, 2)
    assert read.computing == pytest.approx((6 + 6) / 2) and read.exposed == pytest.approx(2 / 2)
    assert read.kinds == {"all_reduce": pytest.approx(1.5)}


def test_runs_are_measured(tmp_path: Path) -> None:
    read = read_measured(written(tmp_path / "run.json", {"seconds": 0.25, "steps": 8, "ok": True}))
    assert (read.step, read.steps, read.kinds) == (0.25, 8, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1",
        "null",
        "{}",
        '{"seconds": 0}',
        '{"seconds": NaN}',
        '{"traceEvents": 3}',
        '{"traceEvents": []}',
        "[" * 100_000,
    ],
)
def test_what_measures_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UsageError, match=r"bad\.json"):
        read_measured(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_measured(tmp_path / "absent.json")


def test_the_whole_report(tmp_path: Path) -> None:
    """Every panel by one command: schemes, reasons, curves, a measurement, another plan."""
    model, plan, other, out = (
        str(tmp_path / name) for name in ("model.onnx", "plan.json", "other.json", "report.html")
    )
    onnx.save(perceptrons(1), model)
    run(
        [
            "plan",
            model,
            "--cluster",
            "dgx-h100",
            "--devices",
            "4",
            "--quiet",
            "--no-compare",
            "-o",
            plan,
        ]
    )
    run(
        [
            "plan",
            model,
            "--cluster",
            "dgx-h100",
            "--devices",
            "2",
            "--quiet",
            "--no-compare",
            "-o",
            other,
        ]
    )
    measured = written(
        tmp_path / "run.json", {"seconds": Plan.load(plan).predicted.step * 1.5, "steps": 3}
    )
    panels = ["--compare", "--alternatives", "--sensitivity", "--measured", str(measured)]
    assert run(["report", plan, other, "--model", model, "-o", out, *panels]) == 0
    text = Path(out).read_text(encoding="utf-8")
    for words in (
        "Beside known schemes",
        "expert (the model has no experts)",
        "Why it is split so",
        "(as planned)",
        "What if",
        "Step over devices",
        "Step over batch",
        "bandwidth of nvlink",
        "Measured beside predicted",
        "1.50x",
        "Beside the other plan",
    ):
        assert words in text, words
    assert run(["report", plan, "--model", model, "-o", out]) == 0
    assert "Beside known schemes" not in Path(out).read_text(encoding="utf-8")
    for option in ("--compare", "--alternatives", "--sensitivity"):
        with pytest.raises(UsageError, match=f"{option} needs --model"):
            run(["report", plan, "-o", out, option])
