"""The sharding rules of ONNX's operators, executed shard by shard on onnx's node tests, in one
process and on two real ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
import torch

from autopar.runtime.proof import Sample
from autopar.sharding.rules import RULES, Entry
from tests.frontends.onnx.lowering.node_report import known_reason
from tests.frontends.onnx.lowering.node_tests import NodeTest
from tests.sharding.onnx_proof import (
    MESHES,
    Tally,
    counted,
    extra_samples,
    prove_all,
    prove_kinds,
    samples_of,
    splits,
)
from tests.sharding.onnx_ranks import wrong_on_two_ranks
from tests.sharding.onnx_samples import MULTIPLE, alone, grown, load

SHARE = 0.95
"""Of the node tests that can be split over two ranks, at least so many are right there."""


def some(tests: Iterable[NodeTest], count: int, seed: int = 0) -> list[NodeTest]:
    """At most so many tests of every kind, chosen by chance; those that spell out an operator by
    others are left out.
    """
    by_kind: dict[str, list[NodeTest]] = {}
    for test in tests:
        if not test.expanded:
            by_kind.setdefault(test.kind, []).append(test)
    rng = random.Random(seed)
    return [
        test
        for kind in sorted(by_kind)
        for test in rng.sample(by_kind[kind], min(count, len(by_kind[kind])))
    ]


def failures(
    samples: Iterable[tuple[Sample, bool]], meshes: Sequence[tuple[int, ...]]
) -> tuple[Tally, list[str]]:
    """The failed samples on these meshes."""
    tally = Tally()
    for sample, _ in samples:
        prove_all(sample, meshes, tally)
    return tally, tally.failures


def test_a_call_of_every_kind_equals_the_whole() -> None:
    tally, wrong = failures(samples_of(some(counted(), 1)), MESHES[:1])
    assert not wrong, "\n".join(wrong)
    assert tally.samples > 150 and tally.split > 250


def test_calls_that_node_tests_lack_equal_the_whole() -> None:
    tally, wrong = failures(extra_samples(), MESHES[:2])
    assert not wrong, "\n".join(wrong)
    assert tally.split > 250


@pytest.mark.slow
@pytest.mark.ci
def test_calls_of_every_kind_equal_the_whole_on_every_mesh() -> None:
    tally, wrong = failures(samples_of(some(counted(), 1, seed=1)), MESHES)
    assert not wrong, "\n".join(wrong)
    assert tally.split > 2000


@pytest.mark.slow
def test_every_node_test_equals_the_whole() -> None:
    actual = prove_kinds(counted())
    wrong = [failure for tally in actual.values() for failure in tally.failures]
    assert not wrong, "\n".join(wrong)


def test_grown_samples_divide_by_two_and_three_and_no_shard_repeats() -> None:
    test = next(test for test in counted() if test.name == "test_basic_conv_with_padding")
    sample = alone(load(test), test.name)
    assert sample is not None
    larger = grown(sample)
    assert larger is not None
    assert [value.shape for value in sample.values] == [(1, 1, 5, 5), (1, 1, 3, 3)]
    image = larger.values[0]
    assert image.shape[0] % MULTIPLE == image.shape[1] % MULTIPLE == 0
    shards = [shard for dim in (0, 1) for shard in image.unbind(dim)]
    assert not any(
        torch.equal(a, b) for i, a in enumerate(shards) for b in shards[:i] if a.shape == b.shape
    )


WRONG = {
    "test_softmax_axis_0": Entry(rule="a b c -> a b c"),
    "test_rms_normalization_2d_axis1": Entry(rule="a b, b -> a b"),
    "test_tile_precomputed": Entry(rule="a b -> (a 2) (b 2)"),
    "test_cumsum_1d": Entry(rule="a -> a"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test = next(test for test in counted() if test.name == name)
    sample = alone(load(test), test.name)
    assert sample is not None
    larger = grown(sample) or sample
    assert not failures([(larger, True)], MESHES[:2])[1]
    monkeypatch.setitem(RULES, sample.kind, WRONG[name])
    assert failures([(larger, True)], MESHES[:2])[1]


def unknown(wrong: dict[str, str]) -> list[str]:
    """The failures without a known reason."""
    return [f"{name}: {text}" for name, text in wrong.items() if known_reason(name) is None]


@pytest.mark.slow
@pytest.mark.ci
def test_some_node_tests_are_right_on_two_ranks() -> None:
    chosen, _ = splits(random.Random(2).sample(counted(), 400))
    assert len(chosen) > 200
    assert not unknown(wrong_on_two_ranks(chosen))


@pytest.mark.slow
def test_node_tests_are_right_on_two_ranks() -> None:
    chosen, others = splits(counted())
    wrong = wrong_on_two_ranks(chosen)
    assert len(chosen) > 1000 and len(others) < 700
    assert 1 - len(wrong) / len(chosen) >= SHARE
    assert not unknown(wrong)
