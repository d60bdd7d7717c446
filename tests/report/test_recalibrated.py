"""A cluster scaled to a profile: what deviates moves the predicted step to the measured one, what was not measured stays."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli import run
from autopar.costmodel import Cluster, dump, load_cluster
from autopar.costmodel.cluster.measured import Curve, Measured
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.of_plan import cluster_of_plan, model_of_plan
from autopar.plan import Plan
from autopar.report.recalibrated import ARITHMETIC, STREAMS, Recalibrated, _links, _Step, recalibrate
from autopar.runtime.launch import run_ranks
from autopar.sharding.analysis import analyse
from autopar.sharding.micro_batches import split_batch

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()

def net():
    return Net(), (torch.ones(256, 256),)
"""


class Net(nn.Module):
    """Large products and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


@functools.cache
def planned(micro_batches: int = 1, cluster: str = "local-cpu") -> tuple[Plan, Graph, Cluster]:
    inputs = (torch.ones(512, 512),)
    plan = autopar.plan(Net(), inputs, devices=2, cluster=cluster, scheme="zero2", micro_batches=micro_batches)
    return plan, model_of_plan(Net(), plan, inputs).graph, cluster_of_plan(plan)


def profile(step: tuple[Plan, Graph, Cluster], **slower: float) -> dict[str, Any]:
    """What a profile says where each part takes so many times what is predicted; parts of factor 0 are not measured."""
    plan, graph, cluster = step
    analysis, count = analyse(graph, train=True), plan.schedule.micro_batches
    part = split_batch(analysis, count) if count > 1 else analysis
    parts = _Step(micro=plan.execution(analysis).micro, analysis=part, plan=plan)
    before = parts.seconds(cluster)
    computed, sent = parts.computed(cluster), sum(parts.collectives(cluster).values())
    assert computed[ARITHMETIC] + computed[STREAMS] == pytest.approx(before.forward + before.backward + before.update)
    assert sent == pytest.approx(before.communication) and before.step == pytest.approx(plan.predicted.step)
    kinds = {"products": computed[ARITHMETIC] * slower.get("products", 0.0), STREAMS[0]: computed[STREAMS] * slower.get("streams", 0.0)}
    row = {"part": "step", "measured": 1.0, "predicted": before.step, "unit": "s"}
    shares = {"gloo:all_reduce": 0.75, "gloo:all_gather": 0.25} if "links" in slower else {}
    events = {name: share * sent * slower["links"] for name, share in shares.items()}
    return {"kinds": kinds, "collectives": events, "parts": [row], "expected": (computed, before)}


def figures(found: Recalibrated) -> dict[str, float]:
    return {row.figure: row.after / row.before for row in found.scaled}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_as_predicted_stays(micro_batches: int) -> None:
    step = planned(micro_batches)
    found = recalibrate(profile(step, products=1.0, streams=1.0, links=1.0), *step)
    assert list(figures(found).values()) == pytest.approx([1.0] * 4) and found.after == pytest.approx(found.before)


def test_micro_batches_compute_as_much_together() -> None:
    one, two = (profile(planned(count))["expected"][0][ARITHMETIC] for count in (1, 2))
    assert two == pytest.approx(one, rel=0.05)


def test_calibrated_curves_follow_their_level() -> None:
    plan, graph, cluster = planned()
    curve = Curve(alpha=1e-3, beta=1e-9, limit=1e5, beta_above=2e-9)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    curves = replace(cluster, measured=tuple(Measured(kind=kind, level="loopback", group=2, curve=curve) for kind in kinds))
    parts = _Step(micro=plan.execution(analyse(graph, train=True)).micro, analysis=analyse(graph, train=True), plan=plan)
    sent = sum(parts.collectives(curves).values())
    given = profile(planned(), links=1.0) | {"collectives": {"gloo:all_reduce": sent, "gloo:all_gather": sent}}
    found = recalibrate(given, plan, graph, curves)
    assert {entry.curve for entry in found.cluster.measured} == {Curve(alpha=2e-3, beta=2e-9, limit=1e5, beta_above=4e-9)}
    assert sum(parts.collectives(found.cluster).values()) == pytest.approx(2 * sent)


def test_slower_products() -> None:
    step = planned()
    given = profile(step, products=2.0)
    computed, before = given["expected"]
    found = recalibrate(given, *step)
    assert figures(found) == {"device.peak.float32": pytest.approx(0.5)}
    assert found.after == pytest.approx(before.step + computed[ARITHMETIC], rel=0.02)  # launches stay
    assert replace(found.cluster, device=step[2].device, sources=step[2].sources) == step[2]
    said = found.cluster.sources["device.peak.float32"]
    assert said.kind == "measured" and said.text.startswith("measured: a profile of a run, in which products took ")
    assert said.text.endswith("were predicted; 25.0 GFLOP/s before")


def test_slower_memory() -> None:
    step = planned()
    given = profile(step, streams=4.0)
    found = recalibrate(given, *step)
    assert figures(found) == {"device.memory_bandwidth": pytest.approx(0.25)}
    assert found.after == pytest.approx(found.before + 3 * given["expected"][0][STREAMS], rel=0.05)


def test_a_slower_link() -> None:
    step = planned()
    given = profile(step, links=3.0)
    found = recalibrate(given, *step)
    assert figures(found) == {"loopback.bandwidth": pytest.approx(1 / 3), "loopback.latency": pytest.approx(3.0)}
    _, before = given["expected"]
    assert found.after == pytest.approx(before.step + 2 * (before.communication - before.overlapped), rel=0.2)  # more, or less, is hidden
    sent = _Step(micro=step[0].execution(analyse(step[1], train=True)).micro, analysis=analyse(step[1], train=True), plan=step[0])
    slow, usual = (sum(sent.collectives(cluster).values()) for cluster in (found.cluster, step[2]))
    assert slow == pytest.approx(3 * usual, rel=0.01)
    assert load_dumped(found.cluster) == found.cluster


def load_dumped(cluster: Cluster) -> Cluster:
    from autopar.costmodel.cluster.file import _parse

    return _parse(dump(cluster), "here", as_yaml=False)


def test_kinds_on_several_levels_tell_of_none() -> None:
    predicted = {("all_reduce", "nic"): 1.0, ("all_gather", "nvlink"): 2.0, ("reduce_scatter", "nvlink"): 2.0, ("broadcast", "nic"): 9.0}
    events = {"ncclDevKernel_AllGather_RING_LL": 4.0, "ncclDevKernel_ReduceScatter_f32": 2.0, "ncclDevKernel_AllReduce_f32": 0.5}
    found = _links(predicted, events, "nccl")
    assert {level: (group.predicted, group.measured) for level, group in found.items()} == {"nic": (1.0, 0.5), "nvlink": (4.0, 6.0)}
    # Gloo sums by all-reduces what is scattered then: they are on both levels, and only gathers tell.
    told = _links(predicted, {"gloo:all_gather": 4.0, "gloo:all_reduce": 2.5}, "gloo")
    assert {level: (group.predicted, group.measured) for level, group in told.items()} == {"nvlink": (2.0, 4.0)}
    assert not _links({("all_reduce", "nvlink:8+nic:2"): 1.0}, {"nccl:all_reduce": 2.0}, "nccl")


@pytest.mark.parametrize(
    ("slower", "said"),
    [
        ({"products": 21.0}, r"device.peak.float32 would be scaled by 0.0476: products took"),
        ({"products": 1.0, "links": 1 / 21}, r"loopback.bandwidth would be scaled by 21: collectives on loopback"),
        ({"streams": 30.0}, r"device.memory_bandwidth would be scaled by 0.0333: elementwise and others took"),
        ({}, "measured nothing that the plan predicts"),
    ],
)
def test_refusals(slower: dict[str, float], said: str) -> None:
    step = planned()
    with pytest.raises(UsageError, match=said):
        recalibrate(profile(step, **slower), *step)


def test_stages_and_pools_are_refused() -> None:
    plan, graph, cluster = planned()
    staged = autopar.plan(Net(), (torch.ones(512, 512),), devices=2, cluster="local-cpu", stages=2, micro_batches=2)
    with pytest.raises(UsageError, match="one stage of this plan"):
        recalibrate({}, staged, graph, cluster)
    with pytest.raises(UsageError, match="one kind of the devices of 'local-cpu'"):
        recalibrate({}, plan, graph, replace(cluster, joined=(cluster, cluster)))


def _profiled() -> tuple[str, list[str]]:
    plan, _, _ = planned()
    module = autopar.parallelize(Net(), plan)
    optimizer = torch.optim.AdamW(module.parameters())
    module.train_step(torch.ones(512, 512), optimizer)
    with autopar.profile(module) as found:
        module.train_step(torch.ones(512, 512), optimizer)
    # Whatever this machine is now: the form of the answer, not its figures.
    found.kinds = dict.fromkeys(found.kinds, 0.0) | {"products": 0.01}
    return dump(autopar.recalibrated(found).cluster), sorted(found.collectives)


def test_in_python() -> None:
    planned()
    (text, events), _ = run_ranks(_profiled, 2)
    assert "measured: a profile of a run" in text and json.loads(text)["device"]["peak"]["float32"]["value"] > 0
    assert events and all(name.startswith("gloo:") for name in events)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recalibrated_model.py").write_text(MODEL, encoding="utf-8")
    usual = load_cluster("local-cpu")
    device = replace(usual.device, peak={"float32": 5e10})
    near = replace(usual, name="near", device=device, levels=(replace(usual.levels[0], latency=1e-3, bandwidth=2e8),))
    (tmp_path / "near.json").write_text(dump(near), encoding="utf-8")
    ask = ["plan", "recalibrated_model:net", "--devices", "2", "--scheme", "zero2", "--quiet"]
    run([*ask, "--cluster", "near.json", "-o", "plan.json"])
    own = ["run", "plan.json", "--model", "recalibrated_model:net", "--steps", "4"]
    full = [*own, "--profile", "trace.json", "--recalibrate", "here.json", "--cluster", "near.json"]
    run(full)
    said = " ".join(capsys.readouterr().out.split())
    assert "Scaled by the profile" in said and "loopback.bandwidth" in said and "with the new file" in said
    here = load_cluster("here.json")
    assert here.name == "here" and here.sources["loopback.bandwidth"].text.startswith("measured: a profile of a run")
    assert here.levels[0].bandwidth != near.levels[0].bandwidth and here.device.launch == near.device.launch
    run([*ask, "--cluster", "here.json", "-o", "again.json"])
    assert Plan.load("again.json").cluster == "here"
    run([*full, "--json"])
    told = json.loads(capsys.readouterr().out)["recalibrated"]
    assert Plan.load("plan.json").predicted.step == pytest.approx(told["step"]["before"]) and told["scaled"]
    for wrong, why in (
        ([*own, "--recalibrate", "x.json"], "what --profile measures"), ([*full[:-2]], "'near' is no preset"),
        ([*own, "--profile", "t.json", "--recalibrate", "x.yaml"], "ends in .json"),
        ([*own, "--cluster", "near.json"], "give --recalibrate"),
        ([*own, "--profile", "t.json", "--recalibrate", "near.json", "--cluster", "near.json"], "near.json"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            run(wrong)
