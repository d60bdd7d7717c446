"""Agreement: where ranks differ or one has failed, all of them raise one and the same error, and
nobody waits.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.agreement import agree, compare_messages, digest, first_rank_says

pytestmark = pytest.mark.usefixtures("strict_collectives")

RANKS = 3
LONG = "ü" * 5000


def _said(name: str) -> tuple[str, str]:
    """The error of this rank, if it has one, and where it comes from."""
    rank = dist.get_rank()
    same = {"the plan": digest("plan"), "the model": digest(b"model")}
    failure: Exception | None = None
    facts = same
    match name:
        case "the plan differs":
            facts = same | {"the plan": digest(f"plan {max(rank, 1)}")}
        case "the model differs":
            facts = same | {"the model": digest(f"model {rank == 0}")}
        case "one has failed":
            failure = ValueError("no such file") if rank == 1 else None
        case "one has failed without a word":
            failure = KeyError() if rank == 2 else None
        case "one has failed at length":
            failure = PlanError(LONG) if rank == 0 else None
        case "two have failed":
            failure = None if rank == 0 else ValueError(f"broken {rank}")
        case "all have failed":
            failure = ValueError(f"each for itself: {rank}")
    try:
        agree(facts, failure=failure)
    except Exception as error:
        return f"{type(error).__name__}: {error}", str(error.__cause__ or "")
    finally:
        dist.barrier()  # nobody is left behind
    return "", ""


DIFFER = (
    "PlanError: the ranks do not agree: {} is another than that of rank 0; give every rank the same"
)
ONE_TEXT = {
    "the same": "",
    "the plan differs": DIFFER.format("the plan of rank 2"),
    "the model differs": DIFFER.format("the model of rank 1, 2"),
    "one has failed": "PlanError: rank 1 cannot take part: no such file",
    "one has failed without a word": "PlanError: rank 2 cannot take part: KeyError",
    "two have failed": "PlanError: rank 1 cannot take part: broken 1",
}


def _all_said(names: list[str]) -> list[tuple[str, str]]:
    return [_said(name) for name in names]


def test_every_rank_raises_the_same() -> None:
    """One after the other in one world; where all have failed each raises its own error, and a long
    text is cut.
    """
    names = [*ONE_TEXT, "all have failed", "one has failed at length"]
    ranks = run_ranks(_all_said, RANKS, names, timeout=30.0)
    actual = {name: [said[number] for said in ranks] for number, name in enumerate(names)}
    for name, text in ONE_TEXT.items():
        assert {said for said, _ in actual[name]} == {text}, name
    assert [cause for _, cause in actual["two have failed"]] == ["", "broken 1", "broken 2"]
    assert [said for said, _ in actual["all have failed"]] == [
        f"ValueError: each for itself: {rank}" for rank in range(RANKS)
    ]
    texts = {said for said, _ in actual["one has failed at length"]}
    assert len(texts) == 1
    assert re.fullmatch(r"PlanError: rank 0 cannot take part: ü{400,}�?", texts.pop())


@pytest.mark.parametrize(("others", "said"), [(8, "7, 8"), (9, "7, 8 and 1 more")])
def test_many_ranks_are_counted(others: int, said: str) -> None:
    messages = [b"\0" + digest("one"), *[b"\0" + digest("another")] * others]
    with pytest.raises(PlanError, match=f"the plan of rank 1, 2, 3, 4, 5, 6, {said} is another"):
        compare_messages(messages, ["the plan"], None)


def test_without_other_ranks_a_failure_is_raised_as_it_is() -> None:
    agree({"the plan": digest("plan")})
    with pytest.raises(KeyError, match="own"):
        agree({"the plan": digest("plan")}, failure=KeyError("own"))
    assert first_rank_says(7) == 7


def _number() -> int:
    return first_rank_says(2**62 + 5 + dist.get_rank())


def test_the_first_rank_says_a_number() -> None:
    assert run_ranks(_number, RANKS, timeout=30.0) == [2**62 + 5] * RANKS


# --- a module ---


def _model(seed: int, width: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def _refused(name: str, plan: Plan, other: Plan) -> str:
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    try:
        if name == "weights":
            autopar.parallelize(_model(rank), plan)
        elif name == "models":
            autopar.parallelize(_model(0, width=32 if last else 16), plan)
        elif name == "plans":
            autopar.parallelize(_model(0), other if last else plan)
        else:
            ours = autopar.parallelize(_model(0), plan)
            ours.loss(
                torch.full((8, 8), float(last) if name == "batches" else 1.0)[
                    : 7 if last and name == "sizes" else 8
                ]
            )
    except PlanError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def _all_refused(names: list[str], plan: Plan, other: Plan) -> list[str]:
    return [_refused(name, plan, other) for name in names]


REFUSED = {
    "weights": "the weights of rank 1 is another",
    "models": "rank 1 cannot take part: the plan (for Sequential) does not match the model",
    "plans": "the plan of rank 1 is another",
    "batches": "the batch of rank 1 is another",
    "sizes": "the batch of rank 1 is another than that of rank 0",
    "": "",
}


def test_a_module_is_refused_everywhere() -> None:
    example = (torch.zeros(8, 8),)
    plan = autopar.plan(_model(0), example, devices=2, cluster="local-cpu")
    other = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"seed": 1})})
    ranks = run_ranks(_all_refused, 2, list(REFUSED), plan, other, timeout=60.0)
    for (name, part), said in zip(REFUSED.items(), zip(*ranks, strict=True), strict=True):
        assert len(set(said)) == 1 and part in said[0] and bool(said[0]) == bool(name), (name, said)
