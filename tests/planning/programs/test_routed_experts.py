"""Seconds and bytes of plans of experts under a stated routing."""

from __future__ import annotations

import functools
import json
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.costmodel import load_cluster
from autopar.costmodel.device.imbalance import worst
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.request import WITHOUT_LIMIT
from autopar.report.tables import summary_lines
from tests.planning.model.test_recompute import MODELS


@functools.cache
def loaded(model: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        return load_any(f"hf:{folder}", ModelOptions(batch=64, dims={"sequence": 512}))


def planned(model: str = "experts", **options: Any) -> Plan:
    asked: dict[str, Any] = {"devices": 4, "scheme": "expert 4", **options}
    return plan_loaded(loaded(model), cluster="dgx-h100", **asked).plan


def counts(tmp_path: Path, rows: Any) -> Path:
    text = json.dumps({"counts": rows})
    # One file for each content, as several are written before the first is read.
    file = tmp_path / f"{zlib.crc32(text.encode())}.json"
    file.write_text(text)
    return file


def test_the_busiest_rank_decides_seconds_and_bytes(tmp_path: Path) -> None:
    even, flat, skewed, most = (
        planned(routing=routing)
        for routing in (
            "even",
            counts(tmp_path, [7] * 8),
            counts(tmp_path, [30, *[10] * 7]),
            "worst",
        )
    )
    # A routing changes no strategy, and no price of even rows.
    for plan in (flat, skewed, most):
        assert plan.predicted == even.predicted
    results = [plan.routing for plan in (even, flat, skewed, most)]
    assert all(result is not None for result in results)
    a, b, c, d = (result for result in results if result is not None)
    assert a.imbalance == b.imbalance == 1.0 and a.step == b.step == even.predicted.step
    assert a.at == b.at == c.at == d.at and a.memory == even.predicted.memory == a.at[0]
    assert c.imbalance == pytest.approx(40 / 100 * 4) and c.counts == ((30, *[10] * 7),)
    assert d.imbalance == worst(8, 2, 4) == 4.0
    assert a.step < c.step < d.step and a.memory < c.memory < d.memory == pytest.approx(d.at[2])
    # The rows of experts are bytes in proportion.
    assert (a.at[2] - a.at[0]) == pytest.approx(3 * (a.at[1] - a.at[0]))
    assert d.most is None


def test_the_multiple_at_which_a_plan_no_longer_fits() -> None:
    roomy = planned().routing
    assert roomy is not None
    limit = 0.5 * (roomy.at[0] + roomy.at[1])
    tight = planned(memory=limit, zero=1, micro_batches=1, recompute="none").routing
    assert tight is not None and tight.most is not None
    per_multiple = tight.at[1] - tight.at[0]
    assert tight.at[0] + (tight.most - 1) * per_multiple == pytest.approx(limit)
    assert 1 < tight.most < 2


def test_a_plan_without_a_limit_is_told_what_its_device_holds() -> None:
    """Imported plans are made so where they exceed it."""
    cluster = load_cluster("dgx-h100").sized(4)
    free: dict[str, Any] = {
        "scheme": "expert 4",
        "micro_batches": 1,
        "recompute": "none",
        "memory": WITHOUT_LIMIT,
    }
    needed = plan_loaded(loaded("experts"), cluster=cluster, **free).plan.predicted.memory
    device = replace(cluster.device, memory_capacity=needed / 2, reserved=0.0)
    plan = plan_loaded(loaded("experts"), cluster=replace(cluster, device=device), **free).plan
    assert plan.routing is not None and plan.routing.most is not None
    assert plan.routing.most < 1
    assert any("even rows do not fit" in line for line in summary_lines(plan, ""))


def test_rows_of_experts_wait_for_every_micro_batch_in_flight() -> None:
    operators = loaded("experts").graph.operators
    middle = next(number for number, op in enumerate(operators) if ".layers.2." in op.name)
    # Two layers each: with a single micro-batch an uneven cut is faster.
    pipeline: dict[str, Any] = {
        "scheme": "pipeline-1f1b 2 x expert 2",
        "recompute": "none",
        "cuts": (range(middle, middle + 1),),
    }
    few, many = (planned(micro_batches=n, **pipeline) for n in (1, 4))
    assert few.routing is not None and many.routing is not None
    more = [r.at[1] - r.at[0] for r in (few.routing, many.routing)]
    # Two of four micro-batches are in flight on the first stage, and a layer of one is at work.
    assert 0.3 < more[1] / more[0] < 0.5
    worse = planned(micro_batches=4, routing="worst", **pipeline)
    assert worse.routing is not None and worse.routing.step > worse.predicted.step


def test_recomputed_rows_wait_for_one_layer_alone() -> None:
    plain, less = (planned(recompute=mode).routing for mode in ("none", "full"))
    assert plain is not None and less is not None
    assert less.at[1] - less.at[0] < 0.5 * (plain.at[1] - plain.at[0])


def test_a_plan_states_its_routing(tmp_path: Path) -> None:
    plan = planned(routing="worst")
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan and read.routing == plan.routing
    told = "\n".join(summary_lines(read, ""))
    assert "routing of experts worst case, up to 4.00 times the mean rows" in told
    assert "any routing fits" in told


def test_without_ranks_that_split_experts_nothing_is_told() -> None:
    assert planned(scheme="data 4", routing="worst").routing is None
    dense = planned("dense", scheme="data 4")
    assert dense.routing is None
    assert not any("routing" in line for line in summary_lines(dense, ""))


@pytest.mark.parametrize(
    ("model", "rows", "message"),
    [
        ("experts", [1] * 6, "counts of 6 experts; .* has 8"),
        ("experts", [[1] * 8] * 3, "counts of 3 layers; the model has 4"),
        ("experts", [9, *[1] * 7], "expert 0 has 9 of 16 rows; .* at most 1 of 2"),
        ("dense", [1] * 8, "the model has no such layer"),
    ],
)
def test_counts_of_another_model_are_refused(
    tmp_path: Path, model: str, rows: Any, message: str
) -> None:
    scheme = "data 4" if model == "dense" else "expert 4"
    with pytest.raises(UsageError, match=message):
        planned(model, scheme=scheme, routing=counts(tmp_path, rows))


def test_a_model_without_experts_has_no_worst_case() -> None:
    with pytest.raises(UsageError, match="the model has no such layer"):
        planned("dense", scheme="data 4", routing="worst")


def test_counts_may_differ_by_layer(tmp_path: Path) -> None:
    skewed = [30, *[10] * 7]
    first = planned(routing=counts(tmp_path, [skewed, *[[1] * 8] * 3])).routing
    every = planned(routing=counts(tmp_path, skewed)).routing
    assert first is not None and every is not None
    assert first.imbalance == every.imbalance
    even = planned().predicted.step
    assert (every.step - even) == pytest.approx(4 * (first.step - even))
