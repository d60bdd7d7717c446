"""The factor notation: what a rule text means, what binding it to shapes gives, and what is
refused.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.sharding.notation import Rule, bind, parse_rule


def bound(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> Rule:
    return bind(parse_rule(text), inputs, outputs)


def sizes(rule: Rule) -> dict[str, int]:
    return {factor.name: factor.size for factor in rule.factors}


def test_factors_of_a_linear_layer() -> None:
    rule = bound("* k, n k, +n -> * n | k: sum", [(8, 16, 4), (6, 4), (6,)], [(8, 16, 6)])
    assert sizes(rule) == {"d0": 8, "d1": 16, "k": 4, "n": 6}
    assert [f.reduction for f in rule.factors] == [None, None, "sum", None]
    assert rule.inputs == (((0,), (1,), (2,)), ((3,), (2,)), ((3,),)) and rule.outputs == (
        ((0,), (1,), (3,)),
    )
    assert rule.addends == {2}


def test_an_absent_bias_is_left_out() -> None:
    rule = bound("* k, n k, +n -> * n | k: sum", [(8, 4), (6, 4)], [(8, 6)])
    assert len(rule.inputs) == 2 and rule.addends == frozenset()


def test_broadcast_dims_hold_no_factor() -> None:
    rule = bound("*, * -> *", [(8, 1, 4), (5, 4)], [(8, 5, 4)])
    assert sizes(rule) == {"d0": 8, "d1": 5, "d2": 4}
    assert rule.inputs == (((0,), (), (2,)), ((1,), (2,)))


def test_compounds_are_solved_from_the_other_tensors() -> None:
    rule = bound(
        "b (g r) q d, b g k d -> b (g r) q k", [(2, 12, 5, 3), (2, 4, 7, 3)], [(2, 12, 5, 7)]
    )
    assert sizes(rule) == {"b": 2, "g": 4, "r": 3, "q": 5, "d": 3, "k": 7}


def test_marks_clauses_and_sizes() -> None:
    rule = bound("v h, * -> * h | v: sum; v: masked", [(10, 4), (3,)], [(3, 4)])
    table = {f.name: f for f in rule.factors}
    assert (table["v"].reduction, table["v"].special) == ("sum", "masked")
    rule = bound("n (g=4 !c) -> n (g=4 !c)", [(2, 12)], [(2, 12)])
    assert {f.name: f.whole for f in rule.factors} == {"n": False, "g": False, "c": True} and sizes(
        rule
    )["c"] == 3
    rule = bound("(3 n) -> n, n, n", [(12,)], [(4,)] * 3)
    assert {f.name: f.whole for f in rule.factors} == {"n": False, "3": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", "no '->'"),
        ("a (b -> a b", "unbalanced"),
        ("a b) -> a b", "cannot read"),
        ("a ((b) c) -> a", "cannot read"),
        ("* a * -> a", "two '*'"),
        ("a -> a | a: product", "must end in one of sum, max, min, mean"),
        ("a -> a | a", "must end in one of"),
        ("a$ -> a", "cannot read 'a$'"),
        ("a =3 -> a", "cannot read"),
    ],
)
def test_texts_that_are_no_rule(text: str, words: str) -> None:
    with pytest.raises(RuleError, match=words.replace("*", "\\*").replace("$", "\\$")):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "words"),
    [
        (
            "a b, b c -> a c",
            [(2, 3), (4, 5)],
            [(2, 5)],
            "factor 'b' is 3 in one tensor and 4 in another",
        ),
        ("a -> a", [(2, 3)], [(2, 3)], "a tensor of 1 dims does not match one of rank 2"),
        ("a -> a", [(2,), (2,)], [(2,)], "has 1 inputs, the operator 2"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "are not determined"),
        ("(a b) -> a b", [(6,)], [(2, 4)], "does not multiply to 6"),
        ("(a=4 b) -> (a=4 b)", [(6,)], [(6,)], "not determined|not multiply"),
    ],
)
def test_shapes_that_do_not_fit(
    text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], words: str
) -> None:
    with pytest.raises(RuleError, match=words):
        bound(text, inputs, outputs)


NAMES = st.sampled_from("abcdefgh")
DIMS = st.lists(st.lists(NAMES, min_size=1, max_size=3, unique=True), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(dims=DIMS, given_sizes=st.lists(st.integers(2, 5), min_size=8, max_size=8))
def test_binding_finds_the_sizes_that_made_the_shapes(
    dims: list[list[str]], given_sizes: list[int]
) -> None:
    """A tensor of compounds beside one of all its factors: every size is determined, and every dim
    multiplies to its size.
    """
    used = list(dict.fromkeys(name for dim in dims for name in dim))
    truth = dict(zip(used, given_sizes, strict=False))
    spelled = " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
    compound = tuple(math.prod(truth[name] for name in dim) for dim in dims)
    rule = bound(
        f"{spelled} -> {' '.join(used)}", [compound], [tuple(truth[name] for name in used)]
    )
    assert sizes(rule) == truth
    for dim, factors in zip(dims, rule.inputs[0], strict=True):
        assert [rule.factors[f].name for f in factors] == dim


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab12 ()*!+,->|:=sum", max_size=20))
def test_any_text_is_a_rule_or_a_rule_error(text: str) -> None:
    try:
        pattern = parse_rule(text)
    except RuleError:
        return
    assert pattern.text == text
