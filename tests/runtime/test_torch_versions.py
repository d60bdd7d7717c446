"""Other behaviour of torch by version: handled, or refused by name on every rank."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime import torch_versions
from autopar.runtime.launch import run_ranks
from autopar.runtime.torch_versions import WITHOUT_DERIVATIVE, stash
from tests.runtime.optimizers.test_optimizers import TOKENS, build


class State:
    """An object that notes that it has been freed."""

    freed = 0

    def __del__(self) -> None:
        State.freed += 1


def test_a_stashed_object_lives() -> None:
    for _ in range(3):
        stash("autopar.test", State())
        gc.collect()
        assert isinstance(torch._C._get_obj_in_tls("autopar.test"), State)
    assert State.freed == 2


def test_an_object_that_is_stashed_once_more_lives() -> None:
    """As the present state is for each backward pass, by the storage that has it already."""
    state = State()
    stash("autopar.test", state)
    before = sys.getrefcount(state)
    for _ in range(3):
        stash("autopar.test", state)
    assert sys.getrefcount(state) == before


def test_operators_without_a_derivative_are_named() -> None:
    """Where torch has none, it says so in the backward pass; the proofs compare values alone."""
    least, _ = torch.aminmax(torch.arange(4.0, requires_grad=True))
    if "aten.aminmax.default" in WITHOUT_DERIVATIVE:
        with pytest.raises(RuntimeError, match="derivative for aten::aminmax is not implemented"):
            least.backward()
    else:
        least.backward()


def _refused(plan: Plan) -> str:
    """The refusal on this rank, where torch holds no parts whatever its version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_versions, "HOLDS_PARTS", False)
        with pytest.raises(PlanError) as error:
            autopar.parallelize(build(), plan)
    return str(error.value)


def test_parameters_in_parts_are_refused_on_every_rank() -> None:
    plan = autopar.plan(
        build(), (TOKENS,), cluster="local-cpu", devices=2, scheme="megatron", optimizer="adamw"
    )
    texts = run_ranks(_refused, 2, plan)
    assert texts[0] == texts[1]
    assert "holds no parameter that lies as [S0/3]" in texts[0]
