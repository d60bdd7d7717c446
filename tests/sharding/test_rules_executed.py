"""Every sharding rule, executed shard by shard, equals the whole: values and gradients, on two,
three and two by two ranks.
"""

from __future__ import annotations

import re

import pytest

from autopar.runtime.proof import Disproved, Sample, prove, sample
from autopar.sharding.rules import RULES, Call, Entry, rule_of
from tests.sharding.operators_page import PAGE
from tests.sharding.samples import exists, f, n

from . import samples, samples_of_layers, samples_of_moves, samples_of_numbers

FAMILIES = {
    **samples.FAMILIES,
    **samples_of_moves.FAMILIES,
    **samples_of_numbers.FAMILIES,
    **samples_of_layers.FAMILIES,
}

MESHES = ((2,), (3,))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_equals_the_whole(family: str) -> None:
    failures = []
    for case in FAMILIES[family]():
        for mesh in MESHES:
            try:
                assert prove(case, mesh) > 0
            except Disproved as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)


def test_every_kind_of_torch_has_a_sample() -> None:
    kinds = {kind for kind in RULES if kind.startswith("aten.") and exists(kind)}
    proved = {case.kind for family in FAMILIES.values() for case in family()}
    # One writes in place, which the importer makes plain; the others leave their values undefined.
    undefined = {
        "empty.memory_format",
        "empty_like.default",
        "empty_permuted.default",
        "empty_strided.default",
        "new_empty.default",
    }
    assert kinds - proved == {"aten.detach_.default", *(f"aten.{name}" for name in undefined)}


WIDER = {
    "aten.full.default",
    "aten.masked_scatter.default",
    "aten.ones.default",
    "aten.zeros.default",
}
"""Split in plans; the page tells their rules as torch's samples proved them, whole.

The first, third and fourth are made of equal elements. `test_travelling.py` proves the second.
"""


def test_no_rule_is_narrower_than_the_page_says() -> None:
    """The proof holds of a rule that splits nothing, too: of every kind some sample has the rule
    that the page of operators shows.
    """
    results: dict[str, set[str]] = {}
    for case in (case for family in FAMILIES.values() for case in family()):
        results.setdefault(case.kind, set()).add(rule_of(Call.of(case.graph, case.operator)).text)
    rows = re.finditer(
        r"^\| `(aten[^`]+)` \| (?:e\.g\. )?`([^`]+)`",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    told = {row[1]: row[2].replace("\\|", "|") for row in rows}
    assert len(told) > 700
    here = {kind: text for kind, text in told.items() if exists(kind)}
    assert {kind for kind, text in here.items() if text not in results.get(kind, ())} == WIDER


WRONG = {
    "a softmax over a split dim": (
        sample("aten.softmax.int", self=n(6, 6), dim=-1),
        Entry(rule="a b -> a b"),
    ),
    "a bias added by every rank": (
        sample("aten.linear.default", input=n(6, 6), weight=n(6, 6), bias=n(6)),
        Entry(rule="* k, n k, n -> * n | k: sum"),
    ),
    "a product that is linear in both sides at once": (
        sample("aten.mul.Tensor", self=n(6, 6), other=n(6, 6)),
        Entry(rule="*, * -> *", linear=((0, 1),)),
    ),
    "a partial sum through relu": (
        sample("aten.relu.default", self=n(6, 6)),
        Entry(rule="* -> *", linear=((0,),)),
    ),
    "a mean that is a sum": (
        sample("aten.mean.dim", self=n(6, 6), dim=[0]),
        Entry(rule="a b -> b | a: sum"),
    ),
    "a transpose that is none": (sample("aten.t.default", self=n(6, 6)), Entry(rule="a b -> a b")),
    "an inner part that is the outer": (
        sample("aten.unflatten.int", self=n(6, 36), dim=1, sizes=[6, 6]),
        Entry(rule="a (b c) -> a c b"),
    ),
    "a norm over a split dim": (
        sample("aten.layer_norm.default", input=f(6, 6), normalized_shape=[6], weight=n(6)),
        Entry(rule="* h, h -> * h"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, entry = WRONG[name]
    prove(case, (2,))
    monkeypatch.setitem(RULES, case.kind, entry)
    with pytest.raises(Disproved):
        prove(case, (2,))


TWO_AXES: tuple[Sample, ...] = (
    sample("aten.linear.default", input=n(4, 2, 8), weight=n(4, 8), bias=n(4)),
    sample("aten.matmul.default", self=n(4, 1, 2, 4), other=n(4, 4, 8)),
    sample("aten.split.Tensor", self=n(4, 24), split_size=8, dim=-1),
    sample("aten.view.default", self=n(4, 16), size=[4, 4, 4]),
    sample("aten.embedding.default", weight=n(8, 4), indices=n(4, 4).abs().long(), padding_idx=5),
    sample("aten.mean.dim", self=n(4, 4, 4), dim=[0, 2], keepdim=True),
    sample("aten.conv2d.default", input=n(4, 4, 2, 2), weight=n(4, 4, 1, 1), bias=n(4), groups=1),
    sample("aten.dropout.default", input=n(4, 8), p=0.4, train=True),
    sample(
        "aten.scaled_dot_product_attention.default",
        query=n(4, 8, 4, 2),
        key=n(4, 4, 2, 2),
        value=n(4, 4, 2, 4),
        enable_gqa=True,
    ),
)


@pytest.mark.parametrize("case", TWO_AXES, ids=str)
def test_every_strategy_on_two_axes(case: Sample) -> None:
    assert prove(case, (2, 2)) > 4
