"""Zsh and fish execute their completion scripts, and offer what bash does."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_completion import FILES, ROWS

from autopar.cli.completion import completion_script
from autopar.cli.parser import build_parser

needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
SECONDS = 20
# Completes the line in the file $LINE when Ctrl-T is pressed, and writes what is offered to the
# file $OUT, whole.
ZSHRC = r"""
PS1='' PROMPT_EOL_MARK=''
unsetopt beep
autoload -Uz compinit && compinit -u -D
source $SCRIPT
typeset -ga offered
compadd() {
    local -a found
    builtin compadd -A found "$@"
    offered+=("${found[@]}")
    builtin compadd "$@"
}
written() { print -rl -- "${(Q)offered[@]}" >| $OUT.part; mv $OUT.part $OUT }
completed() {
    BUFFER=''
    LBUFFER="$(<$LINE)"
    offered=()
    comppostfuncs=(written)
    zle complete-word
    BUFFER=''
}
zle -N completed
bindkey '^T' completed
print ready >| $OUT
"""


def _line(words: tuple[str, ...]) -> str:
    """The words as they are typed; an equals sign stands between an option and its value."""
    return " ".join(words).replace(" = ", "=").removesuffix(" =") + (
        "=" if words[-1] == "=" else ""
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shells") / "here"
    (path / "runs").mkdir(parents=True)
    for name in FILES - {"runs"}:
        (path / name).touch()
    for shell in ("zsh", "fish"):
        (path.parent / f"script.{shell}").write_text(
            completion_script(shell, build_parser()), encoding="utf-8"
        )
    return path


@needs_fish
@pytest.mark.parametrize("name", ROWS)
def test_fish_completes(name: str, folder: Path) -> None:
    words, wanted = ROWS[name]
    program = f"source {folder.parent}/script.fish; complete -C $argv[1]"
    command = ["fish", "--no-config", "-c", program, "--", _line(words)]
    actual = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout.splitlines()
    assert sorted(
        line.partition("\t")[0].rpartition("=")[2].rstrip("/") for line in actual
    ) == sorted(wanted)


class Zsh:
    """An interactive zsh, which has read its script."""

    def __init__(self, folder: Path) -> None:
        self.out = folder.parent / "out"
        self.line = folder.parent / "line"
        (folder.parent / ".zshrc").write_text(ZSHRC)
        more = {
            "ZDOTDIR": str(folder.parent),
            "OUT": str(self.out),
            "LINE": str(self.line),
            "TERM": "dumb",
        }
        environment = {**os.environ, **more, "SCRIPT": str(folder.parent / "script.zsh")}
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-i", "-d"], environment)
        assert self._written() == ["ready"]

    def completed(self, line: str) -> list[str]:
        """The words that are offered at the end of a line."""
        self.line.write_text(line)
        os.write(self.terminal, b"\x14")
        return self._written()

    def _written(self) -> list[str]:
        """The lines of the file, once it is there; meanwhile what the terminal shows is read, so
        that zsh does not wait.
        """
        end = time.monotonic() + SECONDS
        while not self.out.exists():
            assert time.monotonic() < end, "zsh does not answer"
            if select.select([self.terminal], [], [], 0.01)[0]:
                os.read(self.terminal, 4096)
        lines = self.out.read_text().splitlines()
        self.out.unlink()
        return list(filter(None, lines))

    def close(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def zsh(folder: Path) -> Iterator[Zsh]:
    shell = Zsh(folder)
    yield shell
    shell.close()


@needs_zsh
@pytest.mark.parametrize("name", ROWS)
def test_zsh_completes(name: str, zsh: Zsh) -> None:
    words, wanted = ROWS[name]
    assert set(zsh.completed(_line(words))) == wanted
