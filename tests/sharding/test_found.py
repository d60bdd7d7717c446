"""Rules that were found by execution: what they depend on, and what several of one kind may claim
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.ir import Graph, Operator, Ref, Role, Tensor
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.discovered import DiscoveredRule, add_found, is_open, signature

KIND = "tests.found.default"


def call(*shape: int, dtype: str = "float32", scale: int = 1) -> Call:
    """A call of one tensor, that gives one alike."""
    names = ("x", "y")
    operator = Operator(
        name="op",
        kind=KIND,
        inputs=names[:1],
        outputs=names[1:],
        attributes={"self": Ref(0), "scale": scale},
    )
    roles = (Role.INPUT, Role.ACTIVATION)
    tensors = {
        name: Tensor(name=name, shape=shape, dtype=dtype, role=role)
        for name, role in zip(names, roles, strict=True)
    }
    return Call.of(
        Graph(name="g", tensors=tensors, operators=(operator,), inputs=("x",), outputs=("y",)),
        operator,
    )


@pytest.fixture
def table() -> Iterator[None]:
    """The table without the kind, before and after."""
    RULES.pop(KIND, None)
    yield
    RULES.pop(KIND, None)


def test_sizes_are_no_part_of_a_signature_but_ones_are() -> None:
    assert signature(call(4, 6)) == signature(call(8, 3)) == "ca4ef5ba1e201390", (
        "plan files hold it"
    )
    others = {
        signature(one)
        for one in (call(4, 1), call(1, 6), call(4), call(4, 6, dtype="int64"), call(4, 6, scale=2))
    }
    assert len(others) == 5 and signature(call(4, 6)) not in others


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("saves", "claimed"),
    [(("", ""), ""), (("output", "output"), "output"), (("", "output"), "inputs")],
)
def test_rules_of_one_kind_claim_what_holds_for_all(saves: tuple[str, str], claimed: str) -> None:
    made = [call(4, 6), call(4)]
    texts = ["a b -> a b", "a -> a"]
    rules = [
        DiscoveredRule(
            kind=KIND,
            signature=signature(one),
            rule=text,
            linear=linear,
            products=("",),
            saves=kept,
        )
        for one, text, linear, kept in zip(made, texts, [((0,), (1,)), ((0,),)], saves, strict=True)
    ]
    add_found(rules)
    entry = RULES[KIND]
    assert (entry.saves, entry.linear, entry.products) == (claimed, ((0,),), ("",))
    assert callable(entry.rule) and [entry.rule(one) for one in made] == texts
    assert not is_open(rules[0]) and is_open(replace(rules[0], rule="a !b -> a !b"))
    assert entry.covers is not None and entry.covers(made[0]) and not entry.covers(call(4, 6, 8))
