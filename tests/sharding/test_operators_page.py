"""The page of operators says what tables and results say, and the results show no failure."""

from __future__ import annotations

from autopar.sharding.notation import COMMUNICATION
from autopar.sharding.rules import RULES
from tests.sharding.operators_page import INSIDE, PAGE, page, read


def test_the_page_is_current() -> None:
    """`python -m tests.sharding.operators_page` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_communication_has_words() -> None:
    assert set(INSIDE) == set(COMMUNICATION)


def test_the_results_are_of_these_tables_and_without_failure() -> None:
    aten = read("proof-aten.json")
    onnx = read("proof-onnx.json")
    assert set(aten["kinds"]) <= set(RULES) and set(onnx["operators"]) <= set(RULES)
    assert (
        aten["totals"]["failures"] == 0 and aten["totals"]["refused"] == 0 and onnx["failures"] == 0
    )
    missing = {kind for kind in RULES if kind.startswith("aten.")} - set(aten["kinds"])
    assert missing <= set(aten["not proven"])
