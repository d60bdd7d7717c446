"""Golden texts: what plans and operators look like in print. `UPDATE_GOLDEN=1 pytest tests/report`
writes them anew.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from report_models import MEGATRON, planned

from autopar.plan_origin import cluster_of_plan
from autopar.report.explain.explanation import Explained
from autopar.report.plan_output import planned_parts
from autopar.report.tables import Table, show, summary_lines

GOLDEN = Path(__file__).parent / "golden"
PLANS: dict[str, dict[str, object]] = {
    "data": {"scheme": "data", "pins": ("*MatMul=gpu:m",)},
    "zero3": {"scheme": "zero3", "pins": ("*MatMul=gpu:m",)},
    "megatron": {"pins": MEGATRON},
    "infer": {"pins": MEGATRON, "mode": "infer"},
    "stages": {
        "layers": 4,
        "mesh": (2,),
        "scheme": "data",
        "stages": 2,
        "micro_batches": 4,
        "schedule": "1f1b",
        "recompute": "none",
        "zero": 0,
    },
    "accumulated": {"scheme": "data", "micro_batches": 2, "zero": 2},
    "two_axes": {
        "mesh": (2, 2),
        "pins": ("*/up/*=gpu0:m,gpu1:n", "*/act/*=gpu0:d0,gpu1:d1", "*/down/*=gpu0:m,gpu1:k"),
    },
}


def _text(parts: list[str | Table]) -> str:
    """The printed text; seconds and the memory are blanked, as the cost model may change."""
    out = io.StringIO()
    show(parts, out)
    text = re.sub(r"^memory .*$", "memory BYTES", out.getvalue(), flags=re.MULTILINE)
    text = re.sub(
        r"^(interval|assumed|speed|memory limit|this machine) .*$",
        r"\1 ...",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"\d[\d.]* (s|ms|us|ns)\b", "TIME", text)
    text = re.sub(r"[+-]?\d[\d.]*(%|x)( |$)", r"RATIO\2", text, flags=re.MULTILINE)
    return "\n".join(re.sub(r"  +", "  ", line).rstrip() for line in text.splitlines()) + "\n"


def _check(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_printed_plan(name: str) -> None:
    _check(
        f"plan_{name}",
        _text(planned_parts(planned(**PLANS[name]), compare=False, memory=None, saved="plan.json")),
    )


@pytest.mark.parametrize("name", ["zero3", "megatron"])
def test_explained_operator(name: str) -> None:
    planned_model = planned(**PLANS[name])
    explained = Explained.of_model(
        planned_model.plan, planned_model.model.graph, planned_model.cluster, "layers.1/down"
    )
    _check(f"explain_{name}", _text(explained.parts()))


def test_explained_from_the_file_alone() -> None:
    plan = planned(**PLANS["megatron"]).plan
    _check(
        "explain_file",
        _text(
            [
                *Explained.of_file(plan, None).parts(),
                *Explained.of_file(plan, "layers.1/down").parts(),
            ]
        ),
    )


def test_a_terminal_gets_the_same_cells() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    show([Table(title="T", columns=("a", ">b"), rows=(("[x]", "1"),))], out)
    assert "[x]" in out.getvalue() and "1" in out.getvalue()


def test_a_plan_that_leaves_devices_idle_has_its_whole_cluster_and_says_how_to_use_it() -> None:
    plan = planned(**PLANS["data"]).plan
    idle = plan.model_copy(update={"unused": plan.devices})
    assert cluster_of_plan(idle).devices == 2 * cluster_of_plan(plan).devices
    said = f"{plan.devices} are left idle, which is faster (--mesh {2 * plan.devices} uses all)"
    assert any(said in line for line in summary_lines(idle, ""))
