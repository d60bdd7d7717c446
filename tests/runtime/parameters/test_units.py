"""Units of parameters on real ranks: gathered, let go and gathered again; gradients brought home in
every mode, flat or one by one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Chunk, Execution
from autopar.order.scheduled import scheduled
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.units import ParameterUnits
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import Kind
from autopar.sharding.program import Program, Redistribute
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import cheapest_chain
from autopar.sharding.schedule import UNIT_BYTES, Schedule
from tests.runtime.graphs import GRAPHS
from tests.runtime.helpers import (
    alone,
    flat_price,
    mesh_of,
    random_inputs,
    random_program,
    random_values,
)
from tests.runtime.nets import (
    MODES,
    Net,
    gradients_alone,
    net,
    on_this_rank,
    parameters_of,
    planned,
    require_equal,
    whole_gradients,
)

pytestmark = pytest.mark.usefixtures("strict_collectives")

Found = tuple[dict[str, Tensor | None], str]


# --- values ---


def _there_and_back(plan: Execution, module: Net, x: Tensor) -> dict[str, object]:
    """The values that a product keeps of a gathered weight over its release."""
    values = parameters_of(module)
    cut = on_this_rank(plan, module)
    units = ParameterUnits(
        plan.whole, DeviceGroups.create(plan.chunks[0].mesh), cut.engine.stored, torch.device("cpu")
    )
    (place,) = (place for place in units.unit_of if place[0] == "first.weight")
    number = units.unit_of[place]
    results: dict[str, object] = {}
    units.gather_whole(number)
    weight = units.value(place)
    results["whole"] = torch.equal(weight, values["first.weight"])
    leaf = weight.detach().requires_grad_()
    inputs = x.clone().requires_grad_()
    product = inputs @ leaf.t()
    units.release(number)
    results["bytes let go"] = weight.untyped_storage().nbytes()
    units.gather_whole(number)
    results["same tensor"] = units.value(place) is weight and torch.equal(
        weight, values["first.weight"]
    )
    results["gradient"] = torch.equal(
        torch.autograd.grad(product.sum(), inputs)[0],
        torch.ones(8, 16).double() @ values["first.weight"],
    )
    units.release(number)
    with torch.no_grad():
        units.stored("first.weight").mul_(2)
    units.gather_whole(number)
    results["as it is stored now"] = torch.equal(units.value(place), 2 * values["first.weight"])
    units.forget()
    results["held"] = (
        len(units.held) + units.travel.is_coming(number) + weight.untyped_storage().nbytes()
    )
    return results


def test_a_gathered_value_gives_up_its_memory_and_finds_it_again() -> None:
    module, analysis, x = net()
    plan = planned(analysis, (2,), schedule=Schedule(**MODES["per_pass"]))
    wanted = {
        "whole": True,
        "bytes let go": 0,
        "same tensor": True,
        "gradient": True,
        "as it is stored now": True,
        "held": 0,
    }
    assert run_ranks(_there_and_back, 2, plan, module, x, timeout=60.0) == [wanted, wanted]


# --- gradients ---


def _gradients(plans: list[Execution], module: Net, x: Tensor) -> list[Found]:
    """The gradients of a step of each plan, and how its log differs from the order."""
    results = []
    for plan in plans:
        ours = on_this_rank(plan, module)
        with CollectiveLog() as log:
            ours.loss(x).backward()  # type: ignore[no-untyped-call]
        results.append((whole_gradients(ours), log.mismatch(plan, dist.get_rank())))
    return results


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 2, 2)])
def test_gradients_of_one_device_in_every_mode(sizes: tuple[int, ...]) -> None:
    """With micro-batches; a weight that is used twice; a frozen one and one that the loss does not
    reach have none.
    """
    module, analysis, x = net()
    wanted = gradients_alone(module, x)
    assert {name for name, gradient in wanted.items() if gradient is None} == {
        "frozen.weight",
        "aside.weight",
        "aside.bias",
    }
    schedules = [
        Schedule(micro_batches=count, unit_bytes=size, **mode)
        for (mode, count) in itertools.product(MODES.values(), (1, 2, 4)[: 4 - len(sizes)])
        for size in (1, UNIT_BYTES)
    ]
    plans = [planned(analysis, sizes, schedule=schedule) for schedule in schedules]
    plans += [
        planned(analysis, sizes, split=False, schedule=Schedule(micro_batches=count))
        for count in (1, 2)
    ]
    for results in run_ranks(_gradients, plans[0].devices, plans, module, x, timeout=120.0):
        for actual, mismatch in results:
            assert not mismatch
            require_equal(actual, wanted)


def test_flat_and_one_by_one_are_the_same_to_the_last_bit() -> None:
    """Two ranks add in one order, whatever else is in the message. (Uses of one weight in several
    segments add up in another order.)
    """
    module, analysis, x = net()
    schedules = [
        Schedule(micro_batches=2, unit_bytes=size, **mode)
        for mode in MODES.values()
        for size in (1, UNIT_BYTES)
    ]
    plans = [planned(analysis, (2,), schedule=schedule) for schedule in schedules]
    assert [len(plan.whole.units) for plan in plans] == [9, 1] * len(MODES)
    for result in run_ranks(_gradients, 2, plans, module, x, timeout=60.0):
        for (one, _), (flat, _) in zip(result[::2], result[1::2], strict=True):
            once = {
                name: value
                for name, value in one.items()
                if value is not None and not name.startswith("twice")
            }
            assert len(once) == 4 and all(
                torch.equal(value, flat[name]) for name, value in once.items()
            )  # type: ignore[arg-type]


def test_only_parameters_on_the_way_to_the_loss_send_gradients() -> None:
    _, analysis, _ = net()
    plan = planned(analysis, (2,), schedule=Schedule(unit_bytes=1, **MODES["per_pass"]))
    for action in plan.whole.actions():
        if action.unit is not None:
            (member,) = plan.whole.units[action.unit].members
            step = plan.whole.program.steps[member]
            assert isinstance(step, Redistribute)
            reduced = (
                action.word == "REDUCE_GRAD"
                and not action.round
                and not step.tensor.startswith(("frozen", "aside"))
            )
            assert bool(plan.whole.issued(action)) == (reduced or action.word == "UNSHARD"), (
                f"{action} of {step.tensor}"
            )


# --- random plans under every mode ---


def _under(program: Program, schedule: Schedule) -> Execution:
    plan = scheduled(program, schedule)
    return Execution(chunks=(Chunk(whole=plan, micro=plan, split=None),))


def _linked(program: Program) -> Program:
    """The program in which a parameter's second layout is made of its first one."""
    assignment = program.assignment
    tensors = program.graph.tensors
    chains = dict(assignment.chains)
    for name, steps in assignment.chains.items():
        if name in assignment.storage and len(steps) > 1:
            ends = steps[0][-1], steps[1][-1]
            chain = cheapest_chain(
                *ends, tensors[name].shape, 8, assignment.mesh.shape, flat_price, gradient=True
            )
            chains[name] = (steps[0], chain, *steps[2:])
    return build_program(program.graph, replace(assignment, chains=chains))


def _random(plans: list[Execution], values: dict[str, Tensor], inputs: list[Tensor]) -> list[Found]:
    results = []
    for plan in plans:
        module = ParallelModule(plan, DeviceGroups.create(plan.chunks[0].mesh), values)
        with CollectiveLog() as log:
            outputs = module(*inputs)
            outputs[-1].backward()
        results.append((whole_gradients(module), log.mismatch(plan, dist.get_rank())))
    return results


@pytest.mark.parametrize("name", ["mlp", "embedding", "attention"])
def test_random_plans_in_every_mode(name: str) -> None:
    """Fused weights whose parts are split, parameters that are used in two layouts, chains that
    start from what another one gave.
    """
    graph = GRAPHS[name]()
    mesh = mesh_of((2, 2))
    values = random_values(graph)
    inputs = random_inputs(graph)
    programs = [random_program(graph, mesh, seed) for seed in range(40, 44)]
    if name == "attention":
        splits = [
            p
            for program in programs
            for p in program.assignment.storage["qkv.weight"]
            if p.kind is Kind.SPLIT
        ]
        assert any(p.parts > 1 for p in splits)
    else:
        programs += [
            linked for program in programs if (linked := _linked(program)).steps != program.steps
        ]
        chains = [
            program.assignment.chains["up.weight" if name == "mlp" else "table.weight"]
            for program in programs
        ]
        assert any(
            second[0] == first[-1]
            for actual in chains
            for first, second in itertools.pairwise(actual)
        )
    schedules = [Schedule(unit_bytes=size, **MODES["per_pass"]) for size in (1, UNIT_BYTES)]
    plans = [_under(program, schedule) for program in programs for schedule in schedules]
    module = alone(graph, values)
    module(*inputs)[-1].backward()
    wanted = {name: p.grad for name, p in module.graph_parameters().items()}
    for results in run_ranks(_random, 4, plans, values, inputs, timeout=120.0):
        for actual, mismatch in results:
            assert not mismatch
            require_equal(actual, wanted)


# --- gradients as they add up ---


def test_gradients_add_up_without_touching_what_others_hold() -> None:
    place = ("w", ())
    first = torch.ones(2)
    second = torch.full((2,), 3.0)
    gradients = Gradients()
    gradients.add(place, first)
    gradients.add(place, second)
    gradients.add(place, second)
    assert (
        gradients.at[place].tolist() == [7, 7]
        and first.tolist() == [1, 1]
        and second.tolist() == [3, 3]
    )
    other = Gradients()
    other.bring(place, first)
    assert not other.reached, "what is brought does not say that the loss has reached it"
    gradients.join(other)
    gradients.scale(2.0)
    assert gradients.at[place].tolist() == [16, 16] and gradients.reached == {"w"}
    gradients.drop("w")
    assert not gradients.at and not gradients.reached and gradients.take(place) is None
