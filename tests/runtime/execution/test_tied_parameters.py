"""Parameters that several stages hold: their gradients are summed over the stages, however each
stores them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Execution
from autopar.order.ranks import tied_parameters
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.redistribution.steps import gather_full
from autopar.sharding.schedule import Schedule
from tests.runtime.nets import (
    MODES,
    Net,
    gradients_alone,
    net,
    on_this_rank,
    pipelined,
    require_equal,
    whole_gradients,
)

pytestmark = pytest.mark.usefixtures("strict_collectives")

ROWS: list[tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = [
    (((1,), (1,)), {}),
    (((2,), (2,)), {}),
    (((2,), (1,)), {"pipeline": "gpipe"}),
    (((1,), (2,)), {"schedule": Schedule(micro_batches=2, **MODES["per_pass"])}),
    (((2, 2), (2,)), {}),
    (((1,), (2,), (1,)), {"schedule": Schedule(micro_batches=4)}),
    (((1,), (1,)), {"pipeline": "interleaved", "interleave": 2}),
    (
        ((2,), (1,)),
        {
            "pipeline": "interleaved",
            "interleave": 2,
            "schedule": Schedule(micro_batches=4, **MODES["per_pass"]),
        },
    ),
    (
        ((2,), (2,)),
        {"pipeline": "zero_bubble", "schedule": Schedule(micro_batches=4, **MODES["shards"])},
    ),
]
"""Meshes of the stages, and the schedule."""


def _trained(
    plan: Execution, module: Net, x: Tensor
) -> tuple[dict[str, Tensor | None], Tensor | None, str]:
    """The gradients, this rank's shard of the tied weight made whole on its stage behind a step,
    and how the log differs from the order.
    """
    ours = on_this_rank(plan, module)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    with CollectiveLog() as log:
        ours.loss(x).backward()  # type: ignore[no-untyped-call]
    gradients = whole_gradients(ours)
    optimizer.step()
    weight = ours.graph_parameters().get("twice.weight")
    engine = ours.engine
    whole = (
        None
        if weight is None
        else gather_full(
            local_of(weight),
            engine.storages.of("twice.weight").layouts["twice.weight"],
            engine.groups,
        )
    )
    return gradients, whole, log.mismatch(plan, dist.get_rank())


@pytest.mark.parametrize(("sizes", "more"), ROWS)
def test_gradients_of_one_device(sizes: tuple[tuple[int, ...], ...], more: dict[str, Any]) -> None:
    module, analysis, x = net()
    plan = pipelined(analysis, sizes, **more)
    assert set(tied_parameters(plan)) == {"twice.weight", "twice.bias"}
    wanted = gradients_alone(module, x)
    gradient = wanted["twice.weight"]
    assert gradient is not None
    for actual, weight, mismatch in run_ranks(
        _trained, plan.devices, plan, module, x, timeout=60.0
    ):
        assert not mismatch
        require_equal(actual, wanted)
        if weight is not None:
            torch.testing.assert_close(
                weight, module.twice.weight.detach() - 0.5 * gradient, rtol=1e-9, atol=1e-12
            )
