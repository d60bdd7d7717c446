"""The world of a plan: stages on their ranks, groups that are made once, ranks that the plan leaves
idle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.order.execution import Execution
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.process_groups import group_of, message_group
from autopar.runtime.ranks.world import World
from tests.runtime.nets import (
    Net,
    gradients_alone,
    net,
    on_this_rank,
    pipelined,
    planned,
    require_equal,
    whole_gradients,
)

pytestmark = pytest.mark.usefixtures("strict_collectives")


def _places(plan: Execution) -> dict[str, Any]:
    """The place that a rank is told, and whether a second world makes groups of its own."""
    world = World.of(plan)
    again = World.of(plan)
    groups = world.groups
    other = again.groups
    assert (groups is None) == (other is None)
    if groups is not None and other is not None:
        assert (
            all(a is b for a, b in zip(groups.process_groups, other.process_groups, strict=True))
            and world.messages == again.messages
        )
    return {
        "stage": world.stage,
        "coordinate": None if groups is None else groups.coordinate,
        "ranks": None
        if groups is None
        else [dist.get_process_group_ranks(g) for g in groups.process_groups if g is not None],
        "firsts": world.firsts,
        "staged": world.staged,
        "messages": sorted(world.messages),
    }


def test_stages_of_unequal_size_and_an_idle_rank() -> None:
    _, analysis, _ = net()
    plan = pipelined(analysis, ((2, 2), (2,)))
    results = run_ranks(_places, 7, plan, timeout=60.0)
    assert [place["stage"] for place in results] == [0, 0, 0, 0, 1, 1, None]
    assert [place["coordinate"] for place in results] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0,),
        (1,),
        None,
    ]
    assert results[1]["ranks"] == [[1, 3], [0, 1]] and results[5]["ranks"] == [[4, 5]]
    assert all(place["firsts"] == (0, 4) and place["staged"] for place in results)
    # The first two ranks send the whole value, one to each reader; its gradient goes to all four.
    assert [place["messages"] for place in results] == [
        [(0, 4), (4, 0)],
        [(1, 5), (5, 1)],
        [(4, 2)],
        [(5, 3)],
        [(0, 4), (4, 0), (4, 2)],
        [(1, 5), (5, 1), (5, 3)],
        [],
    ]


def test_one_stage_on_all_ranks() -> None:
    _, analysis, _ = net()
    for place in run_ranks(_places, 2, planned(analysis, (2,)), timeout=60.0):
        assert place["ranks"] == [[0, 1]] and place["messages"] == [] and not place["staged"]


def _one_after_another(plans: list[Execution]) -> list[int | None]:
    return [World.of(plan).stage for plan in plans]


def test_ranks_that_have_made_unequal_numbers_of_groups_make_one_together() -> None:
    """A rank alone on its stage has made none, when it is to make one with those that have made
    two.
    """
    _, analysis, _ = net()
    plans = [
        pipelined(analysis, sizes)
        for sizes in (((1,), (2,)), ((2,), (1,)), ((1,), (1,), (1,)), ((2,), (1,)))
    ]
    assert run_ranks(_one_after_another, 3, plans, timeout=60.0) == [
        [0, 0, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 2, 1],
    ]


def _groups() -> list[bool]:
    """The same ranks once more, for messages in either direction, and all of them."""
    rank = dist.get_rank()
    mine = [0, 2] if rank in (0, 2) else [1]
    first = group_of(mine)
    every = group_of(range(dist.get_world_size()))
    return [
        group_of(mine) is first,
        rank == 1 or message_group(0, 2) not in (first, message_group(2, 0)),
        every is dist.group.WORLD,
        first.size() == len(mine),
    ]


def test_a_group_is_made_once() -> None:
    assert run_ranks(_groups, 3, timeout=60.0) == [[True] * 4] * 3


def _devices_of_groups() -> list[Any]:
    """The devices to which a group is bound, and to which the world is while one is made."""
    seen: list[Any] = []
    world = dist.group.WORLD
    assert world is not None

    def new_group(ranks: list[int], **options: Any) -> Any:
        seen.extend((options["device_id"], world.bound_device_id))
        return world

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        group_of([0, 2])
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        message_group(0, 1)
        world.bound_device_id = torch.device("cuda", 5)
        message_group(1, 0)
        seen.append(world.bound_device_id)
        world.bound_device_id = None
    return seen


@pytest.mark.gloo
def test_groups_on_gpus_are_bound_and_made_of_an_unbound_world() -> None:
    """Torch would make them by a split, to which ranks outside do not come."""
    (seen,) = run_ranks(_devices_of_groups, 1, timeout=60.0)
    gpus = [torch.device("cuda", number) for number in (3, 5)]
    assert seen == [None, None, gpus[0], None, gpus[1], None, gpus[1]]


def _refused(plan: Execution) -> str:
    with pytest.raises(PlanError) as caught:
        World.of(plan)
    return str(caught.value)


def test_too_few_ranks() -> None:
    _, analysis, _ = net()
    plan = pipelined(analysis, ((2,), (1,)))
    assert (
        run_ranks(_refused, 2, plan, timeout=60.0)
        == ["the plan is for 3 devices, but 2 ranks are running"] * 2
    )


def _with_idle_ranks(
    plan: Execution, module: Net, x: Tensor
) -> tuple[list[float], dict[str, Tensor | None], int]:
    """Two steps as anybody writes them; an idle rank goes through the same lines."""
    ours = on_this_rank(plan, module)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = ours.loss(x)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = whole_gradients(ours)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(ours.loss(x)))
    return losses, gradients, sum(p.numel() for p in ours.graph_parameters().values())


@pytest.mark.parametrize("staged", [True, False])
def test_idle_ranks_train_along(staged: bool) -> None:
    module, analysis, x = net()
    plan = pipelined(analysis, ((2,), (1,))) if staged else planned(analysis, (2,))
    results = run_ranks(_with_idle_ranks, plan.devices + 2, plan, module, x, timeout=60.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        wanted = {
            name: g if g is None else g.clone() for name, g in gradients_alone(module, x).items()
        }
        losses.append(float(module(x)[0].detach()))
        optimizer.step()
    losses.append(float(module(x)[0].detach()))
    for actual, gradients, _ in results:
        assert actual == pytest.approx(losses, rel=1e-10)
        require_equal(gradients, wanted)
    assert [held > 0 for _, _, held in results] == [True] * plan.devices + [False] * 2
