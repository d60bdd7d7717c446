"""Optimizer state in host memory as the search's choice: picked where it pays, never where memory
is enough, within the hosts' memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.step.estimate import estimate
from autopar.costmodel.step.host_offload import COPIES, host_rate
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import NoPlanFits, PlanError, UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.solve.host_memory import solve_within_hosts
from autopar.planning.space.candidates import name_axes
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.decoding import decode
from autopar.planning.tables.offload import offering_host
from autopar.planning.tables.tables import Tables
from autopar.search import CostGraph, Infeasible, Solution, solve
from autopar.sharding.analysis import analyse
from autopar.sharding.program_builder import build_program
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.planning.modules import loaded, perceptron

LLAMA_7B = Shape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    ffn=11008,
    vocab=32000,
    sequence=2048,
    gated=True,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
    tied=False,
)
SMALL: dict[str, Any] = {
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 2048,
    "vocab": 1024,
    "sequence": 256,
    "dropout": False,
}


def graph_of(layers: int = 6, batch: int = 16) -> Graph:
    return transformer(Shape(layers=layers, **SMALL), batch=batch).graph


def with_host(cluster: Cluster, **figures: float | None) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **figures))


def in_host(plan: Plan) -> list[str]:
    return [name for name, parameter in plan.parameters.items() if parameter.state == "host"]


def tables_of(devices: int, *sizes: int, rows: int = 32, **host: float) -> Tables:
    """A perceptron's tables on one axis."""
    cluster = with_host(load_cluster("dgx-h100").sized(devices), **host)
    mesh = name_axes(
        cluster, (devices,) if devices > 1 else (), (cluster.levels[0].name,) if devices > 1 else ()
    )
    analysis = analyse(loaded(perceptron(*sizes), rows, sizes[0]).graph, train=True)
    return build_tables(analysis, MeshPrices(cluster=cluster, mesh=mesh), optimizer="adamw")


# --- what is chosen ---


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_that_does_not_fit_without_it() -> None:
    """Llama-2-7B on one A100 of 40 GB: parameters and gradients are 25.1 GiB, the state as much
    again.
    """
    request = Request(cluster=load_cluster("dgx-a100").sized(1))
    graph = transformer(LLAMA_7B, batch=16).graph
    with pytest.raises(NoPlanFits):
        search_plan(graph, replace(request, offload="none"))
    plan = search_plan(graph, request)
    assert 0 < len(in_host(plan)) < len(plan.parameters)
    assert plan.predicted.memory <= request.memory_limit and plan.predicted.host_memory > 10 * 2**30
    whole = search_plan(graph, replace(request, offload="optimizer"))
    assert set(in_host(whole)) == set(whole.parameters)
    assert plan.predicted.step < whole.predicted.step


@pytest.mark.slow
@pytest.mark.ci
def test_it_is_taken_in_place_of_recomputing() -> None:
    """Llama-2-7B on four RTX 4090: with it nothing is recomputed, and the step is a tenth shorter
    or more.
    """
    request = Request(cluster=load_cluster("rtx4090").sized(4))
    graph = transformer(LLAMA_7B, batch=16).graph
    plan = search_plan(graph, request)
    without = search_plan(graph, replace(request, offload="none"))
    assert in_host(plan) and not plan.schedule.recompute
    assert not in_host(without)
    assert plan.predicted.step < 0.9 * without.predicted.step
    assert (
        plan.predicted.streamed
        < plan.predicted.update
        < without.predicted.step - plan.predicted.step
    )


@pytest.mark.parametrize(("preset", "devices", "batch"), [("dgx-h100", 8, 16), ("dgx-h100", 1, 16)])
def test_it_is_left_where_something_else_is_cheaper(preset: str, devices: int, batch: int) -> None:
    """On eight H100 there is memory enough; on one, smaller micro-batches cost less."""
    request = Request(cluster=load_cluster(preset).sized(devices))
    graph = transformer(LLAMA_7B, batch=batch).graph
    plan = search_plan(graph, request)
    assert not in_host(plan) and plan.predicted.host_memory == plan.predicted.streamed == 0
    other = search_plan(graph, replace(request, offload="none"))
    assert plan.model_copy(update={"provenance": other.provenance}).to_json() == other.to_json()


@pytest.mark.parametrize(
    "method", ["dynamic_programming", pytest.param("recursive_programming", marks=pytest.mark.slow)]
)
def test_it_is_never_chosen_where_memory_is_not_short(method: str) -> None:
    request = Request(cluster=load_cluster("dgx-h100").sized(4), search=method)
    assert not in_host(search_plan(graph_of(layers=4), request))
    assert not in_host(search_plan(graph_of(layers=4), replace(request, memory=math.inf)))


@pytest.mark.slow
@pytest.mark.ci
def test_less_memory_is_paid_for_by_the_cheaper_of_both() -> None:
    """With a slow link it costs more than the rest and is left; with a fast one it is taken; the
    plan is never slower for the choice.
    """
    graph = graph_of(layers=8)
    cluster = load_cluster("dgx-h100").sized(2)
    free = search_plan(graph, Request(cluster=cluster))
    taken = []
    for rate in (1e6, 64e9, 4e11):
        request = Request(
            cluster=with_host(cluster, host_bandwidth=rate), memory=0.4 * free.predicted.memory
        )
        plan = search_plan(graph, request)
        without = search_plan(graph, replace(request, offload="none"))
        assert plan.predicted.memory <= request.memory_limit
        # Of layouts that are so near only the best few are solved whole.
        assert plan.predicted.step <= without.predicted.step * 1.03
        taken.append(len(in_host(plan)))
    assert taken[0] == 0 < taken[-1]


def test_stages_have_it_too() -> None:
    request = Request(
        cluster=with_host(load_cluster("dgx-h100").sized(4), host_bandwidth=1e12),
        stages=4,
        micro_batches=8,
        zero=0,
    )
    free = search_plan(graph_of(layers=8), request)
    plan = search_plan(
        graph_of(layers=8), replace(request, memory=0.75 * free.predicted.memory, recompute="none")
    )
    assert in_host(plan) and plan.predicted.memory <= 0.75 * free.predicted.memory
    assert plan.predicted.host_memory > 0 and plan.predicted.update > plan.predicted.streamed > 0
    whole = search_plan(graph_of(layers=8), replace(request, offload="optimizer"))
    assert len(in_host(whole)) == len(whole.parameters)


# --- the tables ---


@pytest.mark.parametrize(("share", "worth"), [(0.95, False), (0.5, True), (0.35, True)])
def test_the_optimum_within_a_memory_limit_is_that_of_enumeration(
    share: float, worth: bool
) -> None:
    plain = tables_of(2, 64, 256, 64, host_bandwidth=1e13)
    wider = offering_host(plain, room=math.inf)
    free = solve(plain.graph)
    assert wider.graph.cost(solve(wider.graph, method="exhaustive").choices) == pytest.approx(
        free.cost
    )
    assert wider.host_of(solve(wider.graph).choices) == 0
    limit = share * free.memory
    truth = solve(wider.graph, method="exhaustive", memory_limit=limit)
    solution = solve(wider.graph, memory_limit=limit)
    assert solution.cost == pytest.approx(truth.cost, rel=1e-9) and solution.memory <= limit
    try:
        without = solve(plain.graph, method="exhaustive", memory_limit=limit).cost
    except Infeasible:
        without = math.inf
    assert (wider.host_of(truth.choices) > 0) is (truth.cost < without * (1 - 1e-9)) is worth


def test_the_choices_are_the_layouts_twice_and_the_program_costs_what_they_say() -> None:
    plain = tables_of(2, 64, 256, 64)
    wider = offering_host(plain, room=math.inf)
    only = offering_host(plain, room=math.inf, only=True)
    assert offering_host(wider, room=0.0) is wider
    choices = list(solve(plain.graph).choices)
    base = _priced(plain, choices)
    for place, variable in enumerate(plain.variables):
        if variable.what != "parameter":
            assert wider.variables[place].host is None
            continue
        size = len(variable.rows)
        assert wider.graph.sizes[place] == 2 * size and only.graph.sizes[place] == size
        moved = [c + size if v == place else c for v, c in enumerate(choices)]
        priced = _priced(wider, moved)
        bytes_ = wider.host_of(moved)
        assert priced.memory.host == bytes_ == base.memory.optimizer - priced.memory.optimizer > 0
        assert plain.graph.memory_of(choices) - wider.graph.memory_of(moved) == pytest.approx(
            bytes_
        )
        device = plain.prices.cluster.device
        copied = bytes_ / host_rate(device)
        alone = float(plain.graph.unary[place][choices[place]])
        longer = wider.graph.cost(moved) - plain.graph.cost(choices)
        assert longer == pytest.approx(max(copied - alone, 0.0) + COPIES * device.launch, rel=1e-6)
        assert priced.streamed == pytest.approx(2 * copied + COPIES * device.launch), (
            "nothing else goes in or out beside"
        )
    all_in_host = _priced(only, choices)
    assert all_in_host.memory.optimizer == 0 and all_in_host.memory.host == base.memory.optimizer


def _priced(tables: Tables, choices: Sequence[int]) -> Any:
    program = build_program(tables.analysis.graph, decode(tables, tuple(choices)))
    return estimate(program, tables.analysis, tables.prices, optimizer="adamw")


# --- the memory of the hosts ---


def within_both(tables: Tables, limit: float) -> float:
    """The least cost within the limit of the device and that of the host, by looking at every
    assignment.
    """
    best = math.inf
    graph = tables.graph
    for choices in itertools.product(*map(range, graph.sizes)):
        if graph.memory_of(choices) <= limit and tables.host_of(choices) <= tables.host_room:
            best = min(best, graph.cost(choices))
    return best


def solver(limit: float) -> Any:
    def solved(graph: CostGraph) -> Solution:
        return solve(graph, memory_limit=limit)

    return solved


@pytest.mark.parametrize("room", [0.15, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("share", [0.8, 0.9])
def test_the_hosts_memory_is_kept_to(room: float, share: float) -> None:
    """One device, where the only choice is which parameters are in host memory."""
    plain = tables_of(1, 64, 96, 48, 160, 32, 80, 64)
    state = offering_host(plain, room=math.inf, only=True)
    everything = state.host_of([0] * len(state.variables))
    wider = offering_host(plain, room=room * everything)
    limit = share * plain.graph.memory_of([0] * len(plain.variables))
    truth = within_both(wider, limit)
    if math.isinf(truth):
        with pytest.raises(Infeasible):
            solve_within_hosts(wider, solver(limit), limit)
        return
    solution = solve_within_hosts(wider, solver(limit), limit)
    assert wider.host_of(solution.choices) <= wider.host_room and solution.memory <= limit
    assert solution.lower_bound <= truth * (1 + 1e-9)
    assert truth <= solution.cost <= truth * 1.02


@pytest.mark.parametrize("room", [0.1, 0.25, 0.5])
def test_state_is_split_where_the_hosts_would_not_hold_it_whole(room: float) -> None:
    """Pinned to host memory, on two devices: whole it does not fit, split it does."""
    only = offering_host(tables_of(2, 128, 256, 128), room=math.inf, only=True)
    free = solve(only.graph)
    used = only.host_of(free.choices)
    tight = replace(only, host_room=room * used)
    truth = within_both(tight, math.inf)
    if math.isinf(truth):
        with pytest.raises(Infeasible):
            solve_within_hosts(tight, solve, math.inf)
    else:
        solution = solve_within_hosts(tight, solve, math.inf)
        assert tight.host_of(solution.choices) <= tight.host_room
        assert truth <= solution.cost <= truth * 1.02 and solution.lower_bound <= truth * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.ci)])
def test_a_plan_within_the_hosts_memory(devices: int) -> None:
    """On one device, and on stages, each with a host's memory of its own."""
    graph = transformer(LLAMA_7B, batch=16).graph
    cluster = load_cluster("rtx4090" if devices > 1 else "dgx-a100").sized(devices)
    free = search_plan(graph, Request(cluster=with_host(cluster, host_memory=None)))
    held = 0.85 * free.predicted.host_memory
    tight = search_plan(graph, Request(cluster=with_host(cluster, host_memory=held)))
    assert 0 < tight.predicted.host_memory <= held
    assert tight.predicted.step > free.predicted.step
    with pytest.raises(NoPlanFits, match=r"(and|the) 1000\.000 MiB (are there|of host memory)"):
        search_plan(
            graph,
            Request(cluster=with_host(cluster, host_memory=1000 * 2**20), offload="optimizer"),
        )


# --- what may be asked for ---


def test_it_needs_state_and_a_link() -> None:
    cluster = load_cluster("dgx-h100").sized(2)
    for request in ({"optimizer": "sgd"}, {"train": False, "optimizer": "none"}):
        with pytest.raises(UsageError, match="no optimizer keeps state"):
            Request(cluster=cluster, offload="optimizer", **request)
    with pytest.raises(UsageError, match="no host_bandwidth is given for the device CPU rank"):
        Request(cluster=load_cluster("local-cpu"), offload="optimizer")
    with pytest.raises(UsageError, match="valid are none, optimizer"):
        Request(cluster=cluster, offload="optimiser")
    local = search_plan(graph_of(), Request(cluster=load_cluster("local-cpu").sized(2)))
    small = search_plan(
        graph_of(),
        Request(cluster=load_cluster("local-cpu").sized(2), memory=0.7 * local.predicted.memory),
    )
    assert not in_host(small)


# --- the file ---


def test_the_file_keeps_it() -> None:
    graph = graph_of()
    plan = search_plan(
        graph, Request(cluster=load_cluster("dgx-h100").sized(2), offload="optimizer")
    )
    again = Plan.model_validate_json(plan.to_json())
    assert again == plan and set(in_host(again)) == set(plan.parameters)
    analysis = analyse(graph, train=True)
    assert again.assignment(analysis).host == frozenset(plan.parameters)
    data = plan.model_dump(mode="json", by_alias=True)
    for parameter in data["parameters"].values():
        del parameter["state"]
    del data["predicted"]["host_memory"], data["predicted"]["streamed"]
    old = Plan.model_validate(data)
    assert not in_host(old) and old.assignment(analysis).host == frozenset()


def test_state_of_what_is_not_trained_is_refused() -> None:
    graph = graph_of()
    plan = search_plan(
        graph, Request(cluster=load_cluster("dgx-h100").sized(2), offload="optimizer")
    )
    name = next(iter(plan.parameters))
    frozen = replace(
        graph, tensors={**graph.tensors, name: replace(graph.tensors[name], trainable=False)}
    )
    with pytest.raises(PlanError, match=f"what is not trained: '{name}'"):
        plan.assignment(analyse(frozen, train=True))


def test_a_host_that_is_too_small_is_what_the_refusal_names() -> None:
    small = with_host(load_cluster("dgx-h100").sized(2), host_memory=1e6)
    with pytest.raises(
        NoPlanFits, match=r"no plan fits the hosts on 2 devices: .* of host memory for each device"
    ):
        search_plan(graph_of(layers=2), Request(cluster=small, offload="optimizer"))
