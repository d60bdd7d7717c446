"""The variables of a shell script, and words with them; what nobody set stays as it is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.errors import UsageError
from autopar.file_limits import CONFIGURATION_BYTES

from .arithmetic import counted

ARGUMENTS = 100
"""The most arguments of a script."""
_NAMED = re.compile(r"\$(?:([A-Za-z_]\w*|[0-9@*#])|\{((?:[^{}]|\$\{[^{}]*\})*)\})")
_INSIDE = re.compile(
    r"(?P<size>#)?(?P<name>[A-Za-z_]\w*|\d+|[@*#])(?:\[(?P<place>[^\]]*)\])?"
    r"(?:(?P<how>:?[-=+])(?P<other>.*))?",
    re.DOTALL,
)
_PIECE = re.compile(
    r"""'(?P<plain>[^']*)'|\\(?P<escaped>.)|(?P<sum>\$\(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\))
    |(?P<command>\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`)
    |(?P<variable>\$(?:[A-Za-z_]\w*|[0-9@*#]|\{(?:[^{}]|\$\{[^{}]*\})*\}))""",
    re.DOTALL | re.VERBOSE,
)
_UNKNOWN = re.compile(r"\$|`")


def is_known(text: str) -> bool:
    """Whether a text holds nothing that a caller or another program gives."""
    return _UNKNOWN.search(text) is None


class Variables:
    """The variables of a script while it is read.

    `given`: values that its caller gives, by name; the first argument's name is 1. `unsure`: names
    that were set under a condition of which nothing is known.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        numbers = [int(name) for name in given if name.isdecimal() and int(name) <= ARGUMENTS]
        count = max(numbers, default=0)
        self.arguments = [given.get(str(at + 1), f"${at + 1}") for at in range(count)]
        self.unsure: set[str] = set()
        self._values = {name: [value] for name, value in given.items() if not name.isdecimal()}
        self._given = frozenset(self._values)
        self._room = CONFIGURATION_BYTES

    def set(self, name: str, words: list[str], *, added: bool = False) -> None:
        """Set a variable, unless its caller did."""
        if name not in self._given:
            self.unsure.discard(name)
            self._values[name] = [*self._values.get(name, []), *words] if added else words

    def forget(self, name: str) -> None:
        """Make a variable one that has either of several values."""
        if name not in self._given:
            self._values.pop(name, None)
            self.unsure.add(name)

    def unset(self, name: str) -> bool:
        """Whether nobody set a variable, or an argument of the script."""
        if name.isdecimal():
            return int(name) > len(self.arguments)
        return name not in self._values and name not in self.unsure

    def words(self, written: Sequence[str]) -> list[str]:
        """Words as a command gets them: a variable without quotes may become several."""
        return [word for text in written for word in self._word(text)]

    def text(self, written: str) -> str:
        """One word as a text, whatever blanks are in it."""
        return "".join(
            piece if is_quoted else " ".join(self._expanded(piece))
            for piece, is_quoted in self._pieces(written)
        )

    def _word(self, written: str) -> list[str]:
        made = [""]
        has_quotes = False
        for piece, is_quoted in self._pieces(written):
            has_quotes = has_quotes or is_quoted
            parts = [piece] if is_quoted else self._expanded(piece)
            if not parts:
                continue
            made[-1] += parts[0]
            made += parts[1:]
        return made if has_quotes or made != [""] else []

    def _pieces(self, written: str) -> list[tuple[str, bool]]:
        """The parts of a word, each whole and quoted, or still to be expanded."""
        if written == '"$@"' or re.fullmatch(r'"\$\{\w+\[@\]\}"', written):
            held = self._held(written[1:-1])
            if held is not None:
                # Each element stays one word, whatever blanks are in it.
                return [(_MARK.join(held), False)] if held else []
        pieces: list[tuple[str, bool]] = []
        for part, quoted in _quotes(written):
            at = 0
            for match in _PIECE.finditer(part):
                if quoted and (match["plain"] is not None or match["escaped"] not in _ESCAPED):
                    continue
                pieces.append((part[at : match.start()], quoted))
                pieces.append(self._piece(match, quoted))
                at = match.end()
            pieces.append((part[at:], quoted))
        return [(text, quoted) for text, quoted in pieces if text or quoted]

    def _piece(self, match: re.Match[str], quoted: bool) -> tuple[str, bool]:
        if match["plain"] is not None:
            return match["plain"], True
        if match["escaped"] is not None:
            return ("" if match["escaped"] == "\n" else match["escaped"]), True
        if match["sum"] is not None:
            return self._sum(match["sum"]), True
        if match["command"] is not None:
            return match["command"], True
        held = self._held(match["variable"])
        if held is None:
            return match["variable"], True
        return (" ".join(held), True) if quoted else (" ".join(held), False)

    def _expanded(self, piece: str) -> list[str]:
        if _MARK in piece:
            return piece.split(_MARK)
        words = piece.split()
        # Blanks at an end part the words before and behind.
        if words and piece[:1].isspace():
            words.insert(0, "")
        return words

    def _held(self, reference: str) -> list[str] | None:
        """The value of `$NAME` or `${NAME...}`; None where it is not known."""
        named = _NAMED.fullmatch(reference)
        inside = _INSIDE.fullmatch(named[1] or named[2] or "") if named is not None else None
        if inside is None:
            return None
        held = self._value(inside["name"], inside["place"])
        if inside["size"]:
            return None if held is None else [str(len(held))]
        if inside["how"]:
            return self._alternative(inside, held)
        return held

    def _alternative(self, inside: re.Match[str], held: list[str] | None) -> list[str] | None:
        name = inside["name"]
        if held is None and not self.unset(name):
            return None
        is_set = bool(held) and (inside["how"][0] != ":" or held != [""])
        if inside["how"][-1] == "+":
            return [self.text(inside["other"])] if is_set else []
        if is_set:
            return held
        other = [self.text(inside["other"])]
        if inside["how"][-1] == "=":
            self.set(name, other)
        return other

    def _value(self, name: str, place: str | None) -> list[str] | None:
        """The words of a variable, an argument or all arguments; None where they are not known."""
        held = self._words_of(name, place)
        if held is not None:
            self._charge(sum(map(len, held)) + len(held))
        return held

    def _words_of(self, name: str, place: str | None) -> list[str] | None:
        if name in "@*":
            return self.arguments
        if name == "#":
            return [str(len(self.arguments))]
        if name.isdecimal():
            # The name of the script itself is not known.
            number = int(name)
            return [self.arguments[number - 1]] if 0 < number <= len(self.arguments) else None
        held = self._values.get(name)
        if held is None:
            return None
        if place is None or place in ("@", "*"):
            return held
        at = counted(self._bare(place))
        return [held[at]] if at is not None and -len(held) <= at < len(held) else None

    def _charge(self, characters: int) -> None:
        # A variable that holds another one twice doubles it, line by line.
        self._room -= characters
        if self._room < 0:
            raise UsageError(
                f"megatron: the arguments cannot be read: variables come to more than "
                f"{CONFIGURATION_BYTES} characters"
            )

    def _sum(self, written: str) -> str:
        """The value of a sum; as it is written where it has none, in one word."""
        value = self.counted(written[3:-2])
        return "".join(written.split()) if value is None else str(value)

    def counted(self, written: str) -> int | None:
        """The number of an expression with variables, with or without $."""
        return counted(self._bare(self.text(written)))

    def _bare(self, text: str) -> str:
        def named(match: re.Match[str]) -> str:
            held = self._value(match[0], None)
            return match[0] if held is None else " ".join(held)

        return re.sub(r"\b[A-Za-z_]\w*\b", named, text)


_MARK = "\0"
_ESCAPED = (None, '"', "\\", "$", "`", "\n")


def _quotes(written: str) -> list[tuple[str, bool]]:
    """The parts of a word outside and inside of double quotes."""
    parts: list[tuple[str, bool]] = []
    quoted = False
    start = at = 0
    while at < len(written):
        match = _PIECE.match(written, at)
        if match is not None and not (quoted and match["plain"] is not None):
            at = match.end()
        elif written[at] == '"':
            parts.append((written[start:at], quoted))
            quoted = not quoted
            at += 1
            start = at
        else:
            at += 1
    return [*parts, (written[start:], quoted)]
