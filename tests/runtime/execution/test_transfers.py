"""Messages between stages: values in every layout arrive as they are wanted there, and gradients as
they are wanted here.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Execution, Handed
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.execution.runner import COMPUTING, RECEIVES
from autopar.runtime.execution.transfers import Edge
from autopar.runtime.launch import run_ranks
from autopar.runtime.proof import assemble, hold
from autopar.runtime.ranks.world import World
from autopar.sharding.layout import Layout, R, parse_layout
from autopar.sharding.schedule import Schedule
from tests.runtime.nets import Net, net, on_this_rank, pipelined

pytestmark = pytest.mark.usefixtures("strict_collectives")

NAMES = ("tanh:0", "tanh.1:0", "tanh.2:0", "first/linear:0")
LAYOUTS = {
    (1,): ["R", "P", "B", "S0"],
    (2,): ["S0", "S1/4", "P", "B"],
    (4,): ["S1", "R", "P", "B"],
    (2, 2): ["S0 S1", "P S0", "B S1/2", "S0 P"],
}
"""By mesh the layouts in which the values are made."""


def _values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in NAMES]


def _edge(plan: Execution, texts: list[str], world: World) -> tuple[Edge, list[Handed]]:
    """The edge from the first chunk to the second; its last value has no gradient."""
    first, second = (chunk.mesh for chunk in plan.chunks)
    direct = first.shape == second.shape
    handed = []
    for name, text in zip(NAMES, texts, strict=True):
        made: Layout = parse_layout(text)
        taken = made if direct else (R,) * len(second.axes)
        handed.append(Handed(name=name, made=made, taken=taken, differentiable=name != NAMES[-1]))
    return Edge(plan, world, (0, 1), handed, torch.device("cpu")), handed


def _sent(plan: Execution, texts: list[str]) -> list[Tensor]:
    """The tensors of a rank at the end: values on the second stage, gradients on the first."""
    world = World.of(plan)
    edge, handed = _edge(plan, texts, world)
    under_way: deque[tuple[dist.Work, Tensor]] = deque()
    assert world.stage is not None
    mesh = plan.chunks[world.stage].mesh.shape
    own = world.rank - world.firsts[world.stage]
    if world.stage == 0:
        here = [
            hold(v, h.made, mesh, gradient=False, seed=i)[own]
            for i, (v, h) in enumerate(zip(_values(), handed, strict=True))
        ]
        edge.send(here, forward=True, under_way=under_way)
        received = edge.receive(edge.begin_receive(forward=False), forward=False)
        assert edge.gradient_places() == [(h.name, h.made) for h in handed if h.differentiable]
    else:
        received = edge.receive(edge.begin_receive(forward=True), forward=True)
        behind: dict[Any, Tensor] = {}
        for i, (value, h) in enumerate(zip(_values(), handed, strict=True)):
            if h.name != NAMES[1]:  # which the loss has not reached
                behind[h.name, h.taken] = hold(-value, h.taken, mesh, gradient=True, seed=i)[own]
        edge.send(edge.gradients_of(behind), forward=False, under_way=under_way)
    for work, _ in under_way:
        work.wait()
    return received


EQUAL = [((1,), (1,)), ((2,), (2,)), ((2, 2), (2, 2))]
UNEQUAL = [((2,), (1,)), ((1,), (2,)), ((4,), (2,)), ((1,), (4,)), ((2, 2), (2,)), ((2,), (2, 2))]


@pytest.mark.parametrize("sizes", [*EQUAL, *UNEQUAL])
def test_values_and_gradients(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    _, analysis, _ = net()
    plan = pipelined(analysis, sizes, schedule=Schedule())
    texts = LAYOUTS[sizes[0]]
    first, second = sizes
    actual = run_ranks(_sent, plan.devices, plan, texts, timeout=60.0)
    senders = plan.chunks[0].mesh.devices
    for place, value in enumerate(_values()):
        taken = parse_layout(texts[place]) if first == second else (R,) * len(second)
        there = [rank[place] for rank in actual[senders:]]
        torch.testing.assert_close(
            assemble(there, taken, second, (8, 16), gradient=False), value, rtol=1e-12, atol=1e-12
        )
        if place < len(NAMES) - 1:
            wanted = torch.zeros_like(value) if place == 1 else -value
            here = [rank[place] for rank in actual[:senders]]
            made = parse_layout(texts[place])
            torch.testing.assert_close(
                assemble(here, made, first, (8, 16), gradient=True), wanted, rtol=1e-12, atol=1e-12
            )
    assert len(actual[0]) == len(NAMES) - 1 and len(actual[-1]) == len(NAMES)


def _begun(plan: Execution, module: Net, x: Tensor) -> tuple[list[int], list[int]]:
    """The numbers of actions that had begun when each receive began, and those that are wanted."""
    ours = on_this_rank(plan, module)
    begun = []
    plain = dist.irecv

    def irecv(*args: Any, **kwargs: Any) -> Any:
        begun.append(len(log.actions))
        return plain(*args, **kwargs)

    with CollectiveLog() as log:
        dist.irecv = irecv
        ours.loss(x).backward()  # type: ignore[no-untyped-call]
    wanted = []
    latest = None
    present = None
    for number, action in enumerate(log.actions, 1):
        own = action.word, action.micro_batch
        # A pass begins with its first segment.
        if action.word in COMPUTING and own != present:
            latest = number
            present = own
        elif action.word in RECEIVES:
            wanted.append(latest or number)
    return begun, wanted


@pytest.mark.parametrize("pipeline", ["1f1b", "zero_bubble"])
def test_messages_come_while_the_pass_before_computes(pipeline: str) -> None:
    module, analysis, x = net()
    schedule = Schedule(micro_batches=4)
    plan = pipelined(analysis, ((1,), (1,)), pipeline=pipeline, schedule=schedule)
    for begun, wanted in run_ranks(_begun, 2, plan, module, x, timeout=60.0):
        assert len(begun) == 4 and begun == wanted
