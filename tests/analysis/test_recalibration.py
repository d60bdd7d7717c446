"""A cluster scaled to a profile: what deviates moves the predicted step to the measured one, what
was not measured stays.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.analysis.measurements.recalibration import Recalibrated, links_of, recalibrate
from autopar.analysis.program.step_parts import ARITHMETIC, STREAMS, Stepping, stepping_of
from autopar.cli import run
from autopar.costmodel import Cluster, dump, load_cluster
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan, model_of_plan
from autopar.runtime.launch import run_ranks
from autopar.sharding.analysis import analyse
from tests.runtime.deep import STAGED, Deep

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
    """Two products, large ones unless another width is said, and a loss."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


@functools.cache
def planned(micro_batches: int = 1, cluster: str = "local-cpu") -> tuple[Plan, Graph, Cluster]:
    inputs = (torch.ones(512, 512),)
    plan = autopar.plan(
        Net(), inputs, devices=2, cluster=cluster, scheme="zero2", micro_batches=micro_batches
    )
    return plan, model_of_plan(Net(), plan, inputs).graph, cluster_of_plan(plan)


@functools.cache
def small() -> tuple[Plan, Graph, Cluster]:
    """A plan of operators that take little more than to be started."""
    inputs = (torch.ones(64, 64),)
    plan = autopar.plan(Net(64), inputs, devices=2, cluster="local-cpu", scheme="zero2")
    return plan, model_of_plan(Net(64), plan, inputs).graph, cluster_of_plan(plan)


def stepping(step: tuple[Plan, Graph, Cluster]) -> Stepping:
    return stepping_of(step[0], analyse(step[1], train=True))


def profile(
    step: tuple[Plan, Graph, Cluster], *, whole: float = 0.0, **slower: float
) -> dict[str, Any]:
    """The rows of a profile in which each part takes so many times what is predicted; parts of
    factor 0 are not measured, nor is the `whole`.
    """
    parts = stepping(step)
    cluster = step[2]
    before = parts.seconds(cluster)
    computed = parts.computed(cluster)
    sent = sum(parts.collectives(cluster).values())
    assert before == pytest.approx(step[0].predicted.step)
    kinds = {
        "products": computed[ARITHMETIC] * slower.get("products", 0.0),
        STREAMS[0]: computed[STREAMS] * slower.get("streams", 0.0),
    }
    row = {"part": "step", "measured": whole * before, "predicted": before, "unit": "s"}
    shares = {"gloo:all_reduce": 0.75, "gloo:all_gather": 0.25} if "links" in slower else {}
    events = {name: share * sent * slower["links"] for name, share in shares.items()}
    return {"kinds": kinds, "collectives": events, "parts": [row], "expected": (computed, before)}


def without_launches(step: tuple[Plan, Graph, Cluster]) -> tuple[Plan, Graph, Cluster]:
    """The same on a cluster where an operator costs nothing by itself."""
    plan, graph, cluster = step
    free = replace(cluster, device=replace(cluster.device, launch=0.0))
    seconds = stepping((plan, graph, free)).seconds(free)
    return (
        plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"step": seconds})}),
        graph,
        free,
    )


def figures(recalibrated: Recalibrated) -> dict[str, float]:
    return {row.figure: row.after / row.before for row in recalibrated.scaled}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_as_predicted_stays(micro_batches: int) -> None:
    step = planned(micro_batches)
    recalibrated = recalibrate(
        profile(step, products=1.0, streams=1.0, links=1.0, whole=1.0), *step
    )
    assert list(figures(recalibrated).values()) == pytest.approx(
        [1.0] * len(recalibrated.scaled)
    ) and recalibrated.after == pytest.approx(recalibrated.before)


def test_micro_batches_compute_as_much_together() -> None:
    one, two = (profile(planned(count))["expected"][0][ARITHMETIC] for count in (1, 2))
    assert two == pytest.approx(one, rel=0.05)


def test_calibrated_curves_follow_their_level() -> None:
    plan, graph, cluster = planned()
    curve = Curve(alpha=1e-3, beta=1e-9, limit=1e5, beta_above=2e-9)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    curves = replace(
        cluster,
        measured=tuple(
            Measured(kind=kind, level="loopback", group=2, curve=curve) for kind in kinds
        ),
    )
    parts = stepping((plan, graph, curves))
    sent = sum(parts.collectives(curves).values())
    given = profile(planned(), links=1.0) | {
        "collectives": {"gloo:all_reduce": sent, "gloo:all_gather": sent}
    }
    recalibrated = recalibrate(given, plan, graph, curves)
    assert {entry.curve for entry in recalibrated.cluster.measured} == {
        Curve(alpha=2e-3, beta=2e-9, limit=1e5, beta_above=4e-9)
    }
    assert sum(parts.collectives(recalibrated.cluster).values()) == pytest.approx(2 * sent)


def test_slower_products() -> None:
    step = without_launches(planned())
    given = profile(step, products=2.0)
    computed, before = given["expected"]
    recalibrated = recalibrate(given, *step)
    assert figures(recalibrated) == {"device.peak.float32": pytest.approx(0.5)}
    assert recalibrated.after == pytest.approx(before + computed[ARITHMETIC])
    assert replace(recalibrated.cluster, device=step[2].device, sources=step[2].sources) == step[2]
    said = recalibrated.cluster.sources["device.peak.float32"]
    assert said.kind == "measured" and said.text.startswith(
        "measured: a profile of a run, in which products took "
    )
    assert said.text.endswith("were predicted; 25.0 GFLOP/s before")


def test_slower_memory() -> None:
    step = without_launches(planned())
    given = profile(step, streams=4.0)
    recalibrated = recalibrate(given, *step)
    assert figures(recalibrated) == {"device.memory_bandwidth": pytest.approx(0.25)}
    assert recalibrated.after == pytest.approx(
        recalibrated.before + 3 * given["expected"][0][STREAMS], rel=0.02
    )


@pytest.mark.parametrize(
    "slower", [{"products": 2.0}, {"streams": 4.0}, {"products": 0.5, "streams": 1.5}]
)
def test_rates_and_launches_together_make_what_was_measured(slower: dict[str, float]) -> None:
    """Where both take part in it, launches, which are known less well, change more than rates."""
    step = small()
    given = profile(step, **slower)
    parts = stepping(step)
    actual = recalibrate(given, *step)
    after = parts.computed(actual.cluster)
    before = given["expected"][0]
    if "streams" in slower:
        assert after[STREAMS] == pytest.approx(slower["streams"] * before[STREAMS], rel=1e-3)
    if (
        "products" in slower
    ):  # the small ones wait for their operands, whatever the rate of arithmetic
        wanted = slower["products"] * before[ARITHMETIC]
        assert abs(after[ARITHMETIC] - wanted) < abs(before[ARITHMETIC] - wanted)
    changed = figures(actual)
    launch = abs(math.log(changed.pop("device.launch")))
    assert launch > 0 and all(abs(math.log(factor)) < launch for factor in changed.values())


@pytest.mark.parametrize("whole", [1.5, 4.0])
def test_what_no_group_holds_is_the_hosts(whole: float) -> None:
    """Python between the operators of a small model: the step takes what was measured, rates are
    what they were.
    """
    step = small()
    recalibrated = recalibrate(
        profile(step, products=1.0, streams=1.0, links=1.0, whole=whole), *step
    )
    changed = figures(recalibrated)
    assert (
        recalibrated.after == pytest.approx(whole * recalibrated.before, rel=1e-4)
        and changed.pop("device.launch") > 2
    )
    assert list(changed.values()) == pytest.approx([1.0] * len(changed))
    assert "all that Python does" in recalibrated.cluster.sources["device.launch"].text
    beyond = recalibrate(profile(step, products=1.0, streams=1.0, links=1.0, whole=1e6), *step)
    assert figures(beyond)["device.launch"] == pytest.approx(100.0)


def test_launches_stay_where_the_host_runs_ahead() -> None:
    plan = autopar.plan(
        Net(), (torch.ones(512, 512),), devices=2, cluster="dgx-a100", scheme="zero2"
    )
    step = plan, model_of_plan(Net(), plan, (torch.ones(512, 512),)).graph, cluster_of_plan(plan)
    recalibrated = recalibrate(profile(step, products=2.0, streams=2.0, whole=8.0), *step)
    assert "device.launch" not in figures(recalibrated) and len(recalibrated.scaled) >= 2


def test_a_slower_link() -> None:
    step = planned()
    given = profile(step, links=3.0)
    recalibrated = recalibrate(given, *step)
    assert figures(recalibrated) == {
        "loopback.bandwidth": pytest.approx(1 / 3),
        "loopback.latency": pytest.approx(3.0),
    }
    micro = stepping(step)
    before = step[0].predicted
    # More, or less, is hidden.
    assert recalibrated.after == pytest.approx(
        before.step + 2 * (before.communication - before.overlapped), rel=0.2
    )
    slow, usual = (
        sum(micro.collectives(cluster).values()) for cluster in (recalibrated.cluster, step[2])
    )
    assert slow == pytest.approx(3 * usual, rel=0.01)
    assert load_dumped(recalibrated.cluster) == recalibrated.cluster


def load_dumped(cluster: Cluster) -> Cluster:
    from autopar.costmodel.cluster.reading import parse_cluster

    return parse_cluster(dump(cluster), "here", as_yaml=False)


def test_kinds_on_several_levels_tell_of_none() -> None:
    predicted = {
        ("all_reduce", "nic"): 1.0,
        ("all_gather", "nvlink"): 2.0,
        ("reduce_scatter", "nvlink"): 2.0,
        ("broadcast", "nic"): 9.0,
    }
    events = {
        "ncclDevKernel_AllGather_RING_LL": 4.0,
        "ncclDevKernel_ReduceScatter_f32": 2.0,
        "ncclDevKernel_AllReduce_f32": 0.5,
    }
    actual = links_of(predicted, events, "nccl")
    assert {level: (group.predicted, group.measured) for level, group in actual.items()} == {
        "nic": (1.0, 0.5),
        "nvlink": (4.0, 6.0),
    }
    # Gloo sums by all-reduces what is scattered then: they are on both levels, and only gathers
    # tell.
    told = links_of(predicted, {"gloo:all_gather": 4.0, "gloo:all_reduce": 2.5}, "gloo")
    assert {level: (group.predicted, group.measured) for level, group in told.items()} == {
        "nvlink": (2.0, 4.0)
    }
    assert not links_of({("all_reduce", "nvlink:8+nic:2"): 1.0}, {"nccl:all_reduce": 2.0}, "nccl")


@pytest.mark.parametrize(
    ("slower", "said"),
    [
        ({"products": 300.0}, r"device.peak.float32 would be scaled by 0.0\d+: products took"),
        (
            {"products": 1.0, "links": 1 / 21},
            r"loopback.bandwidth would be scaled by 21: collectives on loopback",
        ),
        (
            {"streams": 300.0},
            r"device.memory_bandwidth would be scaled by 0.0\d+: elementwise and others took",
        ),
        ({}, "measured nothing that the plan predicts"),
    ],
)
def test_refusals(slower: dict[str, float], said: str) -> None:
    step = planned()
    with pytest.raises(UsageError, match=said):
        recalibrate(profile(step, **slower), *step)


@pytest.mark.parametrize("kind", STAGED)
def test_stages_together(kind: str) -> None:
    """A profile of each stage: what they take together is compared with the model on the mesh of
    one.
    """
    inputs = (torch.ones(256, 256),)
    plan = autopar.plan(Deep(256), inputs, cluster="local-cpu", **STAGED[kind])
    step = plan, model_of_plan(Deep(256), plan, inputs).graph, cluster_of_plan(plan)
    assert len(plan.stages) == 4 if kind == "interleaved" else 2
    links = {"links": 3.0} if kind == "data" else {}
    one = profile(step, products=2.0, streams=2.0, **links)
    halves = {
        part: {name: seconds / 2 for name, seconds in one[part].items()}
        for part in ("kinds", "collectives")
    }
    recalibrated = recalibrate({**one, "stages": [{**one, **halves}] * 2}, *step)
    after = stepping(step).computed(recalibrated.cluster)
    before = one["expected"][0]
    assert all(after[names] == pytest.approx(2 * before[names], rel=1e-3) for names in before)
    assert 1.5 * recalibrated.before < recalibrated.after < 2.5 * recalibrated.before
    assert ("loopback.bandwidth" in figures(recalibrated)) == (kind == "data")
    with pytest.raises(UsageError, match="the profile is of one stage"):
        recalibrate(one, *step)


def test_pools_are_refused() -> None:
    plan, graph, cluster = planned()
    with pytest.raises(UsageError, match="one kind of the devices of 'local-cpu'"):
        recalibrate({}, plan, graph, replace(cluster, joined=(cluster, cluster)))


def _profiled() -> tuple[str, list[str]]:
    plan, _, _ = planned()
    module = autopar.parallelize(Net(), plan)
    optimizer = torch.optim.AdamW(module.parameters())
    module.train_step(torch.ones(512, 512), optimizer)
    with autopar.profile(module) as profiled:
        module.train_step(torch.ones(512, 512), optimizer)
    # Whatever this machine is now: the form of the answer, not its figures.
    profiled.kinds = dict.fromkeys(profiled.kinds, 0.0) | {"products": 0.01}
    profiled.collectives = dict.fromkeys(profiled.collectives, 0.01 / len(profiled.collectives))
    return dump(autopar.recalibrated(profiled).cluster), sorted(profiled.collectives)


def test_in_python() -> None:
    planned()
    (text, events), _ = run_ranks(_profiled, 2)
    assert (
        "measured: a profile of a run" in text
        and json.loads(text)["device"]["peak"]["float32"]["value"] > 0
    )
    assert events and all(name.startswith("gloo:") for name in events)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recalibrated_model.py").write_text(MODEL, encoding="utf-8")
    usual = load_cluster("local-cpu")
    device = replace(usual.device, peak={"float32": 5e10})
    near = replace(
        usual,
        name="near",
        device=device,
        levels=(replace(usual.levels[0], latency=1e-3, bandwidth=2e8),),
    )
    (tmp_path / "near.json").write_text(dump(near), encoding="utf-8")
    ask = ["plan", "recalibrated_model:net", "--devices", "2", "--scheme", "zero2", "--quiet"]
    run([*ask, "--cluster", "near.json", "-o", "plan.json"])
    own = ["run", "plan.json", "--model", "recalibrated_model:net", "--steps", "4"]
    full = [*own, "--profile", "trace.json", "--recalibrate", "here.json", "--cluster", "near.json"]
    run(full)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Scaled by the profile" in said
        and "loopback.bandwidth" in said
        and "with the new file" in said
    )
    here = load_cluster("here.json")
    assert here.name == "here" and here.sources["loopback.bandwidth"].text.startswith(
        "measured: a profile of a run"
    )
    assert (
        here.levels[0].bandwidth != near.levels[0].bandwidth
        and here.device.launch != near.device.launch
    )
    run([*ask, "--cluster", "here.json", "-o", "again.json"])
    assert Plan.load("again.json").cluster == "here"
    run([*full, "--json"])
    told = json.loads(capsys.readouterr().out)["recalibrated"]
    assert (
        Plan.load("plan.json").predicted.step == pytest.approx(told["step"]["before"])
        and told["scaled"]
    )
    for wrong, why in (
        ([*own, "--recalibrate", "x.json"], "what --profile measures"),
        ([*full[:-2]], "'near' is no preset"),
        ([*own, "--profile", "t.json", "--recalibrate", "x.yaml"], "ends in .json"),
        ([*own, "--cluster", "near.json"], "give --recalibrate"),
        (
            [*own, "--profile", "t.json", "--recalibrate", "near.json", "--cluster", "near.json"],
            "near.json",
        ),
    ):
        with pytest.raises(UsageError, match=why):
            run(wrong)
