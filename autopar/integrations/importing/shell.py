"""The commands of a shell script as words, with the variables and arrays that it sets.

NAME=value, NAME=(words), NAME+=(words), $NAME, ${NAME:-default}, ${NAME[@]}, $((a * b)). Nothing is
executed: what a caller or another program gives stays as it is written, as $NAME.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

from autopar.errors import UsageError
from autopar.file_limits import CONFIGURATION_BYTES

LARGEST = 2**63
"""The numbers of a shell have 64 bits."""
LINES = 500
"""The most lines of one statement."""
_SET = re.compile(r"(?:(?:export|local|readonly|declare(?:\s+-\w+)*)\s+)?([A-Za-z_]\w*)(\+?)=")
_NAMED = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*|\d)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}")
_COUNTED = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_OPENS = ("if", "for", "while", "until", "case")
_CLOSES = ("fi", "done", "esac")
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Script:
    """A script that has been read.

    `commands`: the words of each command that is always run. `conditional`: words that are set or
    added under a condition, and so are left out.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[list[str]] = []
        self.conditional: list[str] = []
        self._values: dict[str, list[str]] = {}
        self._depth = 0
        self._room = CONFIGURATION_BYTES
        for statement in _statements(text):
            # Blanks in a sum part no words.
            self._read(_COUNTED.sub(self._number, statement))

    def _read(self, statement: str) -> None:
        first = re.match(r"[a-z]+", statement)
        word = first[0] if first else ""
        if word in _OPENS:
            self._depth += 1
        elif word in _CLOSES:
            self._depth -= 1
        elif (match := _SET.match(statement)) is not None:
            self._set(match[1], statement[match.end() :], added=bool(match[2]))
        elif word in ("then", "do", "else") and statement[len(word) :].strip():
            self._read(statement[len(word) :].strip())
        elif statement:
            self.commands.append(self._expanded(_split(statement)))

    def _set(self, name: str, text: str, *, added: bool) -> None:
        """Set a variable; a command behind a value is read, too."""
        if text.startswith("("):
            if ")" not in text:
                raise UsageError(f"megatron: the arguments cannot be read: {name}=( does not end")
            words = self._expanded(_split(text[1 : text.rindex(")")]))
        else:
            value, *command = _split(text) or [""]
            words = self._expanded([value])
            if command:
                self.commands.append([f"{name}={value}", *self._expanded(command)])
        if self._depth > 0:
            self.conditional += [word for word in words if word.startswith("--")]
            # Whichever branch is taken, an option must not get a value by chance.
            if not added:
                self._values.pop(name, None)
            return
        self._values[name] = [*self._values.get(name, []), *words] if added else words

    def _expanded(self, words: list[str]) -> list[str]:
        """Words with their variables; a word that is one variable may become several."""
        made: list[str] = []
        for word in words:
            whole = _NAMED.fullmatch(word)
            held = self._held(whole) if whole is not None else None
            if held is not None:
                made += [part for one in held for part in one.split()]
            else:
                made.append(self._in_text(word))
        return made

    def _held(self, match: re.Match[str]) -> list[str] | None:
        default = match[3]
        held = self._values.get(match[1] or match[2])
        if held is None:
            return None if default is None else [default.strip("\"'")]
        # A variable that holds another one twice doubles it, line by line.
        self._room -= sum(map(len, held))
        if self._room < 0:
            raise UsageError(
                f"megatron: the arguments cannot be read: variables come to more than "
                f"{CONFIGURATION_BYTES} characters"
            )
        return held

    def _in_text(self, word: str) -> str:
        def named(match: re.Match[str]) -> str:
            held = self._held(match)
            return match[0] if held is None else " ".join(held)

        return _NAMED.sub(named, word)

    def _number(self, match: re.Match[str]) -> str:
        """The value of a sum; as it is written where it has none."""
        bare = re.sub(r"\b([A-Za-z_]\w*)\b", self._bare, self._in_text(match[1]))
        value = _counted(bare)
        return match[0] if value is None else str(value)

    def _bare(self, match: re.Match[str]) -> str:
        return " ".join(self._values.get(match[1], [match[1]]))


def _counted(text: str) -> int | None:
    """The value of a sum or product of whole numbers; None for anything else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        number = value(ast.parse(text.strip(), mode="eval").body)
        return number if abs(number) < LARGEST else None
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"megatron: the arguments cannot be read: {error}") from error


def _statements(text: str) -> Iterator[str]:
    """The statements of a script, each on one line but for arrays and quoted texts."""
    lines = text.replace("\\\n", " ").splitlines()
    held: list[str] = []
    for line in lines:
        held.append(line)
        whole = "\n".join(held)
        if not _is_open(whole) or len(held) >= LINES:
            held = []
            # Semicolons part statements outside of arrays and quotes.
            yield from (whole,) if "\n" in whole else _parted(whole)
    if held:
        yield "\n".join(held).strip()


def _parted(line: str) -> Iterator[str]:
    parts = [line] if '"' in line or "'" in line or "#" in line else re.split(r";(?!;)", line)
    yield from (part.strip() for part in parts if part.strip())


def _is_open(text: str) -> bool:
    """Whether an array or a quoted text goes on in the next line."""
    stripped = text.strip()
    match = _SET.match(stripped)
    bare = re.sub(r"#[^\n]*", "", stripped)
    if match is not None and stripped[match.end() :].startswith("("):
        return not bare.rstrip().endswith(")")
    try:
        shlex.split(stripped, comments=True)
    except ValueError:
        return True
    return False
