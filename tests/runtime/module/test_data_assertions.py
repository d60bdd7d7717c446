"""Assertions of a model about its data, on real ranks: a batch of which they hold runs as on one
device, another is refused by all.
"""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.runtime.counting import Counting, example


def _called(plan: Plan) -> tuple[torch.Tensor, str]:
    module = autopar.parallelize(Counting(), plan)
    with torch.no_grad():
        output = module(*example())
    with pytest.raises(RunError) as refused:
        module(*example(tokens=2))
    return output, str(refused.value)


def test_a_batch_with_other_counts_is_refused_on_every_rank() -> None:
    plan = autopar.plan(Counting(), example(), devices=2, cluster="local-cpu", scheme="tensor")
    with torch.no_grad():
        expected = Counting()(*example())
    for actual, message in run_ranks(_called, 2, plan, timeout=120.0):
        torch.testing.assert_close(actual, expected)
        assert "counting.py:" in message and "does not hold of this batch" in message
