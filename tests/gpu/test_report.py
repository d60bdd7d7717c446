"""The report of `make gpu`: nothing without a GPU, and its parts, here on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import report
from tests.gpu.report import NONE, Part, main, run_part, written
from tests.product_code import ROOT
from tests.runtime.processes import alive

MINIMAL = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "pydantic", "pydantic_core")
"""What a machine must have; beside it lies what these packages need themselves."""
BESIDE = (
    *("typing_extensions.py", "typing_inspection", "annotated_types", "sympy", "mpmath"),
    *("networkx", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools"),
)


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


def test_without_a_gpu_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "gpus", lambda: 0)
    monkeypatch.setattr(report, "run_part", lambda *arguments: pytest.fail("a part was run"))
    path = tmp_path / "report.md"
    assert main(["-o", str(path)]) == 0
    assert capsys.readouterr().out.strip() == NONE and not path.exists()


@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, report.FAILED)])
def test_with_gpus_all_parts_run(
    right: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def ran(name: str, ranks: int, device: str) -> Part:
        asked.append((name, ranks, device))
        row = {"what": "a step", "ok": right, "said": "a|b", "unit": "s"}
        rows = [row | {"measured": 0.5, "predicted": 0.25}]
        return Part(name=name, ranks=ranks, rows=rows, failure="")

    monkeypatch.setattr(report, "gpus", lambda: 4)
    monkeypatch.setattr(report, "run_part", ran)
    path = tmp_path / "report.md"
    assert main(["-o", str(path)]) == code
    assert asked == [
        ("kernels", 0, "cuda"),
        ("one device", 0, "cuda"),
        ("gloo", 2, "cuda"),
        ("nccl", 4, "cuda"),
    ]
    text = path.read_text(encoding="utf-8")
    word = "yes" if right else "NO"
    assert text.count(f"| a step | {word} | 500 ms | 250 ms | a/b |") == 4


def test_a_part_that_fails_or_hangs_says_so() -> None:
    failed = run_part("no such part", 0, "cpu")
    assert not failed.ok and "exit code 1" in failed.failure and "KeyError" in failed.failure
    hung = run_part("kernels", 0, "cpu", seconds=0.2)
    assert not hung.ok and "not finished after 0.2 s" in hung.failure
    text = written([replace(failed, name="gloo")])
    assert "NOT all right" in text and "KeyError" in text


def test_a_killed_report_leaves_no_part_behind(tmp_path: Path) -> None:
    program = "from tests.gpu.report import run_part; run_part('kernels', 0, 'cpu')"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    deadline = time.monotonic() + 60
    while not (part := _children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    while alive(part[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(part[0])


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


SLOW = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize(
    ("name", "ranks", "rows"),
    [
        ("one device", 0, 3),
        pytest.param("kernels", 0, 15, marks=SLOW),
        pytest.param("gloo", 2, 5, marks=SLOW),
        pytest.param("nccl", 2, 13, marks=SLOW),
    ],
)
def test_parts_run(name: str, ranks: int, rows: int) -> None:
    """The lines that run on GPUs, with the CPU for the device and Gloo for NCCL."""
    part = run_part(name, ranks, "cpu")
    assert part.ok, part
    assert len(part.rows) == rows
    timed = [row for row in part.rows if row["unit"] == "s"]
    assert all(row["measured"] > 0.0 for row in timed)


@pytest.mark.slow
@pytest.mark.ci
def test_torch_numpy_and_pydantic_are_enough(tmp_path: Path) -> None:
    """A machine with GPUs has a torch of its own, and often no network."""
    packages = Path(next(path for path in sys.path if (Path(path) / "torch").is_dir()))
    for name in (*MINIMAL, *BESIDE):
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tests.gpu.sections", "one device", "cpu", "rows.json"],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows.json").is_file()


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "NEEDED", ("numpy", "no_such_module"))
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert main([]) == 0 and capsys.readouterr().out.strip() == NONE
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}")
    assert main([]) == 2
    said = capsys.readouterr().out
    assert "has no no_such_module: make gpu GPU_PYTHON=" in said and "PYTHONPATH" in said


def test_make_runs_it(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "gpu", "GPU_PYTHON=python-of-the-machine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python-of-the-machine -m tests.gpu.report" in done.stdout and "pip" not in done.stdout
