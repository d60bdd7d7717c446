"""A shell script, read by the values that it sets: which commands it starts, with which words.

Nothing is executed. A condition is decided where all in it was set in the script or is given;
where it is not, what it sets is unsure, and what it adds is left out and told.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .conditions import both, either, inverse, is_test, truth
from .lexer import DOCUMENT, Lexer, unreadable
from .syntax import Body, Case, Chain, For, Function, Group, If, Node, Simple, While, parsed
from .variables import Variables, is_known

STEPS = 20_000
"""Commands that are read before a script counts as one that does not end."""
DEPTH = 20
"""Functions that call one another."""
_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SHELLS = ("sbatch", "bash", "sh", "srun")
"""Programs that run the lines that they are given."""
_DECLARING = ("export", "local", "readonly", "declare", "typeset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A command with its words, and the line on which it begins."""

    words: tuple[str, ...]
    line: int


class Script:
    """A script that has been read.

    `given`: values of its variables that its caller gives, of its arguments by their numbers.
    `commands`: those that it starts. `conditional`: options that are set or added under a condition
    of which nothing is known, and so are left out. `sourced`: other scripts that it reads.
    """

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        self.commands: list[Started] = []
        self.conditional: list[str] = []
        self.sourced: list[Started] = []
        self.variables = Variables(given or {})
        self._functions: dict[str, Body] = {}
        self._calls = 0
        self._steps = 0
        self._is_sure = True
        self._is_over = False
        try:
            self._run(parsed(text))
        except RecursionError:
            raise unreadable(
                1, "commands, tests or functions are too deep in one another"
            ) from None

    def knows(self, name: str) -> bool:
        """Whether a variable has one value at the end."""
        return is_known(self.variables.text(f"${{{name}}}"))

    def _run(self, body: Body) -> None:
        for node in body:
            if self._is_over:
                return
            self._count()
            self._do(node)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > STEPS:
            raise unreadable(1, f"more than {STEPS} commands are run")

    def _do(self, node: Node) -> None:
        if isinstance(node, Simple):
            self._simple(node)
        elif isinstance(node, Group):
            self._run(node.body)
        elif isinstance(node, Function):
            self._functions[node.name] = node.body
        elif isinstance(node, Chain):
            self._chain(node)
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, For):
            self._for(node)
        elif isinstance(node, While):
            self._while(node)
        else:
            self._case(node)

    def _perhaps(self, value: bool | None, body: Body) -> None:
        """Read commands that are run if a value is true."""
        if value:
            self._run(body)
        elif value is None:
            was_sure = self._is_sure
            self._is_sure = False
            self._run(body)
            self._is_sure = was_sure

    def _truth(self, body: Body) -> bool | None:
        """Whether the last of the commands succeeds."""
        for node in body[:-1]:
            self._do(node)
        return self._success(body[-1]) if body else True

    def _success(self, node: Node) -> bool | None:
        if isinstance(node, Simple):
            return truth(node.words, self.variables)
        if isinstance(node, Chain):
            value = self._success(node.first)
            for operator, other in node.rest:
                if operator == "&&":
                    value = False if value is False else both(value, self._success(other))
                else:
                    value = True if value else either(value, self._success(other))
            return value
        return self._truth(node.body) if isinstance(node, Group) else None

    def _chain(self, chain: Chain) -> None:
        value = self._assumed(chain.first)
        for operator, node in chain.rest:
            goes_on = value if operator == "&&" else inverse(value)
            self._perhaps(goes_on, (node,) if not _is_test(node) else ())
            if goes_on is not False:
                value = self._assumed(node, is_done=True)

    def _assumed(self, node: Node, *, is_done: bool = False) -> bool | None:
        """Whether a command of a chain succeeds; all but tests do."""
        if _is_test(node):
            return self._success(node)
        if not is_done:
            self._do(node)
        return True

    def _if(self, node: If) -> None:
        before: bool | None = False
        for condition, body in node.branches:
            value = self._truth(condition)
            self._perhaps(both(inverse(before), value), body)
            before = either(before, value)
            if before:
                return
        self._perhaps(inverse(before), node.otherwise)

    def _for(self, node: For) -> None:
        words = self.variables.words(node.words)
        if not node.name or not all(map(is_known, words)):
            if node.name:
                self.variables.forget(node.name)
            self._perhaps(None, node.body)
            return
        for word in words:
            self._set(node.name, [word])
            self._run(node.body)

    def _while(self, node: While) -> None:
        while not self._is_over:
            self._count()
            value = self._truth(node.condition)
            value = inverse(value) if node.until else value
            if value is False:
                return
            self._perhaps(value, node.body)
            if value is None:
                return

    def _case(self, node: Case) -> None:
        word = self.variables.text(node.word)
        for patterns, body in node.branches:
            if not is_known(word):
                self._perhaps(None, body)
            elif any(
                fnmatch.fnmatchcase(word, self.variables.text(pattern)) for pattern in patterns
            ):
                self._run(body)
                return

    def _simple(self, node: Simple) -> None:
        words = [word for word in node.words if not word.startswith(DOCUMENT)]
        documents = [word for word in node.words if word.startswith(DOCUMENT)]
        if documents and words[:1] and words[0] in _SHELLS:
            self._run(parsed(documents[0].removeprefix(DOCUMENT), node.line + 1))
            return
        if not words:
            return
        if words[0] in _DECLARING:
            words = [word for word in words[1:] if _SET.match(word)]
            if not words:
                return
        settings = 0
        while settings < len(words) and _SET.match(words[settings]):
            settings += 1
        for word in words[:settings]:
            self._assign(word, node.line)
        if settings < len(words):
            # What is set for one command alone is read with it.
            set_here = [self.variables.text(word) for word in words[:settings]]
            self._command([*set_here, *self.variables.words(words[settings:])], settings, node)

    def _command(self, words: list[str], settings: int, node: Simple) -> None:
        name, *arguments = words[settings:] or [""]
        if name in self._functions:
            self._call(name, arguments)
        elif name in ("exit", "return"):
            # A script that ends in failure asks for what its caller has.
            self._is_over = self._is_sure and arguments[:1] in ([], ["0"]) and name == "exit"
        elif name == "shift":
            count = int(arguments[0]) if arguments and arguments[0].isdecimal() else 1
            del self.variables.arguments[:count]
        elif name == "eval":
            self._run(parsed(" ".join(arguments), node.line))
        elif name in (".", "source"):
            self.sourced.append(Started(words=tuple(node.words), line=node.line))
        elif name in ("unset", "read"):
            for argument in arguments:
                self.variables.forget(argument)
        elif not is_test(name):
            self.commands.append(Started(words=tuple(words), line=node.line))

    def _call(self, name: str, arguments: list[str]) -> None:
        """Read a function with arguments of its own."""
        if self._calls >= DEPTH:
            raise unreadable(1, f"{name} calls itself")
        outer = self.variables.arguments
        self.variables.arguments = arguments
        self._calls += 1
        self._run(self._functions[name])
        self._calls -= 1
        self.variables.arguments = outer

    def _assign(self, word: str, line: int) -> None:
        match = _SET.match(word)
        assert match is not None
        value = word[match.end() :]
        if value.startswith("("):
            written = [
                token.text for token in Lexer(value[1:-1], line).tokens() if not token.is_operator
            ]
            self._set(match[1], self.variables.words(written), added=bool(match[2]))
        else:
            text = self.variables.text(value)
            if match[2]:
                self._set(match[1], [self.variables.text(f"${{{match[1]}:-}}") + text])
            else:
                self._set(match[1], [text])

    def _set(self, name: str, words: list[str], *, added: bool = False) -> None:
        if self._is_sure:
            self.variables.set(name, words, added=added)
            return
        before = self.variables.text(f"${{{name}:-}}")
        after = " ".join(words)
        if before and after.startswith(before):
            # A text that goes on with more words is an addition, too.
            added = True
            after = after.removeprefix(before)
        self.conditional += [part for part in after.split() if part.startswith("--")]
        # Whichever branch is taken, an option must not get a value by chance.
        if not added:
            self.variables.forget(name)


def _is_test(node: Node) -> bool:
    return isinstance(node, Simple) and is_test(node.words[0])
