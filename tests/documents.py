"""Commands and blocks of code in the documents: where they stand, and what they are run with."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.cli.parser import build_parser
from autopar.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("autopar", "python", "torchrun", "make", "pip", "git")
_BLOCK = re.compile(r"^(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:autopar|torchrun|python|make|pip)\s[^`]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a page; `mentioned`: inside a sentence or a table, else on a line of its own, to
    be copied.
    """

    page: str
    text: str
    mentioned: bool

    @property
    def words(self) -> list[str]:
        """Its words, without the comment behind it and the file that it writes to."""
        words = shlex.split(self.text, comments=True)
        words = words[:2] if words[0] == "make" else words
        return words[: words.index(">")] if ">" in words else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page; `file`: the name that the page gives it."""

    page: str
    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    fences = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        Block(page=page.name, language=language, file=file, text=text)
        for file, language, text in fences
    ]


def commands(page: Path) -> Iterator[Command]:
    """Every command of a page."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language in ("sh", "text"):
            yield from (
                Command(page=page.name, text=line, mentioned=False)
                for line in block.text.splitlines()
                if _is_command(line)
            )
    rest = _BLOCK.sub("", text)
    for line in rest.splitlines():
        if line.startswith("    ") and _is_command(line.strip()):
            yield Command(page=page.name, text=line.strip(), mentioned=False)
    lines = "\n".join(line for line in rest.splitlines() if not line.startswith("    "))
    for span in _SPAN.findall(lines):
        command = Command(page=page.name, text=" ".join(span.split()), mentioned=True)
        if command.words[0] != "autopar" or command.words[1] in subcommands():
            yield command


def _is_command(line: str) -> bool:
    return line.split(" ")[0] in PROGRAMS and len(line.split()) > 1


def subcommands() -> set[str]:
    """The words behind `autopar`."""
    (subparsers,) = (
        action
        for action in build_parser()._actions
        if hasattr(action, "choices") and isinstance(action.choices, dict)
    )
    return set(subparsers.choices or ())


INSTEAD: dict[str, str] = {
    "model.onnx --devices 64": "model.onnx --devices 8",
    "--devices 1..64": "--devices 1..2",
    "convert plan.json --to torchtitan": "convert other.json --to torchtitan",
    "autopar calibrate": "autopar calibrate --quick --collectives all_reduce --tolerance 100",
    "bench collectives": "bench collectives --sizes 1KiB,64KiB --collectives all_reduce",
    "autopar doctor --json": "autopar doctor --quick --json",
    "plan net:build --devices 8 -o": "plan net:build --cluster local-cpu --devices 2 --no-compare "
    "--quiet -o",
    "autopar doctor": "autopar doctor --quick",
    "--count 1000": "--count 1",
    "--steps 20": "--steps 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "train config.toml": "train gpt.toml --ranks 2",
    "gpt.toml --ranks 4": "gpt.toml --ranks 2",
    "--cluster A --cluster B --price A=2.5": "--cluster dgx-h100 --cluster dgx-a100-80g "
    "--price dgx-h100=2.5",
    "explain PLAN OP": "explain PLAN up/linear",
    "autopar plan ... --discover": "autopar plan MODEL --cluster local-cpu --devices 2 "
    "--no-compare --quiet --discover",
    "compare M --devices N": "compare M --cluster local-cpu --devices 2",
    "what-if PLAN --model M ...": "what-if PLAN --model M --memory 1GiB",
    "run PLAN --model MODEL --steps 5": "run plan.json --model net:build --steps 2",
    "import CONFIG --model M": "import train_config.toml --model net:build --cluster dgx-h100",
    "verify CASE": "verify theirs:case",
    "cluster show NAME": "cluster show dgx-h100",
    "cluster show FILE": "cluster show mixed.yaml",
    "--diff PLAN2": "--diff zero1.json",
    "plan hf:path/config.json --batch 64 --seq 4096": "plan hf:path/config.json --batch 8 --seq 16 "
    "--devices 2 --cluster local-cpu",
    "python benchmarks/": f"python {ROOT}/benchmarks/",
    "python -m pytest -m gpu tests": f"python -m pytest -q -m gpu {ROOT}/tests/gpu/test_gpu.py",
}
"""What a test runs instead of a part of a command: where it would take long, or the page leaves a
word open.
"""
OPEN = {"PLAN": "plan.json", "MODEL": "net:build", "M": "net:build", "TARGET": "fsdp2"}
NOT_RUN: dict[str, str] = {
    "make demo": "runs what tests/cli/test_cli.py does with GPT-2, after an installation",
    "make test": "is what runs these tests",
    "make check": "is beside these tests in .ci/run",
    "make slow": "runs these tests",
    "make gpu": "needs a GPU; tests/gpu/test_report.py runs its parts",
    "make prove": "takes an hour; its parts are tests of tests/sharding",
    "make operators": "writes into the project; tests/sharding/test_operators_page.py holds the "
    "page",
    "pip install": "installs; tests/test_packaging.py holds the packages and extras",
    "git clone": "downloads",
    "torchrun --nnodes": "needs four machines; tests/examples/test_two_hosts.py runs two, emulated",
    "torchrun --nproc-per-node 2 examples/": "are run by tests/examples/test_examples.py",
    "python benchmarks/validation.py": "needs a folder of published measurements",
    "python benchmarks/fuzzing_guided.py": "needs atheris, which is in no extra",
}
"""Commands, by how they begin, that are parsed only, and why."""


def to_run(command: Command) -> list[str] | None:
    """The words that a test runs; None for what is parsed only."""
    if any(command.text.startswith(begin) for begin in NOT_RUN):
        return None
    text = command.text
    for old, new in INSTEAD.items():
        if old in text:
            text = text.replace(old, new)
            if old.startswith("autopar doctor"):
                break
    words = [
        OPEN.get(word, word)
        for word in Command(page=command.page, text=text, mentioned=command.mentioned).words
    ]
    if not command.mentioned:
        return words
    # A command that a sentence mentions is run where it is whole; a page of nothing but options
    # names them all.
    return (
        words
        if words[0] == "autopar" and command.page != "reference.md" and is_whole(words)
        else None
    )


def is_whole(words: list[str]) -> bool:
    """Whether the parser takes an `autopar` command as it is."""
    with (
        contextlib.suppress(SystemExit, UsageError),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        build_parser().parse_args(words[1:])
        return True
    return False
