"""Planning and reports need nothing that macOS or Windows lack; running ranks is refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import RunError
from tests.missing_on import WITHOUT_CALLS
from tests.product_code import PYPROJECT, ROOT
from tests.test_outputs import model  # noqa: F401

COMMANDS = (
    "plan MODEL --cluster dgx-h100 --devices 4 -o PLAN",
    "explain PLAN",
    "report PLAN --model MODEL -o PAGE",
)


def without(system: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process without what a system lacks; its output has no Unicode."""
    return subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-m", "tests.missing_on", system, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        encoding="cp1252",
        check=False,
    )


@pytest.mark.parametrize("system", WITHOUT_CALLS)
def test_every_module_of_planning_is_imported(system: str) -> None:
    done = without(system)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", WITHOUT_CALLS)
def test_a_plan_is_made_explained_and_reported(system: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    places = {"MODEL": model, "PLAN": tmp_path / "plan.json", "PAGE": tmp_path / "page.html"}
    for command in COMMANDS:
        done = without(system, *(str(places.get(word, word)) for word in command.split()))
        assert done.returncode == 0, (command, done.stderr)
    assert json.loads(places["PLAN"].read_text(encoding="utf-8"))["schema"]
    assert "</html>" in places["PAGE"].read_text(encoding="utf-8")


def test_the_package_names_the_systems() -> None:
    named = {
        name.rpartition(" :: ")[2]
        for name in PYPROJECT["project"]["classifiers"]
        if name.startswith("Operating System ::")
    }
    assert named == {"Linux", "MacOS", "Windows"}


def test_ranks_are_refused_where_nothing_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.launch import run_ranks

    monkeypatch.delattr(os, "fork")
    with pytest.raises(RunError, match="this system cannot fork, so no ranks run here"):
        run_ranks(print, 2)
