"""The tree of a shell script: commands, chains, conditions, loops, cases and functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .lexer import Lexer, Token, unreadable

DEPTH = 50
"""Conditions, loops and groups inside one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simple:
    """A command with its words as they are written; a test or an assignment is one, too."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Commands of which each runs if the one before did (&&) or failed (||)."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class If:
    """Branches with their conditions, and what is done otherwise."""

    branches: tuple[tuple[Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class For:
    """A loop over words; `name` is empty where the loop counts."""

    name: str
    words: tuple[str, ...]
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class While:
    """A loop as long as its condition holds, or until it does."""

    condition: Body
    body: Body
    until: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A word, and what is done if it matches patterns."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Body], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function with its name."""

    name: str
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Commands in brackets."""

    body: Body


Node = Simple | Chain | If | For | While | Case | Function | Group
Body = tuple[Node, ...]


def parsed(text: str, line: int = 1) -> Body:
    """The tree of a text whose first line has this number."""
    parser = _Parser(list(Lexer(text, line).tokens()))
    body = parser.body(())
    if parser.token is not None:
        raise unreadable(parser.token.line, f"{parser.token.text!r} closes nothing")
    return body


class _Parser:
    """Reads tokens from left to right, once."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    @property
    def token(self) -> Token | None:
        """The next token; None at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def body(self, ends: tuple[str, ...]) -> Body:
        """Commands up to a word or operator that ends them."""
        self._depth += 1
        if self._depth > DEPTH:
            raise unreadable(self._line, f"more than {DEPTH} conditions and loops in one another")
        nodes: list[Node] = []
        while (token := self.token) is not None and token.text not in ends:
            if token.is_operator and token.text in (";", "\n", "&", "|"):
                self._at += 1
            elif token.is_operator and token.text in (")", ";;", "&&", "||"):
                break
            else:
                nodes.append(self._chain())
        self._depth -= 1
        return tuple(nodes)

    def _chain(self) -> Node:
        first = self._node()
        rest: list[tuple[str, Node]] = []
        while self._is_operator("&&", "||"):
            operator = self._next().text
            self._skip_lines()
            rest.append((operator, self._node()))
        return Chain(first=first, rest=tuple(rest)) if rest else first

    def _node(self) -> Node:
        token = self.token
        if token is None:
            raise unreadable(self._line, "a command is missing at the end")
        made = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": self._group,
            "(": self._group,
        }.get(token.text)
        return self._simple() if made is None else made()

    def _simple(self) -> Node:
        line = self._line
        words: list[str] = []
        while (token := self.token) is not None:
            # Operators of a test are words of it.
            is_inside = words[:1] == ["[["] and words[-1] != "]]" and token.text != "\n"
            if token.is_operator and not is_inside:
                break
            words.append(self._next().text)
        if len(words) == 1 and self._is_operator("("):
            self._next()
            self._expect(")")
            self._skip_lines()
            return Function(name=words[0], body=(self._node(),))
        if not words:
            raise unreadable(line, f"{self._next().text!r} begins no command")
        return Simple(words=tuple(words), line=line)

    def _if(self) -> Node:
        branches: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        while self._next().text != "fi":
            if self._tokens[self._at - 1].text == "else":
                otherwise = self.body(("fi",))
                continue
            condition = self.body(("then",))
            self._expect("then")
            branches.append((condition, self.body(("elif", "else", "fi"))))
        return If(branches=tuple(branches), otherwise=otherwise)

    def _for(self) -> Node:
        self._next()
        name = self._next().text
        words: list[str] = []
        if self.token is not None and self.token.text == "in":
            self._next()
            while self.token is not None and not self.token.is_operator:
                words.append(self._next().text)
        elif not name.startswith("(("):
            words = ['"$@"']
        return For(
            name="" if name.startswith("((") else name, words=tuple(words), body=self._loop()
        )

    def _while(self) -> Node:
        until = self._next().text == "until"
        condition = self.body(("do",))
        return While(condition=condition, body=self._loop(), until=until)

    def _loop(self) -> Body:
        while self._is_operator(";", "\n"):
            self._next()
        self._expect("do")
        body = self.body(("done",))
        self._expect("done")
        return body

    def _case(self) -> Node:
        self._next()
        word = self._next().text
        self._skip_lines()
        self._expect("in")
        self._skip_lines()
        branches: list[tuple[tuple[str, ...], Body]] = []
        while self.token is not None and self.token.text != "esac":
            patterns: list[str] = []
            while (text := self._next().text) != ")":
                patterns += [part for part in text.split("|") if part and text != "("]
            branches.append((tuple(patterns), self.body((";;", "esac"))))
            if self._is_operator(";;"):
                self._next()
            self._skip_lines()
        self._expect("esac")
        return Case(word=word, branches=tuple(branches))

    def _function(self) -> Node:
        self._next()
        name = self._next().text
        if self._is_operator("("):
            self._next()
            self._expect(")")
        self._skip_lines()
        return Function(name=name, body=(self._node(),))

    def _group(self) -> Node:
        closing = {"{": "}", "(": ")"}[self._next().text]
        body = self.body((closing,))
        self._expect(closing)
        return Group(body=body)

    @property
    def _line(self) -> int:
        token = self.token or (self._tokens[-1] if self._tokens else None)
        return 1 if token is None else token.line

    def _is_operator(self, *texts: str) -> bool:
        token = self.token
        return token is not None and token.is_operator and token.text in texts

    def _next(self) -> Token:
        token = self.token
        if token is None:
            raise unreadable(self._line, "the script ends inside of a condition or loop")
        self._at += 1
        return token

    def _expect(self, text: str) -> None:
        line = self._line
        if self._next().text != text:
            raise unreadable(line, f"{text} is missing")

    def _skip_lines(self) -> None:
        while self._is_operator("\n"):
            self._at += 1
