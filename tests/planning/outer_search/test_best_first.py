"""The outer search: what it finds is no worse than any point of its space that is pinned, for
clusters of every kind.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel import Cluster, join, load_cluster
from autopar.errors import AutoparError, NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.order.schedules import in_flight
from autopar.plan import Plan
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import HEADROOM, Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.evaluator import Evaluator, Played
from autopar.planning.outer_search.incumbents import Incumbents
from autopar.planning.planner import search_plan
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import (
    Candidate,
    device_counts,
    meshes,
    micro_batch_counts,
    stage_counts,
)
from autopar.planning.space.modes import Mode
from autopar.schemes.pinning import stage_mesh
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SMALL: dict[str, Any] = {
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 2048,
    "vocab": 1024,
    "sequence": 256,
    "dropout": False,
}


def graph_of(layers: int = 6, batch: int = 16, **more: Any) -> Graph:
    return transformer(Shape(layers=layers, **{**SMALL, **more}), batch=batch).graph


def cluster_of(devices: int, preset: str = "dgx-h100") -> Cluster:
    return load_cluster(preset).sized(devices)


@pytest.mark.parametrize("devices", [7, 12, 24, 3072, 131072])
def test_every_number_of_devices_has_candidates(devices: int) -> None:
    cluster = cluster_of(devices)
    assert device_counts(devices)[0] == devices
    for stages in stage_counts(devices, 16):
        assert devices % stages == 0
        for mesh in meshes(cluster, stages):
            assert mesh.devices * stages == devices and len(mesh.axes) <= 3


@pytest.mark.parametrize(
    ("devices", "cuts", "counts"),
    [(8, 0, [1]), (8, 1, [1, 2]), (12, 2, [1, 2, 3]), (6, 16, [1, 2, 3, 6])],
)
def test_a_model_has_one_stage_more_than_it_is_cut(
    devices: int, cuts: int, counts: list[int]
) -> None:
    assert stage_counts(devices, cuts) == counts


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 60e6, pytest.param(100e6, marks=pytest.mark.ci)])
def test_no_pinned_point_is_better(memory: float | None) -> None:
    graph = graph_of()
    cluster = cluster_of(4)
    request = Request(cluster=cluster, memory=memory)
    best = search_plan(graph, request)
    assert best.predicted.memory <= (memory or np.inf)
    for stages, count, zero, recompute in itertools.product(
        [1, 2, 4], [1, 4, 16], [1, 3], ["none", "full"]
    ):
        if count < stages:
            continue
        pinned = replace(
            request, stages=stages, micro_batches=count, zero=zero, recompute=recompute
        )
        try:
            other = search_plan(graph, pinned)
        except NoPlanFits:
            continue
        assert (
            other.schedule.micro_batches == count
            and max(len(other.stages), 1) == stages * other.schedule.interleave
        )
        assert best.predicted.step <= other.predicted.step * (1 + 5e-3), (
            stages,
            count,
            zero,
            recompute,
        )


def test_headroom_is_left_unless_a_limit_is_given() -> None:
    """The stored state decides here: with the headroom the same plan does not fit."""
    graph = graph_of(layers=2)
    cluster = cluster_of(1)
    device = replace(
        cluster.device,
        memory_capacity=1.02 * search_plan(graph, Request(cluster=cluster)).predicted.memory,
        reserved=0.0,
    )
    small = replace(cluster, device=device)
    assert Request(cluster=small).memory_limit == pytest.approx(
        (1 - HEADROOM) * device.usable_memory
    )
    left, full = (
        search_plan(graph, Request(cluster=small, memory=memory))
        for memory in (None, device.usable_memory)
    )
    assert left.predicted.memory <= (1 - HEADROOM) * device.usable_memory < full.predicted.memory
    assert full.predicted.step < left.predicted.step
    with pytest.raises(NoPlanFits, match=r"4% of headroom, which --memory overrules"):
        search_plan(
            graph,
            Request(
                cluster=replace(cluster, device=replace(device, memory_capacity=1e6)),
                micro_batches=1,
            ),
        )


@pytest.mark.slow
@pytest.mark.ci
def test_less_memory_is_paid_for() -> None:
    graph = graph_of(layers=8, batch=16)
    request = Request(cluster=cluster_of(2))
    free = search_plan(graph, request)
    steps = [free.predicted.step]
    for share in (0.7, 0.4):
        plan = search_plan(graph, replace(request, memory=free.predicted.memory * share))
        assert plan.predicted.memory <= free.predicted.memory * share
        steps.append(plan.predicted.step)
    assert steps == sorted(steps)


def test_stages_are_cut_where_the_work_is_even() -> None:
    """Ten layers on four stages: no stage holds more than its fair share by much more than half a
    layer.
    """
    plan = search_plan(
        graph_of(layers=10, batch=64), Request(cluster=cluster_of(4), stages=4, interleave=1)
    )
    times = [stage.forward + stage.backward for stage in plan.stages]
    assert len(times) == 4 and max(times) <= sum(times) / 4 * 1.25
    first = [stage.first for stage in plan.stages]
    assert first[0] == "embed.lookup" and first == sorted(first, key=list(plan.operators).index)


def test_stages_may_store_all_parameters_whole() -> None:
    """No pin makes a plan faster, that of ZeRO 0 least of all: what gathers hide under in stages is
    in no table.
    """
    experts = {
        "experts": 8,
        "top_k": 2,
        "gated": True,
        "bias": False,
        "norm": "rms_norm",
        "position": "rotary",
        "tied": False,
    }
    wide = {
        "hidden": 4096,
        "heads": 32,
        "ffn": 14336,
        "expert_ffn": 14336,
        "vocab": 32000,
        "sequence": 4096,
    }
    graph = graph_of(layers=16, batch=32, **wide, **experts)
    request = Request(cluster=cluster_of(16), stages=2, micro_batches=4)
    free, whole = (
        search_plan(graph, one).predicted.step for one in (request, replace(request, zero=0))
    )
    assert free <= 1.001 * whole


def test_a_heavy_end_makes_its_stage_shorter() -> None:
    """A vocabulary that weighs as much as several layers moves the cut of the last stage."""
    request = Request(cluster=cluster_of(2), stages=2, interleave=1, micro_batches=8)
    light, heavy = (search_plan(graph_of(layers=8, vocab=vocab), request) for vocab in (512, 65536))
    names = list(light.operators)
    assert names.index(heavy.stages[1].first) > names.index(light.stages[1].first)


def test_activations_in_flight_count() -> None:
    """Under 1F1B the first stage keeps as many micro-batches as there are stages, and the memory
    says so.
    """
    base = Request(
        cluster=cluster_of(4), stages=4, interleave=1, micro_batches=16, zero=1, recompute="none"
    )
    one, gpipe = (
        search_plan(graph_of(layers=8), replace(base, schedule=name)) for name in ("1f1b", "gpipe")
    )
    assert gpipe.predicted.memory > one.predicted.memory
    kept = [in_flight("1f1b", stage, 4, 16) for stage in range(4)]
    assert kept == sorted(kept, reverse=True) and one.stages[1].memory > one.stages[2].memory


@pytest.mark.parametrize(
    ("devices", "uses"),
    [
        (7, {4, 5, 6, 7}),
        *(
            pytest.param(*row, marks=(pytest.mark.slow, pytest.mark.ci))
            for row in ((12, {8, 12}), (24, {8, 16, 24}))
        ),
    ],
)
def test_odd_numbers_of_devices(devices: int, uses: set[int]) -> None:
    plan = search_plan(graph_of(), Request(cluster=cluster_of(devices)))
    assert plan.devices in uses and plan.devices + plan.unused == devices


def test_devices_are_left_idle_where_that_is_faster() -> None:
    """Nothing divides by five: four devices are faster than one that computes for five."""
    graph = graph_of(layers=1, batch=16)
    plan = search_plan(graph, Request(cluster=cluster_of(5)))
    assert plan.devices == 4 and plan.unused == 1
    forced = search_plan(graph, Request(cluster=cluster_of(5), fewer=False, stages=1))
    assert plan.predicted.step < forced.predicted.step


def bound_of(plan: Plan) -> float:
    """Seconds that a plan says none undercuts."""
    assert plan.provenance.gap is not None
    return plan.predicted.step / (1 + plan.provenance.gap)


def test_two_kinds_of_devices() -> None:
    """The faster devices get more layers, and both together beat either."""
    between = replace(load_cluster("dgx-h100").levels[-1], name="between")
    pools = [cluster_of(2, "dgx-a100"), cluster_of(2)]
    graph = graph_of(layers=12, batch=64, sequence=1024, hidden=1024, ffn=4096)
    plan = search_plan(graph, Request(cluster=join("mixed", pools, between=between)))
    alone = [search_plan(graph, Request(cluster=pool)) for pool in pools]
    # The bounds of both kinds as rates add up to that of all.
    assert 1 / bound_of(plan) == pytest.approx(sum(1 / bound_of(one) for one in alone), rel=1e-9)
    assert plan.predicted.step < min(one.predicted.step for one in alone)
    assert {stage.cluster for stage in plan.stages} == {"dgx-a100", "dgx-h100"}
    names = list(plan.operators)
    edges = [*(names.index(stage.first) for stage in plan.stages), len(names)]
    held = {stage.cluster: 0 for stage in plan.stages}
    for stage, start, stop in zip(plan.stages, edges, edges[1:], strict=False):
        held[stage.cluster] += stop - start
    assert held["dgx-h100"] > held["dgx-a100"]


def test_recompute_is_chosen_when_nothing_else_fits() -> None:
    graph = graph_of(layers=8, batch=8, sequence=2048)
    request = Request(cluster=cluster_of(1), micro_batches=8)
    none, full = (
        search_plan(graph, replace(request, memory=1e12, recompute=mode))
        for mode in ("none", "full")
    )
    assert (
        full.predicted.memory < 0.8 * none.predicted.memory
        and full.predicted.step > none.predicted.step
    )
    assert len(full.schedule.recompute) == 8 and not none.schedule.recompute
    between = 0.5 * (full.predicted.memory + none.predicted.memory)
    plan = search_plan(graph, replace(request, memory=between))
    assert plan.schedule.recompute and plan.predicted.memory <= between


@pytest.mark.parametrize(("sequence", "batch"), [(256, 2), (1024, 4)])
def test_a_program_of_less_than_its_tables_add_up_to_is_found(sequence: int, batch: int) -> None:
    """Tables add activations and gradients up, of which one micro-batch holds the larger alone."""
    graph = graph_of(layers=4, vocab=64, sequence=sequence, batch=batch)
    request = Request(cluster=cluster_of(1), offload="none", stages=1, micro_batches=1)
    ample = search_plan(graph, request).predicted
    tight = search_plan(graph, replace(request, memory=1.002 * ample.memory)).predicted
    assert tight.step == ample.step


def test_a_case_that_surely_does_not_fit_is_solved_where_nothing_else_fits() -> None:
    """The error names bytes that would do, not only a bound of them."""
    graph = graph_of(layers=8, batch=8, sequence=2048)
    request = Request(
        cluster=cluster_of(1), offload="none", stages=1, micro_batches=1, recompute="none"
    )
    needed = search_plan(graph, request).predicted.memory
    search = BestFirst(FoldedModel(graph, train=True), replace(request, memory=0.3 * needed))
    search.run()
    assert search.misfits and not search.incumbents
    assert not any(misfit.bounded for misfit in search.misfits)
    with pytest.raises(NoPlanFits) as error:
        search_plan(graph, replace(request, memory=0.3 * needed))
    assert search_plan(graph, replace(request, memory=error.value.minimum)).predicted.memory


def test_slower_programs_do_not_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, what promises to be faster is looked at."""
    search = BestFirst(FoldedModel(graph_of(layers=4), train=True), Request(cluster=cluster_of(8)))
    play = Evaluator.play
    tried: list[Candidate] = []

    def first_alone(self: Evaluator, solved: Solved, below: float = math.inf) -> list[Played]:
        tried.append(solved.candidate)
        return [] if search.incumbents else play(self, solved, below)

    slow = property(lambda self: 1.0 if self.played else math.inf)
    monkeypatch.setattr(Evaluator, "play", first_alone)
    monkeypatch.setattr(Incumbents, "best", slow)
    search.find()
    assert search.incumbents and len(set(tried)) > 16
    assert not search.queue or search.queue.least >= search.incumbents.enough


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"stages": 3}, "3 stages"),
        ({"micro_batches": 5}, "5"),
        ({"recompute": "some"}, "none, selective, full"),
        ({"zero": 4}, "0, 1, 2, 3"),
        ({"schedule": "2f2b"}, "1f1b"),
    ],
)
def test_impossible_pins_say_why(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        search_plan(graph_of(), Request(cluster=cluster_of(4), **pins))


@pytest.mark.parametrize(
    ("batch", "count", "stages"), [(12, 6, None), (96, 12, 1), (96, 48, 2), (8, 2, 4)]
)
def test_a_pinned_number_of_micro_batches_need_not_be_one_that_is_tried(
    batch: int, count: int, stages: int | None
) -> None:
    plan = search_plan(
        graph_of(batch=batch), Request(cluster=cluster_of(4), micro_batches=count, stages=stages)
    )
    assert plan.schedule.micro_batches == count


def test_a_pinned_schedule_leaves_only_what_it_can_run() -> None:
    """Interleaved stages run a multiple of their number of micro-batches."""
    plan = search_plan(
        graph_of(batch=12), Request(cluster=cluster_of(4), schedule="interleaved", stages=4)
    )
    assert plan.schedule.pipeline == "interleaved" and plan.schedule.micro_batches % 4 == 0
    with pytest.raises(UsageError, match="3"):
        search_plan(
            graph_of(batch=12),
            Request(cluster=cluster_of(4), schedule="interleaved", stages=4, micro_batches=3),
        )


def test_pins_that_no_pool_can_meet_alone_are_met_by_all_together() -> None:
    between = load_cluster("dgx-h100").levels[-1]
    mixed = join(
        "mixed",
        [cluster_of(2, "dgx-a100"), cluster_of(2)],
        between=replace(between, name="between"),
    )
    assert len(search_plan(graph_of(), Request(cluster=mixed, stages=3, interleave=1)).stages) == 3
    assert (
        len(search_plan(graph_of(), Request(cluster=cluster_of(7), stages=3, interleave=1)).stages)
        == 3
    )


def test_an_interrupt_in_the_second_pool_leaves_the_plan_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between = replace(load_cluster("dgx-h100").levels[-1], name="between")
    mixed = join("mixed", [cluster_of(2, "dgx-a100"), cluster_of(2)], between=between)
    run = BestFirst.run

    def interrupted(self: BestFirst, progress: Any = None) -> Any:
        if self.request.cluster.name == "dgx-h100":
            raise KeyboardInterrupt
        return run(self, progress)

    monkeypatch.setattr(BestFirst, "run", interrupted)
    plan = search_plan(graph_of(), Request(cluster=mixed))
    assert (
        not plan.provenance.complete
        and plan.provenance.lower_bound == 0.0
        and plan.provenance.gap is None
    )


def test_micro_batches_grow_by_strides() -> None:
    for batch, stages in itertools.product([1, 6, 64, 1536], [1, 4, 48]):
        actual = micro_batch_counts(batch, stages)
        assert actual == sorted(set(actual)) and all(batch % count == 0 for count in actual)


def test_an_interrupt_leaves_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after a few candidates: the plan is valid, says that it is not complete,
    and its gap counts what was left.
    """
    graph = graph_of()
    request = Request(cluster=cluster_of(8))
    complete = search_plan(graph, request)
    promise = Evaluator.promise
    calls: list[Case] = []

    def interrupted(
        self: Evaluator, case: Case, below: float = math.inf, *, bound: Solved | None = None
    ) -> Solved | None:
        calls.append(case)
        if played:
            raise KeyboardInterrupt
        return promise(self, case, below, bound=bound)

    play = Evaluator.play
    played: list[Solved] = []

    def noted(self: Evaluator, solved: Solved, below: float = math.inf) -> list[Played]:
        result = play(self, solved, below)
        played.append(solved)
        return result

    monkeypatch.setattr(Evaluator, "promise", interrupted)
    monkeypatch.setattr(Evaluator, "play", noted)
    plan = search_plan(graph, request)
    assert played and not plan.provenance.complete and complete.provenance.complete
    assert plan.predicted.step >= complete.predicted.step * (1 - 1e-9)
    assert (
        0 < plan.provenance.lower_bound <= complete.predicted.step
        and plan.provenance.gap is not None
    )
    with pytest.raises(KeyboardInterrupt):
        search_plan(graph, request)


PROGRAM = """
from autopar.costmodel import load_cluster
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from autopar.planning.planner import search_plan
from autopar.planning.model.request import HEADROOM, Request
shape = Shape(
    layers=6, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=1024, sequence=256, dropout=False
)
import sys
request = Request(cluster=load_cluster("dgx-h100").sized(4))
sys.stdout.write(search_plan(transformer(shape, batch=16).graph, request).to_json())
"""


def test_the_same_plan_byte_for_byte() -> None:
    request = Request(cluster=cluster_of(4))
    texts = {search_plan(graph_of(), request).to_json() for _ in range(3)}
    for seed in ("1", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed}
        texts.add(
            subprocess.run(
                [sys.executable, "-c", PROGRAM],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout
        )
    assert len(texts) == 1


def test_errors_are_of_the_project() -> None:
    with pytest.raises(AutoparError):
        Request(cluster=cluster_of(4), stages=0)


@pytest.mark.slow
@pytest.mark.ci
def test_two_models_are_planned_at_once_in_threads() -> None:
    """Plans share caches of orders, rules and prices and the collector's switch, none of which is
    one thread's own.
    """
    asked = [
        (graph_of(), Request(cluster=cluster_of(4))),
        (graph_of(layers=4, hidden=256, ffn=1024), Request(cluster=cluster_of(8))),
    ]
    alone = [search_plan(*one).to_json() for one in asked]
    with ThreadPoolExecutor(max_workers=4) as pool:
        together = [plan.to_json() for plan in pool.map(lambda one: search_plan(*one), asked * 2)]
    assert together == alone * 2 and gc.isenabled()


@pytest.mark.parametrize(
    ("mode", "other", "repeats"),
    [
        ((1, "full"), (1, "none"), True),
        ((3, "full"), (1, "selective"), True),
        ((1, "full"), (3, "selective"), False),
        ((3, "none"), (1, "selective"), False),
        ((0, "full"), (0, "none"), True),
        ((1, "none"), (0, "none"), False),
    ],
)
def test_a_mode_that_does_more_is_no_faster(
    mode: tuple[int, str], other: tuple[int, str], repeats: bool
) -> None:
    one, another = (Mode(zero=zero, recompute=recompute) for zero, recompute in (mode, other))
    assert one.repeats(another) == repeats


def test_a_mode_that_fits_does_not_keep_another_kind_out() -> None:
    """ZeRO 3 with some recompute fits nine tenths of the memory, but ZeRO 1 with full recompute is
    faster.
    """
    shape = Shape(
        layers=6,
        hidden=1024,
        heads=16,
        kv_heads=4,
        ffn=2816,
        vocab=32000,
        sequence=2048,
        gated=True,
        tied=False,
        bias=False,
        dropout=False,
        norm="rms_norm",
        position="rotary",
    )
    graph = transformer(shape, batch=8).graph
    cluster = load_cluster("dgx-h100").sized(8)
    free = Request(
        cluster=cluster, stages=1, micro_batches=1, mesh=stage_mesh(cluster, (8,)), memory=1e15
    )
    needed = search_plan(graph, free).predicted.memory
    more, less = (
        search_plan(graph, replace(free, memory=share * needed)).predicted.step
        for share in (0.9, 0.8)
    )
    assert more <= 1.005 * less
