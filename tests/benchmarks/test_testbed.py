"""The emulated network's benchmark: when it is skipped, what counts as a wrong order, and that its
plans are the placements.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "testbed.py"


@pytest.fixture(scope="module")
def testbed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("testbed", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(
    placement: str, predicted: float, measured: float, *, judged: bool = True
) -> dict[str, Any]:
    figures = {"predicted_s": predicted, "measured_s": measured, "judged": judged}
    return {"network": "n", "model": "m", "placement": placement, **figures}


def test_it_is_skipped_with_a_reason(
    testbed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "holds no lab.py" in testbed.skip_reason(tmp_path)
    for name in ("lab.py", "wire.c"):
        (tmp_path / name).touch()
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    assert testbed.skip_reason(tmp_path) == "network namespaces need root"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True, check=True
    )
    assert done.stdout == '{"skipped": "no --testbed DIR is given"}\n'


def test_the_order_counts_beyond_ties(testbed: ModuleType) -> None:
    rows = [row("a", 1.0, 1.0), row("b", 0.9, 1.1), row("c", 2.0, 1.5), row("d", 1.9, 3.0)]
    (order,) = testbed.rankings(rows)
    assert (order["winner"], order["pairs"], order["wrong"]) == (
        "a",
        5,
        ["c < d"],
    )  # a and b are tied
    rows[3]["judged"] = False
    assert testbed.rankings(rows)[0]["wrong"] == []


@pytest.mark.parametrize("index", range(4))
def test_placements_split_what_they_say(testbed: ModuleType, index: int) -> None:
    import autopar
    from autopar.costmodel import Level, load_cluster
    from autopar.sharding.layout import Kind, parse_layout

    node = load_cluster("local-cpu")
    levels = (node.levels[0], Level(name="nic", size=2, latency=1e-4, bandwidth=1e8, shared_by=2))
    cluster = replace(node, levels=levels, shared_host=False)
    mesh, scheme = list(testbed.PLACEMENTS.values())[index]
    module, inputs = testbed.transformer("long")
    plan = autopar.plan(
        module,
        inputs,
        cluster=cluster,
        mesh=tuple(map(int, mesh.split("x"))),
        scheme=scheme,
        optimizer="sgd",
    )
    tensor = {
        axis.name
        for position, axis in enumerate(plan.mesh)
        if "megatron" in (scheme.split(",") * 2)[position]
    }
    for name, parameter in plan.parameters.items():
        if len(parameter.shape) == 2:
            split = {
                axis.name
                for axis, kind in zip(plan.mesh, parse_layout(parameter.storage), strict=True)
                if kind.kind is Kind.SPLIT
            }
            assert split == tensor, name
    assert {axis.level for axis in plan.mesh} == (
        {"loopback:2+nic:2"} if mesh == "4" else {"loopback", "nic"}
    )
