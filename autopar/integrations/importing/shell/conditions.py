"""The truth of a shell's tests; None where it depends on a caller, a file or another program."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from .variables import Variables, is_known

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_OPENINGS = ("[", "[[", "test")


def truth(words: Sequence[str], variables: Variables) -> bool | None:
    """Whether a command succeeds: a test by its operands, true and false by their names."""
    if words[0] in ("true", ":"):
        return True
    if words[0] == "false":
        return False
    if words[0].startswith("((") and words[0].endswith("))"):
        value = variables.counted(words[0][2:-2])
        return None if value is None else value != 0
    if words[0] == "!":
        return inverse(truth(words[1:], variables)) if words[1:] else None
    if words[0] in _OPENINGS:
        return _any(words[1 : -1 if words[-1] in ("]", "]]") else None], variables)
    return None


def is_test(word: str) -> bool:
    """Whether a command that begins so does nothing but succeed or fail."""
    return word in (*_OPENINGS, "true", "false", "!") or word.startswith("((")


def inverse(value: bool | None) -> bool | None:
    """Whether it is false."""
    return None if value is None else not value


def both(first: bool | None, second: bool | None) -> bool | None:
    """Whether both are true."""
    if first is False or second is False:
        return False
    return True if first and second else None


def either(first: bool | None, second: bool | None) -> bool | None:
    """Whether one of them is true."""
    return inverse(both(inverse(first), inverse(second)))


def _any(words: Sequence[str], variables: Variables) -> bool | None:
    for place, word in enumerate(words):
        if word in ("||", "-o"):
            return either(_all(words[:place], variables), _any(words[place + 1 :], variables))
    return _all(words, variables)


def _all(words: Sequence[str], variables: Variables) -> bool | None:
    for place, word in enumerate(words):
        if word in ("&&", "-a"):
            return both(_one(words[:place], variables), _all(words[place + 1 :], variables))
    return _one(words, variables)


def _one(words: Sequence[str], variables: Variables) -> bool | None:
    if words and words[0] == "!":
        return inverse(_one(words[1:], variables))
    if len(words) == 2 and words[0] in ("-z", "-n"):
        empty = _is_empty(words[1], variables)
        return empty if words[0] == "-z" else inverse(empty)
    if len(words) == 1:
        return inverse(_is_empty(words[0], variables))
    if len(words) != 3:
        return None
    left = variables.text(words[0])
    right = variables.text(words[2])
    if not (is_known(left) and is_known(right)):
        return None
    if words[1] in ("=", "==", "!="):
        is_equal = fnmatch.fnmatchcase(left, right)
        return is_equal if words[1] != "!=" else not is_equal
    first = variables.counted(left)
    second = variables.counted(right)
    if first is None or second is None:
        return None
    compared = _NUMBERS.get(words[1])
    return None if compared is None else compared(first, second)


def _is_empty(word: str, variables: Variables) -> bool | None:
    """Whether a word is empty; a variable that nobody set is, as where a script has a default."""
    named = re.fullmatch(r'"?\$\{?(\w+)\}?"?', word)
    if named is not None and variables.unset(named[1]):
        return True
    text = variables.text(word)
    return not text if is_known(text) else None
