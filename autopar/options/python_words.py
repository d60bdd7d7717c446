"""Errors of the Python interface in its own words: `memory=` instead of --memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from autopar.errors import AutoparError

from .kinds import DIMS, SHAPES, SWITCH, VALUES, WHOLE
from .option import Option
from .table import TABLE

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
_SPELLED = {option.spelled: option for option in TABLE.values() if option.flag != ""}
_MENTION = re.compile(r"(?P<flag>--[a-z]+(?:-[a-z]+)*)(?:(?P<gap>[ =])(?P<value>[^\s,;:)]+))?")
BEYOND = {"--seq": 'dims={"sequence": ...}', "--image": 'dims={"image": ...}'}
"""Options of the command line alone, and what says the same in Python."""


def python_words(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """The function, whose errors name its arguments instead of options of the command line."""

    @functools.wraps(function)
    def told(*args: Arguments.args, **keywords: Arguments.kwargs) -> Answer:
        try:
            return function(*args, **keywords)
        except AutoparError as error:
            error.args = (in_python(str(error)), *error.args[1:])
            raise

    return told


def in_python(text: str) -> str:
    """A text with options of planning as arguments of Python.

    >>> in_python("a smaller --batch, or --optimizer sgd (--dim length=SIZE)")
    'a smaller batch=, or optimizer="sgd" (dims={"length": SIZE})'
    """
    return _MENTION.sub(_argument, text)


def _argument(match: re.Match[str]) -> str:
    flag = match["flag"]
    gap = match["gap"] or ""
    value = match["value"] or ""
    option = _SPELLED.get(flag)
    if option is None or not option.told:
        return BEYOND.get(flag, flag) + gap + value
    said = _said(option, value)
    return said if said is not None else f"{_bare(option)}{gap}{value}"


def _bare(option: Option) -> str:
    return f"{option.name}=True" if option.kind is SWITCH else f"{option.name}="


def _said(option: Option, value: str) -> str | None:
    """The option with a value that belongs to it; None if the next word is one of the sentence."""
    end = value[len(value.rstrip(".")) :]
    value = value.rstrip(".")
    if option.kind in (DIMS, SHAPES, VALUES):
        name, equals, size = value.partition("=")
        return f'{option.name}={{"{name}": {size}}}{end}' if equals else None
    if option.choices and value in map(str, option.choices):
        return f"{option.name}={value if value.isdecimal() else _quoted(value)}{end}"
    if option.kind is WHOLE and value.isdecimal():
        return f"{option.name}={value}{end}"
    return None


def _quoted(value: str) -> str:
    """A text in double quotes."""
    return f'"{value}"'
