"""Scans are priced by the products of their chunks, which every split shares out."""

from __future__ import annotations

import pytest
import torch

from autopar.costmodel import load_cluster
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.costmodel.device.scans import Scan
from autopar.runtime.proof import Sample, sample, strategies
from autopar.sharding.rules import Call, rule_of
from autopar.sharding.rules.recurrent import DELTA_RULE, STATE_SPACE
from tests.sharding.samples import f, n

B = 4
T = 128
GROUPS = 4
HEADS = 8
W = 16
E = 32
Q = 32


def _delta_rule() -> Sample:
    keys = {name: n(B, T, GROUPS, W) for name in ("query", "key")}
    heads = {"decay": -f(B, T, HEADS), "beta": f(B, T, HEADS)}
    given = {**keys, "value": n(B, T, HEADS, E), **heads}
    given = {name: tensor.float() for name, tensor in given.items()}
    return sample(DELTA_RULE, **given, chunk_size=Q, normalize=True)


def _state_space() -> Sample:
    given = {
        "x": n(B, T, HEADS, E),
        "step": f(B, T, HEADS),
        "decay": -f(HEADS),
        "key": n(B, T, GROUPS, W),
        "query": n(B, T, GROUPS, W),
    }
    given = {name: tensor.float() for name, tensor in given.items()}
    limits = {"softplus": False, "low": 0.0, "high": 1.0}
    return sample(STATE_SPACE, **given, skip=None, bias=None, chunk_size=Q, **limits)


CASES = {"delta rule": _delta_rule, "state space": _state_space}
# For each row: scores, system, solution, three products with the state, one inside the chunk.
ROW = {
    "delta rule": HEADS * (2 * Q * W + Q * (E + W) + 3 * W * E + Q * E),
    "state space": GROUPS * Q * W + HEADS * (2 * W * E + Q * E),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_of_the_chunks(name: str) -> None:
    case = CASES[name]()
    call = Call.of(case.graph, case.operator)
    rule = rule_of(call)
    local = torch.tensor([[float(factor.size) for factor in rule.factors]]).numpy()
    scan = Scan(call, rule, local, "float32", load_cluster("dgx-h100").device)
    assert scan.flops() == pytest.approx(2 * B * T * ROW[name])


@pytest.mark.parametrize("name", CASES)
def test_a_split_takes_less_time_and_a_backward_pass_more(name: str) -> None:
    case = CASES[name]()
    table = strategies(case, (2,))
    call = Call.of(case.graph, case.operator)
    gradients = frozenset(t.name for t in (*call.inputs, *call.outputs))
    parts = operator_parts(call, table, (2,), load_cluster("dgx-h100"), gradients)
    names = {" ".join(table.names(i)): i for i in range(len(table.choices))}
    for letter in "btge":
        assert parts.forward[names[letter]] < parts.forward[names["R"]]
    assert (parts.backward > 2 * parts.forward).all()
    assert not parts.weight.any()
