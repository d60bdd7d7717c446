"""The scripts that complete the command line: bash runs its own; the others are parsed where their
shells are installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from autopar.cli.completion import SHELLS, commands_of, completion_script
from autopar.cli.parser import build_parser
from autopar.errors import UsageError

FILES = {"file.json", "my plan.json", "runs"}
COMMANDS = {command.name: command for command in commands_of(build_parser())}
# The words so far, the last of which is completed, and what it may be.
ROWS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "commands": (
        ("autopar", "c"),
        {"compare", "convert", "cache", "calibrate", "checkpoint", "cluster", "completion"},
    ),
    "no file is a command": (("autopar", "file"), set()),
    "options of autopar": (("autopar", "--v"), {"--verbose", "--version"}),
    "options": (("autopar", "explain", "--a"), {"--alternatives"}),
    "options after a file": (("autopar", "explain", "file.json", "--d"), {"--diff"}),
    "all options": (("autopar", "convert", "-"), set(COMMANDS["convert"].options)),
    "choices": (("autopar", "plan", "m.onnx", "--mode", ""), {"train", "infer"}),
    "choices that begin so": (
        ("autopar", "plan", "--dtype", "f"),
        {"float32", "float16", "float64"},
    ),
    "choices after a sign": (("autopar", "plan", "--mode", "=", "tr"), {"train"}),
    "choices at a sign": (("autopar", "plan", "--mode", "="), {"train", "infer"}),
    "files": (("autopar", "explain", ""), FILES),
    "files that begin so": (("autopar", "explain", "my"), {"my plan.json"}),
    "files of an option": (("autopar", "explain", "file.json", "--diff", "f"), {"file.json"}),
    "files of a short option": (("autopar", "plan", "m.onnx", "-o", "ru"), {"runs"}),
    "what only the user knows": (("autopar", "plan", "--devices", ""), set()),
    "commands of commands": (("autopar", "cluster", ""), {"list", "show"}),
    "options of these": (("autopar", "cluster", "show", "--"), {"--help", "--devices", "--json"}),
    "a file called as a command": (("autopar", "convert", "plan", "--t"), {"--to"}),
    "shells": (("autopar", "completion", ""), {"bash", "zsh", "fish"}),
}
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def _bash(program: str, folder: Path, *words: str) -> str:
    script = folder.parent / "autopar.bash"
    script.write_text(completion_script("bash", build_parser()), encoding="utf-8")
    command = ["bash", "--norc", "-euc", f"source {script}; {program}", "bash", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shell") / "here"
    (path / "runs").mkdir(parents=True)
    for name in FILES - {"runs"}:
        (path / name).touch()
    return path


@needs_bash
def test_bash_knows_the_command(folder: Path) -> None:
    assert _bash("complete -p autopar", folder) == "complete -F _autopar autopar\n"


@needs_bash
@pytest.mark.parametrize("name", ROWS)
def test_bash_completes(name: str, folder: Path) -> None:
    words, wanted = ROWS[name]
    program = (
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); set +eu; _autopar; printf '
        '"%s\\n" "${COMPREPLY[@]}"'
    )
    actual = _bash(program, folder, *words).splitlines()
    assert sorted(filter(None, actual)) == sorted(wanted)


def test_commands_are_those_of_the_parser() -> None:
    parser = build_parser()
    (action,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert COMMANDS[""].next == tuple(action.choices)
    assert {name.split()[0] for name in COMMANDS if name} == set(action.choices)
    for command in COMMANDS.values():
        assert {*command.values, *command.paths, *command.free} <= set(command.options)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_option_is_in_every_script(shell: str) -> None:
    script = completion_script(shell, build_parser())
    for command in COMMANDS.values():
        for spelled in command.options:
            assert (
                f"-l {spelled[2:]}" if shell == "fish" and spelled.startswith("--") else spelled
            ) in script or len(spelled) == 2
    assert script == completion_script(shell, build_parser())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_parses_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(completion_script(shell, build_parser()), encoding="utf-8")
    subprocess.run([shell, "-n", str(script)], check=True, capture_output=True)


def test_an_unknown_shell_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"valid are bash, zsh, fish. Perhaps you meant 'zsh'"):
        completion_script("zhs", build_parser())
