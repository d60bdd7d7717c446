"""The rules of torch's operators, executed on a seeded choice of torch's own samples; `make prove`
takes all of them.
"""

from __future__ import annotations

import pytest
import torch

from autopar.sharding.rules import RULES, Entry
from tests.sharding.capture import capture
from tests.sharding.opinfo import calls_of, operators
from tests.sharding.proof import MESHES, Proof, as_sample, by_hand, chosen, kinds_to_prove

SEED = 3
REACHED = 560
"""So many kinds, at the least, are reached by few samples of each of torch's operators; the others
are proven by hand-written ones.
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_choice_of_torchs_samples_equals_the_whole() -> None:
    kinds = kinds_to_prove()
    given = chosen(kinds, {"float64, even": 1, "float64": 1, "integer": 1}, seed=SEED, quick=True)
    written = by_hand()
    assert len(given) > REACHED
    proofs = {kind: Proof() for kind in kinds}
    for index, kind in enumerate(kinds):
        cases = given.get(kind) or written.get(kind, [])
        for case in cases[:2]:
            proofs[kind].add(case, [MESHES[index % 2]])
    assert not [message for proof in proofs.values() for message in proof.messages]
    assert not [kind for kind, proof in proofs.items() if not proof.account.samples]
    assert sum(proof.account.split for proof in proofs.values()) > 1000


def test_composite_operators_and_their_parts_are_seen() -> None:
    operator = next(op for op in operators() if op.name == "nn.functional.linear")
    seen = {
        call.kind
        for call in calls_of(
            operator, {"aten.linear.default", "aten.addmm.default", "aten.t.default"}, quick=True
        )
    }
    assert seen == {"aten.linear.default", "aten.addmm.default", "aten.t.default"}


def test_sizes_are_torchs_own_again() -> None:
    softmax = next(op for op in operators() if op.name == "softmax")
    before = [sample.input.shape for sample in softmax.sample_inputs("cpu", torch.float64)]
    calls = list(calls_of(softmax, {"aten.softmax.int"}))
    assert [sample.input.shape for sample in softmax.sample_inputs("cpu", torch.float64)] == before
    assert {4, 5, 6} <= {
        size for call in calls for tensor in call.tensors() for size in tensor.shape
    }


def test_a_call_is_taken_once_and_with_the_values_before_it() -> None:
    x = torch.ones(4)
    seen: set[str] = set()
    (call,) = capture(lambda: x.add_(1), {"aten.add_.Tensor"}, seen)
    assert call.tensors()[0].tolist() == [1.0] * 4
    assert not list(capture(lambda: torch.ones(4).add_(1), {"aten.add_.Tensor"}, seen))


WRONG = [
    ("softmax", "aten.softmax.int"),
    ("tril", "aten.tril.default"),
    ("cumsum", "aten.cumsum.default"),
]


@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_wrong_rules_are_caught(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = next(op for op in operators() if op.name == name)
    cases = [case for call in calls_of(operator, {kind}, quick=True) for case in as_sample(call)]
    right = Proof()
    caught = Proof()
    for case in cases:
        right.add(case, [(2,)])
    monkeypatch.setitem(RULES, kind, Entry(rule="* -> *"))
    for case in cases:
        caught.add(case, [(2,)])
    assert right.account.split and not right.messages and caught.account.failures
