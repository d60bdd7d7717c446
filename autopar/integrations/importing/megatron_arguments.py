"""The arguments of the one run that a text of Megatron-LM's starts, by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.printable import printable

from .shell import Script, Started, is_known

LISTS = ("recompute-modules", "cuda-graph-scope")
"""Arguments with several words."""
COMMON = frozenset({"bf16", "fp16", "optimizer", "seq-length", "world-size"})
"""Arguments that other programs have, too: they alone make no run of Megatron's."""
_EACH = "nproc-per-node"
_LAUNCHED = re.compile(rf"(?<!\S)--({_EACH}|nnodes)[ =]([1-9]\d{{0,5}})(?!\S)")
"""Numbers of torchrun's; ranges of nodes, and what a caller gives, are none."""
LAUNCHER = frozenset(
    {
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "standalone"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "max-restarts", "log-dir", "tee"),
    }
)
"""Options of torchrun: they start the processes, and are no arguments of the run."""
_NAMES = re.compile(r"[A-Za-z_]\w*|(?<=[${])\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The arguments of a run by name, those without a value as "", and what was left out of it.

    `launched`: the processes that torchrun starts on all nodes, where the text shows that.
    """

    options: Mapping[str, str]
    lost: tuple[str, ...]
    launched: int | None = None


def run_of(text: str, read: Collection[str], given: Mapping[str, str] | None = None) -> Run:
    """The run in a script or a list of arguments.

    `read`: arguments that bear on the plan. Those whose value the script does not show are a
    `UsageError` that names the line and the variables; `given` has values for these.
    """
    script = Script(text, given)
    runs = [words_of([command]) for command in joined(script.commands)]
    runs = [options for options in runs if (set(options) & set(read)) - COMMON]
    if not runs:
        raise UsageError(_nothing(script, text))
    options = {name: value for name, value in runs[0].items() if name not in LAUNCHER}
    for other in runs[1:]:
        differ = sorted(name for name in read if options.get(name) != other.get(name))
        if differ:
            shown = ", ".join(f"--{name}" for name in differ[:4])
            raise UsageError(f"megatron: the script starts {len(runs)} runs that differ in {shown}")
    _require_known(options, read, text, script)
    return Run(
        options=options,
        lost=(*_conditional(script), *_sourced(script)),
        launched=_launched(joined(script.commands), read),
    )


def joined(commands: Sequence[Started]) -> list[Started]:
    """Commands, of which a line that begins with an argument belongs to the one before."""
    made: list[Started] = []
    for command in commands:
        if made and command.words[0].startswith("--"):
            words = (*made[-1].words, *command.words)
            made[-1] = Started(words=words, line=made[-1].line)
        else:
            made.append(command)
    return made


def words_of(commands: Iterable[Started]) -> dict[str, str]:
    r"""Options by name, those without a value as "".

    >>> words_of(Script("run x.py \\\n --bf16 --seq-length 2048 --optimizer=adam # why").commands)
    {'bf16': '', 'seq-length': '2048', 'optimizer': 'adam'}
    """
    options: dict[str, str] = {}
    for command in commands:
        last = ""
        for word in _parted(command.words):
            match = re.fullmatch(r"--([a-z0-9][a-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
            if match:
                last = match[1]
                options[last] = match[2] or ""
            # Only the first word behind a name is its value, unless it takes a list.
            elif last and (not options[last] or last in LISTS):
                options[last] = f"{options[last]} {word}".strip()
    return options


def _parted(words: Iterable[str]) -> list[str]:
    """Words, of which a quoted command is parted at its blanks."""
    made: list[str] = []
    for word in words:
        has_options = re.search(r"(^|\s)--[a-z]", word) is not None
        made += word.split() if has_options else [word]
    return made


def _launched(commands: Sequence[Started], read: Collection[str]) -> int | None:
    """The processes of the command that starts the run: those of a node times the nodes.

    >>> _launched(Script("torchrun --nproc-per-node 8 --nnodes=2 x.py --bf16").commands, {"bf16"})
    16
    """
    for command in commands:
        words = [word.replace("_", "-") for word in _parted(command.words)]
        if not any(word.split("=")[0].removeprefix("--") in read for word in words):
            continue
        text = " ".join(words)
        counts = {"nnodes": "" if "--nnodes" in text else "1", **dict(_LAUNCHED.findall(text))}
        if counts.get(_EACH) and counts["nnodes"]:
            return int(counts[_EACH]) * int(counts["nnodes"])
    return None


def line_of(text: str, argument: str) -> int:
    """The first line of a text that has an argument; 1 if it is in none."""
    lines = text.splitlines()
    pattern = re.compile(rf"--{re.escape(argument)}(?![\w-])")
    return next((at for at, line in enumerate(lines, 1) if pattern.search(line)), 1)


def _require_known(
    options: Mapping[str, str], read: Collection[str], text: str, script: Script
) -> None:
    unknown = [name for name in options if name in read and not is_known(options[name])]
    if not unknown:
        return
    said = "; ".join(
        f"line {line_of(text, name)}: --{name} is {options[name]}" for name in unknown[:6]
    )
    names = dict.fromkeys(part for name in unknown for part in _NAMES.findall(options[name]))
    asked = " ".join(f"--set {name}=VALUE" for name in names if not script.knows(name))
    how = f": give {asked}" if asked else ", which another program prints"
    raise UsageError(
        printable(
            f"megatron: {said}. The script leaves that to its caller, or to a condition{how}",
            lines=False,
        )
    )


def _nothing(script: Script, text: str) -> str:
    """The reason why a text holds no run."""
    said = "megatron: no command with arguments of Megatron-LM's is in it"
    for source in _sourced(script):
        return f"{said}; {source}"
    if re.search(r"--[a-z]", text) and not script.commands:
        return f"{said}; its variables are for another script"
    return said


def _sourced(script: Script) -> Iterator[str]:
    """A sentence on each file that the script reads: it may have arguments."""
    for source in script.sourced:
        shown = printable(" ".join(source.words), lines=False)
        yield f"line {source.line}: {shown} is not read, and may set more"


def _conditional(script: Script) -> list[str]:
    words = sorted(set(script.conditional))
    if not words:
        return []
    shown = printable(", ".join(words[:12]), lines=False)
    more = f" and {len(words) - 12} more" if len(words) > 12 else ""
    return [f"not taken over (under a condition of the script): {shown}{more}"]
