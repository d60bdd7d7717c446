"""Where the sequence is long: heads are split while there are enough, then keys go around a ring;
the words and the accounts of it.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.analysis.program.account import account_of
from autopar.analysis.program.strategy_words import phrase
from autopar.errors import UsageError
from autopar.frontends.load import LoadedModel
from autopar.options.plan_options import choose_cluster
from autopar.order.scheduled import scheduled
from autopar.plan import Plan
from autopar.planning.model.pins import Pins, parse_pin
from autopar.report.explain.operators import operator_lines
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from tests.planning.modules import loaded, plan_of, program_of, transformer

SEQUENCE = 32768
WIDTH = 1024
EIGHT = {"devices": 8, "mesh": (8,)}
RING = ["*attention*=gpu:k"]


def sequence_of(heads: int) -> LoadedModel:
    """One long sequence through a causal layer."""
    return loaded(transformer(1, WIDTH, heads), 1, SEQUENCE, WIDTH, dtype="bfloat16")


class Both(nn.Module):
    """Attention that sees both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def split_of(plan: Plan) -> set[tuple[str, ...]]:
    """How attention is split."""
    return {op.strategy for name, op in plan.operators.items() if "attention" in name}


@pytest.fixture(scope="module")
def few() -> LoadedModel:
    """Fewer heads than devices."""
    return sequence_of(4)


def test_heads_are_split_while_there_are_enough() -> None:
    """Ulysses: what moves is the queries, keys and values of each token, once; in a ring they move
    once for every rank.
    """
    model = sequence_of(8)
    plan = plan_of(model, **EIGHT)
    assert split_of(plan) == {("g",)} and ("forward", "all_to_all") in {
        (c.phase, c.kind) for c in plan.collectives
    }
    assert plan.predicted.step < plan_of(model, **EIGHT, pins=RING).predicted.step


def test_fewer_heads_than_devices_are_a_ring(few: LoadedModel) -> None:
    plan = plan_of(few, **EIGHT)
    assert split_of(plan) == {("k",)}
    sent = [c for c in plan.collectives if c.kind == "send"]
    block = 2 * SEQUENCE // 8 * WIDTH * 2
    assert Counter((c.phase, c.nbytes) for c in sent) == {
        ("forward", block): 7,
        ("backward", block): 7,
        ("backward", 2 * block): 8,
    }
    assert (
        plan.predicted.step
        < 0.25 * plan_of(few, **EIGHT, pins=["*attention*=gpu:R"]).predicted.step
    )
    with pytest.raises(UsageError):
        plan_of(few, **EIGHT, pins=["*attention*=gpu:g"])
    assert Plan.model_validate_json(plan.to_json()) == plan
    read_back = Plan.model_validate_json(plan.to_json())
    assert (
        scheduled(program_of(plan, few)).collectives()
        == scheduled(program_of(read_back, few)).collectives()
    )


def test_a_ring_keeps_less_than_gathered_keys() -> None:
    """Gathering keys and values is fewer messages and faster; where its copies do not fit, the ring
    is chosen.
    """
    model = loaded(Both(), 1, SEQUENCE, WIDTH, dtype="bfloat16")
    gathered, ring = (
        plan_of(model, **EIGHT, pins=[f"*attention*=gpu:{option}"]) for option in "qk"
    )
    whole = 2 * SEQUENCE * WIDTH * 2
    shard = 2 * SEQUENCE // 8 * WIDTH * 2
    saved = gathered.predicted.memory - ring.predicted.memory
    assert saved > 0.9 * (whole - shard)
    assert (
        split_of(plan_of(model, **EIGHT)) == {("q",)}
        and gathered.predicted.step < ring.predicted.step < 1.15 * gathered.predicted.step
    )
    tight = plan_of(model, **EIGHT, memory=ring.predicted.memory * 1.01)
    assert split_of(tight) == {("k",)}


def test_it_is_named_and_every_send_is_accounted_for(few: LoadedModel) -> None:
    plan = plan_of(few, **EIGHT, pins=RING, zero=0)
    analysis = analyse(few.graph, train=True)
    whole = account_of(plan, analysis, choose_cluster("dgx-h100", 8)[0])
    (attention,) = (account for account in whole.operators if "attention" in account.operator.name)
    assert phrase(attention, whole) == "context-parallel (ring attention) over gpu"
    assert scheme_of(plan, analysis).name == "context"
    lines = "\n".join(operator_lines(attention, whole))
    assert "forward 7 x send over gpu" in lines and "backward 8 x send over gpu" in lines
    told = Counter(c for account in whole.operators for c, _ in account.collectives)
    sends = Counter(c for c in scheduled(program_of(plan, few)).collectives() if c.kind == "send")
    assert Counter({c: n for c, n in told.items() if c.kind == "send"}) == sends
    assert whole.communication == pytest.approx(plan.predicted.communication)


def test_a_ring_is_pinned_by_its_factor() -> None:
    name, axes = parse_pin("*attention*=gpu:k")
    assert Pins(operators={name: axes}).operators == {"*attention*": {"gpu": "k"}}
    model = loaded(transformer(1, 64, 2), 1, 64, 64)
    with pytest.raises(UsageError, match="k"):
        plan_of(model, devices=2, mesh=(2,), pins=["*attention*=gpu:ring"])
