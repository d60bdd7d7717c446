"""Every command of the documents is parsed by what it calls, and those that this machine can run
are run, as are the blocks of Python.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch.distributed.run import get_args_parser

from autopar.cli import run
from autopar.cli.parser import build_parser
from autopar.runtime.launch import run_ranks
from tests.documents import (
    INSTEAD,
    NOT_RUN,
    PAGES,
    ROOT,
    Command,
    blocks,
    commands,
    is_whole,
    subcommands,
    to_run,
)
from tests.examples.test_examples import example

EVERY = [command for page in PAGES for command in commands(page)]


def _options(words: list[str]) -> set[str]:
    """The options of an `autopar` command."""
    parser: Any = build_parser()
    for word in words[1:]:
        (nested,) = [action for action in parser._actions if isinstance(action.choices, dict)] or (
            None,
        )
        if nested is None or word not in nested.choices:
            break
        parser = nested.choices[word]
    return set(parser._option_string_actions)


def _why_not(command: Command) -> str:
    """The error in a command; nothing where what it calls takes it."""
    words = command.words
    match words[0]:
        case "make":
            phony = re.search(
                r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            return "" if phony and words[1] in phony[1].split() else "no target of the Makefile"
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
                "project"
            ]["optional-dependencies"]
            named = set(re.findall(r"\[(\w+)\]", command.text))
            return (
                ""
                if words[1] == "install" and named <= set(extras)
                else "no extra of pyproject.toml"
            )
        case "torchrun":
            with contextlib.suppress(SystemExit):
                get_args_parser().parse_args(words[1:])
                return ""
            return "torchrun does not take it"
        case "autopar" if not command.mentioned:
            return "" if is_whole(words) else "the parser does not take it"
        case "autopar":
            given = {word.split("=")[0] for word in words if word.startswith("-")}
            return (
                ""
                if words[1] in subcommands() and given <= _options(words)
                else f"no options: {given - _options(words)}"
            )
        case "python":
            program = [word for word in words if word.endswith(".py")]
            return (
                ""
                if words[1] == "-m" or program == ["script.py"] or (ROOT / program[0]).is_file()
                else "no such program"
            )
    return "" if command.text.startswith("git clone") else "an unknown program"


def test_every_command_is_taken() -> None:
    assert len(EVERY) > 80
    assert not {
        f"{command.page}: {command.text}": why for command in EVERY if (why := _why_not(command))
    }


def test_the_tables_say_nothing_of_what_is_not_there() -> None:
    for begin in NOT_RUN:
        assert any(command.text.startswith(begin) for command in EVERY), begin
    for old in INSTEAD:
        assert any(old in command.text for command in EVERY), old
    left = [command.text for command in EVERY if not command.mentioned and to_run(command) is None]
    assert all(any(text.startswith(begin) for begin in NOT_RUN) for text in left), left


# --- what they are run in ---

OPS = """
import torch
import autopar

{block}
    return x * weight

@scaled.register_fake
def _(x, weight):
    return torch.empty_like(x)

def example():
    return scaled, (torch.randn(6, 6, 12), torch.randn(12))
"""
BEGINNING = """
import os
import sys
import torch
from torch.utils.data import DataLoader
import autopar
from net import build

torch.manual_seed(0)
net, (tokens, labels) = build()
dataset = [(torch.randn(64), i % 10) for i in range(64)]


def warm_up(step):
    return min(1.0, (step + 1) / 4)


"""


def _block(page: str, language: str, number: int = 0) -> str:
    return [block.text for block in blocks(ROOT / page) if block.language == language][number]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the pages speak of."""
    from transformers import GPT2Config, LlamaConfig

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for page in ("docs/tutorial.md", "docs/how-to.md"):
        for block in blocks(ROOT / page):
            if block.file:
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    _write_models(tmp_path)
    sizes: dict[str, Any] = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": 256,
        "n_positions": 128,
    }
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    large: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    LlamaConfig(**large, num_key_value_heads=4, vocab_size=256).save_pretrained(tmp_path / "path")
    training = (
        _block("docs/training.md", "toml")
        .replace("steps = 10000", "steps = 3")
        .replace("sequence = 128", "sequence = 16")
    )
    (tmp_path / "gpt.toml").write_text(
        training.replace("batch = 32", "batch = 4"), encoding="utf-8"
    )
    (tmp_path / "book.txt").write_text("A text that is read byte by byte. " * 200, encoding="ascii")
    (tmp_path / "script.py").write_text(_script(), encoding="utf-8")
    (tmp_path / "mixed.yaml").write_text(
        _indented("docs/clusters.md", "name: mixed"), encoding="utf-8"
    )
    yield tmp_path
    for module in ("net", "theirs", "package", "package.module", "mypackage", "mypackage.ops"):
        sys.modules.pop(module, None)


def _script() -> str:
    """The script of the page on training, with something to train, and few steps."""
    text = BEGINNING + _block("docs/training.md", "python").replace("10_000", "4").replace(
        "save_every=500", "save_every=2"
    )
    return text.replace('"runs/one"', '"runs/script"')


def _write_models(folder: Path) -> None:
    small: dict[str, Any] = {
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "vocabulary": 64,
        "positions": 64,
    }
    example("gpt2_onnx").write_gpt2(folder / "gpt2.onnx", **small)
    example("gpt2_onnx").write_gpt2(folder / "model.onnx", **small, batch=8, sequence=16)
    for package, text in (
        ("package/module", (folder / "theirs.py").read_text(encoding="utf-8")),
        ("mypackage/ops", _operators()),
    ):
        (folder / package).parent.mkdir()
        (folder / package).parent.joinpath("__init__.py").touch()
        (folder / f"{package}.py").write_text(text, encoding="utf-8")


def _operators() -> str:
    block = _block("docs/operators-of-your-own.md", "python").rstrip()
    assert block.endswith(": ...")
    # Discovery finds the rule of an operator that has none.
    plain = block.removesuffix(" ...")
    return OPS.format(block=plain[plain.index("@torch.library") :])


def _indented(page: str, begin: str) -> str:
    """An indented block of a page, from the line that begins so."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line == f"    {begin}")
    stop = next(
        number
        for number, line in enumerate(lines)
        if number > start and line and not line.startswith("    ")
    )
    return "\n".join(line[4:] for line in lines[start:stop]) + "\n"


def _outside(words: list[str], folder: Path) -> None:
    program = (
        [sys.executable, "-m", "torch.distributed.run"]
        if words[0] == "torchrun"
        else [sys.executable]
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path])),
    }
    if words[0] == "torchrun":
        program.append("--standalone")
    done = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    nothing_there = (
        words[:3] == ["python", "-m", "pytest"]
        and done.returncode == 0
        and "skipped" in done.stdout
    )
    assert done.returncode == 0 or nothing_there, (
        f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )


def _execute(words: list[str], folder: Path) -> None:
    if words[0] != "autopar":
        _outside(words, folder)
        return
    code = run(words[1:])
    assert not code, f"{' '.join(words)}: {code}"


BEFORE: dict[str, list[str]] = {
    "README.md": [
        "autopar plan model.onnx --cluster dgx-h100 --devices 8 --batch 8 --scheme data "
        "--no-compare --quiet -o other.json"
    ],
    "converting.md": [
        "autopar plan net:build --cluster dgx-h100 --devices 4 --no-compare --quiet -o plan.json"
    ],
    "reading-plans.md": [
        "autopar plan net:build --cluster dgx-h100 --devices 4 --no-compare --quiet -o plan.json",
        "autopar plan net:build --cluster dgx-h100 --devices 4 --scheme zero1 --no-compare "
        "--quiet -o zero1.json",
    ],
    "search.md": [
        "autopar plan net:build --cluster dgx-h100 --devices 4 --no-compare --quiet -o plan.json"
    ],
    "stalls.md": [
        "autopar plan net:build --cluster dgx-h100 --devices 4 --no-compare --quiet -o plan.json"
    ],
    "training.md": [
        "autopar plan net:build --cluster local-cpu --devices 2 --no-compare --quiet -o plan.json"
    ],
}
"""Files that a page takes for granted."""
RUN = sorted(
    {command.page for command in EVERY if command.page not in ("tutorial.md",) and to_run(command)}
)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("page", RUN)
def test_commands_are_run(place: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page."""
    for text in BEFORE.get(page, []):
        _execute(text.split(), place)
    for command in EVERY:
        if command.page == page and (words := to_run(command)):
            _execute(words, place)


# --- blocks of Python ---

AROUND = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import autopar


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


torch.manual_seed(0)
config = 16
module = Model(config)
batch = torch.randn(8, 16)
dataset = [torch.randn(16) for _ in range(40)]
plan = autopar.plan(module, (batch,), devices=2, cluster="local-cpu", scheme="zero3")
plan.save("plan.json")
"""
TRAINED = (("README.md", 1), ("docs/running.md", 1), ("docs/running.md", 2), ("docs/running.md", 3))
SHORTER = {", 1000, save)": ", 4, save)", "% 100 == 0": "% 2 == 0"}


def test_every_block_of_python_is_in_one_of_these_tables() -> None:
    actual = {
        page.relative_to(ROOT).as_posix(): sum(block.language == "python" for block in blocks(page))
        for page in PAGES
    }
    assert {page: count for page, count in actual.items() if count} == {
        "README.md": 2,
        "docs/running.md": 4,
        "docs/training.md": 2,
        "docs/operators-of-your-own.md": 1,
        "docs/tutorial.md": 2,
        "docs/how-to.md": 1,
    }


@pytest.mark.slow
@pytest.mark.ci
def test_a_plan_in_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {_block(page, "python") for page in ("README.md", "docs/running.md")}
    for text in texts:
        (place / "plan.json").unlink(missing_ok=True)
        exec(text, {})
        assert (place / "plan.json").is_file() and float(capsys.readouterr().out.split()[0]) > 0


def _run_blocks() -> list[float]:
    """Run each block on this rank, in the code around it; return the losses of their modules."""
    losses = []
    for page, number in TRAINED:
        scope: dict[str, Any] = {}
        exec(AROUND, scope)
        if (page, number) == ("docs/running.md", 2):  # goes on where the block before it ends
            exec(_block("docs/running.md", "python", 1), scope)
        text = _block(page, "python", number)
        for old, new in SHORTER.items():
            text = text.replace(old, new)
        exec(text, scope)
        losses.append(float(scope["module"].loss(scope["batch"])))
    return losses


@pytest.mark.slow
@pytest.mark.ci
def test_blocks_of_a_training_script(place: Path) -> None:
    """On two ranks."""
    scope: dict[str, Any] = {}
    exec(AROUND, scope)
    (place / "folder").mkdir()
    save_file(dict(scope["module"].state_dict()), place / "folder" / "model.safetensors")
    first, second = run_ranks(_run_blocks, 2, timeout=120)
    assert first == second and len(first) == len(TRAINED)
    assert {path.name for path in (place / "runs" / "one").iterdir()} == {
        "latest",
        "step-00000002",
        "step-00000004",
        "training.lock",
    }


def _profiled() -> list[str]:
    scope: dict[str, Any] = {}
    exec(_script(), scope)
    exec(_block("docs/training.md", "python", 1), scope)
    return [row.part for row in scope["found"].rows]


@pytest.mark.slow
@pytest.mark.ci
def test_an_elastic_training_and_its_profile(place: Path) -> None:
    assert "forward" in run_ranks(_profiled, 2, timeout=120)[0]
    assert (place / "trace.json").is_file() and (place / "runs" / "script" / "latest").is_file()


def test_the_rule_of_contributing_is_one() -> None:
    (line,) = re.findall(
        r"^    (register\(.*)$",
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert any(
        line in path.read_text(encoding="utf-8")
        for path in (ROOT / "autopar" / "sharding" / "rules").glob("*.py")
    ), line
