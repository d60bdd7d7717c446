"""Rows of raising have a rule, a price and a function of the same name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from autopar import raising
from autopar.costmodel import load_cluster
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.ir.bodies import POINTWISE
from autopar.ir.recipes import WINDOWED
from autopar.ir.stored_products import LINEAR_LOSS
from autopar.runtime.operators.functions import function_of
from autopar.runtime.proof import strategies
from autopar.sharding.rules import RULES, Call
from tests.product_code import ROOT
from tests.sharding.proof import by_hand

SOURCES = sorted((ROOT / "autopar" / "raising").glob("*.py"))
SAID = {
    kind
    for path in SOURCES
    for kind in re.findall(r'"(autopar\.\w+(?:\.default)?)"', path.read_text())
}
KINDS = sorted(SAID | {LINEAR_LOSS, POINTWISE, WINDOWED})


def test_every_kind_is_known() -> None:
    assert raising.__all__ == ["ROWS", "attention", "raised"] and len(KINDS) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_one_name_in_all_rooms(kind: str) -> None:
    assert kind in RULES and callable(function_of(kind))
    case = by_hand()[kind][0]
    call = Call.of(case.graph, case.operator)
    gradients = frozenset(tensor.name for tensor in (*call.inputs, *call.outputs))
    parts = operator_parts(call, strategies(case, (2,)), (2,), load_cluster("dgx-h100"), gradients)
    assert np.all(parts.forward > 0) and np.all(parts.backward > 0)
