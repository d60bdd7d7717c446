"""The words and operators of a shell script, with their lines; quotes stay in the words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import UsageError

_OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")", "\n")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>|>&|<<<|<&|>|<)(?:&?\d(?=\s|$)|-)?")
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)(\w+)\2")
DOCUMENT = "<<"
"""Opens the word of a here-document."""
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A word, or an operator such as ; or the end of a line."""

    text: str
    line: int
    is_operator: bool = False


def unreadable(line: int, why: str) -> UsageError:
    """The error of a script that no shell reads."""
    return UsageError(f"megatron: the arguments cannot be read: line {line}: {why}")


class Lexer:
    """Reads a text from left to right, once."""

    def __init__(self, text: str, line: int = 1) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._behind_documents = 0

    def tokens(self) -> Iterator[Token]:
        """All tokens but redirections; a here-document is a word."""
        while self._at < len(self._text):
            rest = self._text[self._at : self._at + 2]
            if rest == "\\\n":
                self._skip(2)
            elif rest[0] in " \t\r":
                self._at += 1
            elif rest[0] == "#":
                self._at = self._end_of_line()
            elif (here := _HERE.match(self._text, self._at)) is not None:
                yield self._document(here)
            elif rest == "((":
                yield self._word()
            elif (match := _REDIRECTION.match(self._text, self._at)) is not None:
                self._redirect(match)
            else:
                yield self._operator() or self._word()

    def _operator(self) -> Token | None:
        for operator in _OPERATORS:
            if self._text.startswith(operator, self._at):
                token = Token(text=operator, line=self._line, is_operator=True)
                self._skip(len(operator))
                if operator == "\n":
                    self._skip_documents()
                return token
        return None

    def _redirect(self, match: re.Match[str]) -> None:
        """Leave a redirection out, with the file behind it."""
        self._at = match.end()
        if match[0][-1] in "<>":
            while self._text[self._at : self._at + 1] in (" ", "\t"):
                self._at += 1
            if self._text[self._at : self._at + 1] not in ("", "\n"):
                self._word()

    def _document(self, here: re.Match[str]) -> Token:
        """The word of a here-document; its lines begin behind the line read last."""
        self._at = here.end()
        start = max(self._end_of_line() + 1, self._behind_documents)
        ends = re.compile(rf"^\s*{re.escape(here[3])}[ \t]*$", re.MULTILINE)
        end = ends.search(self._text, min(start, len(self._text)))
        text = self._text[start : end.start() if end is not None else None]
        self._behind_documents = end.end() + 1 if end is not None else len(self._text)
        return Token(text=DOCUMENT + text, line=self._line)

    def _skip_documents(self) -> None:
        """Leave out the lines of documents that begin behind the line read last."""
        if self._behind_documents:
            self._skip(min(self._behind_documents, len(self._text)) - self._at)
            self._behind_documents = 0

    def _word(self) -> Token:
        start = self._at
        line = self._line
        if self._text.startswith("((", start):
            self._nested("(")
        while self._at < len(self._text):
            mark = self._text[self._at]
            opens_array = mark == "(" and _ARRAY.match(self._text[start : self._at])
            if opens_array:
                self._nested("(")
            # Lists of arguments that are no script have bars in their words.
            elif mark in " \t\r\n;&<>()" or (mark == "|" and self._at == start):
                break
            else:
                self._part()
        if self._at == start:
            raise unreadable(line, f"{self._text[start]!r} begins no word")
        return Token(text=self._text[start : self._at], line=line)

    def _part(self) -> None:
        """Go beyond one character, or what is quoted or nested from here on."""
        pair = self._text[self._at : self._at + 2]
        if pair[0] == "\\":
            self._skip(2)
        elif pair[0] in "'`":
            self._skip(self._closing(pair[0]) + 1 - self._at)
        elif pair[0] == '"':
            self._quoted()
        elif pair in ("$(", "${"):
            self._at += 1
            self._nested(pair[1])
        else:
            self._skip(1)

    def _closing(self, mark: str) -> int:
        end = self._text.find(mark, self._at + 1)
        if end < 0:
            raise unreadable(self._line, f"{mark} does not end")
        return end

    def _quoted(self) -> None:
        line = self._line
        self._at += 1
        while self._text[self._at : self._at + 1] != '"':
            if self._at >= len(self._text):
                raise unreadable(line, '" does not end')
            if self._text[self._at] == "'":
                self._at += 1
            else:
                self._part()
        self._at += 1

    def _nested(self, opening: str) -> None:
        """Go beyond brackets, with what is quoted or commented in them."""
        line = self._line
        depth = 0
        while True:
            mark = self._text[self._at : self._at + 1]
            if not mark:
                raise unreadable(line, f"{opening} does not end")
            depth += (mark == opening) - (mark == _CLOSING[opening])
            if depth == 0:
                self._at += 1
                return
            if mark == "#" and opening == "(" and self._text[self._at - 1] in " \t\n":
                self._at = self._end_of_line()
            elif mark in "({":
                self._at += 1
            else:
                self._part()

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count
