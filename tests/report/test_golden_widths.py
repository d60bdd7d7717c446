"""The output of the command line at 80 and 120 columns, as files (`python
tests/report/test_golden_widths.py` writes them anew).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from report_models import perceptrons

from autopar.cli import run

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 120)
PLANNED = ["--cluster", "dgx-h100", "--devices", "4", "--stages", "1", "--mesh", "4"]
COMMANDS = {
    "help": ["--help"],
    "help_plan": ["plan", "--help"],
    "help_compare": ["compare", "--help"],
    "help_explain": ["explain", "--help"],
    "help_report": ["report", "--help"],
    "help_import": ["import", "--help"],
    "help_what_if": ["what-if", "--help"],
    "help_completion": ["completion", "--help"],
    "help_verify": ["verify", "--help"],
    "plan": ["plan", "MODEL", *PLANNED, "--scheme", "megatron", "--no-compare"],
    "explain": ["explain", "PLAN"],
    "explain_operator": ["explain", "PLAN", "layers.0/up/MatMul", "--model", "MODEL"],
    "explain_collectives": ["explain", "PLAN", "--collectives", "--model", "MODEL"],
    "explain_stalls": ["explain", "PLAN", "--stalls", "--model", "MODEL"],
    "explain_diff": ["explain", "PLAN", "--diff", "OTHER"],
    "compare": [
        "compare",
        "MODEL",
        "--cluster",
        "dgx-h100",
        "--devices",
        "1",
        "--scheme",
        "data",
        "--scheme",
        "expert",
    ],
    "scaling": [
        "compare",
        "MODEL",
        "--devices",
        "1",
        "--cluster",
        "dgx-h100",
        "--cluster",
        "dgx-a100-80g",
        "--price",
        "dgx-h100=2",
    ],
}
# What changes with the machine, or with the constants of the cost model, is no matter of width.
_FIGURES = (
    (re.compile(r"this machine can[^\n]*(?:\n  [^\n]*)*"), "this machine ..."),
    (re.compile(r"\d[\d,.]*(?= ?(?:s|ms|us|ns|KiB|MiB|GiB|B|%|x)\b)"), "#"),
    (re.compile(r"(?<= )\d+\.\d+(?:e[-+]\d+)?"), "#"),
    (re.compile(r"(?<= )\d{1,3}(?:,\d{3})+"), "#"),
    (re.compile(r"(?<= )[-+]\d[\d,.]*%"), "#"),
)


def printed(command: list[str], width: int, folder: Path) -> str:
    """The output of a command, its figures left out."""
    paths = {
        "MODEL": str(folder / "model.onnx"),
        "PLAN": str(folder / "plan.json"),
        "OTHER": str(folder / "other.json"),
    }
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run([paths.get(word, word) for word in command])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue().replace(str(folder) + "/", "")


def _shown(name: str, text: str) -> str:
    if name.startswith("help"):
        return text
    for pattern, instead in _FIGURES:
        text = pattern.sub(instead, text)
    return (
        "\n".join(
            re.sub(r" {2,}", "  ", line.rstrip()) if "#" in line else line.rstrip()
            for line in text.splitlines()
        )
        + "\n"
    )


def made(folder: Path) -> None:
    """The model and two plans of it."""
    onnx.save(perceptrons(), str(folder / "model.onnx"))
    for name, scheme in (("plan", "megatron"), ("other", "data")):
        words = ["--scheme", scheme, "--no-compare", "--quiet", "-o", str(folder / f"{name}.json")]
        run(["plan", str(folder / "model.onnx"), *PLANNED, *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("golden")
    made(path)
    yield path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_are_as_they_were(name: str, width: int, folder: Path) -> None:
    if "--help" in COMMANDS[name] and sys.version_info >= (3, 13):
        pytest.skip("argparse words its help otherwise from Python 3.13 on")
    text = printed(COMMANDS[name], width, folder)
    # Examples stand in one line, to be copied, and argparse breaks no list of values.
    long = [
        line
        for line in text.splitlines()
        if len(line) > width and not re.match(r"  autopar | +\[?--\w+ \{|  --", line)
    ]
    assert not long
    assert _shown(name, text) == (GOLDEN / f"{name}_{width}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    os.environ["AUTOPAR_CACHE"] = ""
    with tempfile.TemporaryDirectory() as scratch:
        made(Path(scratch))
        for name, command in COMMANDS.items():
            for width in WIDTHS:
                (GOLDEN / f"{name}_{width}.txt").write_text(
                    _shown(name, printed(command, width, Path(scratch))), encoding="utf-8"
                )
