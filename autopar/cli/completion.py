"""Completion in shells: scripts made from the parser, which run without Python."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError, unknown

_FILES = {"FILE", "FOLDER", "PLAN", "PLAN2", "MODEL", "CONFIG", "NEW"}
"""The help's words for a file or folder."""
_PLAIN = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The words of a command (none: autopar itself), and the words that may follow.

    `next`: subcommands or choices. `files`: file names may follow. `options`: all spellings.
    Options with a value are in `values` (with its choices), in `paths` (a file), or in `free` (any
    text).
    """

    name: str
    options: tuple[str, ...]
    next: tuple[str, ...]
    files: bool
    values: dict[str, tuple[str, ...]]
    paths: tuple[str, ...]
    free: tuple[str, ...]


def shell_named(name: str) -> str:
    """Check that a shell has a script; `UsageError` if not."""
    if name not in SHELLS:
        raise UsageError(unknown("shell", name, SHELLS))
    return name


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for a shell."""
    return SHELLS[shell_named(shell)](parser.prog, tuple(commands_of(parser))) + "\n"


def commands_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """The commands of a parser and of all parsers below it, in the order of the help."""
    told = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    named = [action for action in told if action.option_strings]
    placed = [action for action in parser._actions if not action.option_strings]
    valued = [
        (spelled, action)
        for action in named
        if action.nargs != 0
        for spelled in action.option_strings
    ]
    values = {
        spelled: tuple(map(str, action.choices)) for spelled, action in valued if action.choices
    }
    paths = tuple(
        spelled for spelled, action in valued if spelled not in values and _is_file(action)
    )
    command = Command(
        name=" ".join(words),
        options=tuple(spelled for action in named for spelled in action.option_strings),
        next=tuple(str(choice) for action in placed for choice in action.choices or ()),
        files=any(map(_is_file, placed)),
        values=values,
        paths=paths,
        free=tuple(
            spelled for spelled, _ in valued if spelled not in values and spelled not in paths
        ),
    )
    # No word needs quoting in any of the shells.
    assert all(
        _PLAIN.fullmatch(word)
        for word in (
            *command.options,
            *command.next,
            *(word for held in values.values() for word in held),
        )
    )
    yield command
    for action in placed:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands_of(child, (*words, name))


def _is_file(action: argparse.Action) -> bool:
    return bool(_FILES & set(str(action.metavar or "").split("|")))


def _patterns(names: Iterable[str]) -> str:
    """The alternatives of a `case` branch."""
    return " | ".join(f'"{name}"' for name in names)


def _paths(commands: Iterable[Command]) -> list[str]:
    """Every command after its parent: " plan", "cluster show"."""
    return [
        command.name if " " in command.name else f" {command.name}"
        for command in commands
        if command.name
    ]


def _cases(
    commands: Iterable[Command], words: Callable[[Iterable[str]], str], files: str
) -> Iterator[str]:
    """The branches of a `case` over command and previous word.

    They offer the possible values of an option.
    """
    for command in commands:
        for spelled, choices in command.values.items():
            yield f'        "{command.name} {spelled}") {words(choices)}; return ;;'
        for names, action in ((command.paths, f"{files}; return"), (command.free, "return")):
            if names:
                yield (
                    f"        {_patterns(f'{command.name} {spelled}' for spelled in names)}) "
                    f"{action} ;;"
                )


def _following(
    commands: Iterable[Command], words: Callable[[Iterable[str]], str], files: str
) -> Iterator[str]:
    """The branches of a `case` over the command.

    They offer the words that may stand in place of an option.
    """
    for command in commands:
        offers = [words(command.next)] if command.next else []
        if command.files:
            offers.append(files)
        if offers:
            yield f'        "{command.name}") {"; ".join(offers)} ;;'


def _offered(
    commands: tuple[Command, ...],
    words: Callable[[Iterable[str]], str],
    files: str,
    options: Sequence[str],
) -> Iterator[str]:
    """The completions of bash and zsh for `word` after `previous`."""
    yield from ('    case "$command $previous" in', *_cases(commands, words, files), "    esac")
    yield from ('    if [[ $word == -* ]]; then case "$command" in', *options)
    yield from (
        '    esac; else case "$command" in',
        *_following(commands, words, files),
        "    esac; fi",
    )


def _bash(program: str, commands: tuple[Command, ...]) -> str:
    """The script for bash, which reads `--option=value` as three words."""

    def words(choices: Iterable[str]) -> str:
        return f'COMPREPLY+=($(compgen -W "{" ".join(choices)}" -- "$word"))'

    files = f"_{program}_files"
    options = [f'        "{command.name}") {words(command.options)} ;;' for command in commands]
    return "\n".join(
        [
            f"# Completion of {program} in bash: source it, or write it to a file of "
            "bash-completion's folder.",
            f"{files}() {{",
            "    local found",
            "    compopt -o filenames 2>/dev/null",
            '    while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen -f -- '
            '"$word")',
            "}",
            f"_{program}() {{",
            "    local IFS=$' \\t\\n' command= index",
            '    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '    if [[ $word == "=" ]]; then word=',
            '    elif [[ $previous == "=" ]]; then previous="${COMP_WORDS[COMP_CWORD-2]}"; fi',
            "    COMPREPLY=()",
            "    for ((index = 1; index < COMP_CWORD; index++)); do",
            '        case "$command ${COMP_WORDS[index]}" in',
            f"            {_patterns(_paths(commands))})"
            ' command="${command:+$command }${COMP_WORDS[index]}" ;;',
            "        esac",
            "    done",
            *_offered(commands, words, files, options),
            "}",
            f"complete -F _{program} {program}",
        ]
    )


def _zsh(program: str, commands: tuple[Command, ...]) -> str:
    def words(choices: Iterable[str]) -> str:
        return f"compadd -- {' '.join(choices)}"

    options = [f'        "{command.name}") {words(command.options)} ;;' for command in commands]
    return "\n".join(
        [
            f"#compdef {program}",
            f"# Completion of {program} in zsh: source it after compinit, or write it to "
            f"_{program} in a folder of fpath.",
            f"_{program}() {{",
            '    local command= index word="${words[CURRENT]}" previous="${words[CURRENT-1]}"',
            '    if [[ $word == --*=* ]]; then previous="${word%%=*}"; compset -P "*="; fi',
            "    for ((index = 2; index < CURRENT; index++)); do",
            '        case "$command ${words[index]}" in',
            f"            {_patterns(_paths(commands))})"
            ' command="${command:+$command }${words[index]}" ;;',
            "        esac",
            "    done",
            *_offered(commands, words, "_files", options),
            "}",
            f'if [[ "${{funcstack[1]}}" == _{program} ]]; then _{program} "$@"; else compdef '
            f"_{program} {program}; fi",
        ]
    )


def _fish(program: str, commands: tuple[Command, ...]) -> str:
    lines = [
        f"# Completion of {program} in fish: source it, or write it to {program}.fish in fish's "
        "folder of completions.",
        f"function __{program}_command",
        "    set -l command",
        "    for word in (commandline -opc)",
        '        switch "$command $word"',
        f"            case {' '.join(repr(path) for path in _paths(commands))}",
        "                set command $command $word",
        "        end",
        "    end",
        '    echo "$command"',
        "end",
        f"function __{program}_at",
        f"    set -l found (__{program}_command)",
        '    test "$found" = "$argv"',
        "end",
        f"complete -c {program} -f",
    ]
    for command in commands:
        at = f"__{program}_at {command.name}".rstrip()
        start = f"complete -c {program} -n '{at}'"
        if command.next:
            lines.append(f"{start} -a '{' '.join(command.next)}'")
        if command.files:
            lines.append(f"{start} -F")
        for spelled in command.options:
            flag = f"-l {spelled[2:]}" if spelled.startswith("--") else f"-s {spelled[1:]}"
            lines.append(f"{start} {flag}{_fish_value(command, spelled)}")
    return "\n".join(lines)


def _fish_value(command: Command, spelled: str) -> str:
    """The flags of fish for the value of an option, if it takes one."""
    if spelled in command.values:
        return f" -x -a '{' '.join(command.values[spelled])}'"
    if spelled in command.paths:
        return " -r -F"
    return " -x" if spelled in command.free else ""


SHELLS: dict[str, Callable[[str, tuple[Command, ...]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
"""The function that makes the script of each shell."""
