"""Stages of all shapes on the strict backend, on 2 to 8 ranks.

Tied weights, values that skip a stage, unequal meshes, and ranks that are left idle: gradients of
one device, and what is priced is issued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from autopar.order.schedules import SCHEDULES
from autopar.runtime.launch import run_ranks
from autopar.sharding.schedule import Schedule
from tests.runtime.nets import MODES, gradients_alone, net, pipelined, planned, trained

pytestmark = pytest.mark.usefixtures("strict_ranks")

Meshes = tuple[tuple[int, ...], ...]
FOUR = Schedule(micro_batches=4)
SPLIT = Schedule(micro_batches=4, **MODES["per_pass"])

STAGES: Mapping[int, Sequence[tuple[Meshes, dict[str, Any]]]] = {
    2: (
        (((2,),), {"schedule": Schedule(micro_batches=2, **MODES["per_pass"])}),
        *(
            (
                ((1,), (1,)),
                {"pipeline": name, "interleave": 2 if row.chunks else 1, "schedule": FOUR},
            )
            for name, row in SCHEDULES.items()
        ),
    ),
    3: (
        (((1,), (1,), (1,)), {"schedule": FOUR}),
        (((2,), (1,)), {"pipeline": "zero_bubble", "schedule": FOUR}),
        (((1,), (1,)), {"schedule": FOUR}),
    ),
    4: (
        (((2, 2),), {}),
        (((2,), (2,)), {"pipeline": "interleaved", "interleave": 2, "schedule": SPLIT}),
        (((1,), (2,), (1,)), {"schedule": FOUR}),
        (((1,), (1,), (1,), (1,)), {"pipeline": "zero_bubble", "schedule": FOUR}),
    ),
    6: (
        (((4,), (2,)), {}),
        (((2, 2), (2,)), {"pipeline": "gpipe"}),
        (((1,), (1,), (2,), (1,)), {"schedule": FOUR}),
    ),
    8: (
        (((2, 2, 2),), {}),
        (((2, 2), (2, 2)), {"schedule": FOUR}),
        (((2,), (4,), (2,)), {}),
        (((1,),) * 8, {"schedule": FOUR}),
    ),
}
"""By ranks the meshes of the stages, and the schedule; the ranks behind the last stage are idle."""


@pytest.mark.parametrize("ranks", STAGES)
def test_gradients_of_one_device(ranks: int) -> None:
    module, analysis, x = net()
    plans = [
        planned(analysis, sizes[0], **more)
        if len(sizes) == 1
        else pipelined(analysis, sizes, **more)
        for sizes, more in STAGES[ranks]
    ]
    wanted = gradients_alone(module, x)
    results = run_ranks(trained, ranks, plans, module, x, wanted, timeout=120.0)
    assert results == [[""] * len(plans)] * ranks
