"""Plans for Muon on real ranks: equal to one device, and every collective issued as priced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.parity import failures, failures_on, subject
from tests.end_to_end.plans import NamedPlans, in_stages, plans, request

EXACT = {"dtype": "float64", "steps": 3}
"""In float64 gradients are as good as equal, and so are updates in bfloat16."""
ROUNDED = {"dtype": "float32", "steps": 1}
"""Kernels of experts are of float32, where a gradient may round to a neighbour in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"),
    [("gpt2", (2,)), ("gpt2", (2, 2)), ("bert", (2, 2)), ("mixtral", (2,)), ("mixtral", (2, 2))],
)
def test_plans_for_muon_are_one_device(model: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Schemes by name, and plans by chance: matrices split, copied, and split in pieces."""
    how: Any = ROUNDED if model == "mixtral" else EXACT
    of = subject(model, tmp_path, train=True, optimizer="muon", **how)
    wanted = request(sizes, train=True, optimizer="muon")
    assert not failures(of, wanted, list(plans(of.model, wanted, randoms=2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline", [{"pipeline": "1f1b"}, {"pipeline": "interleaved", "interleave": 2}]
)
def test_stages_for_muon_are_one_device(pipeline: dict[str, object], tmp_path: Path) -> None:
    """Each stage has owners of its own; a stage of several chunks those of each."""
    of = subject("gpt2", tmp_path, train=True, optimizer="muon")
    named = NamedPlans(of.model, request((2,), train=True, optimizer="muon"))
    chunks = 2 * int(str(pipeline.get("interleave", 1)))
    parts = [named["zero3" if number % 2 else "megatron"] for number in range(chunks)]
    plan = in_stages(of.model, parts, {"micro_batches": 2, **pipeline})
    assert not failures_on(of, 4, [("stages", plan)])
