"""Figures of searches, remembered on disk for searches of the same model that ask for another plan.

A file has the figures of all searches that have in common what these depend on. Its figures are
read as the types that the search asks for, and whatever is none of them is left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autopar.remembered import TEXT_BYTES, key_of, recalled, remember

from .model.known_figures import Basis, Known

FIGURES = 8192
"""The most figures in a file; the first ones go first."""
_STORED = TypeAdapter(dict[str, tuple[str, dict[str, str]]])
"""The text of a figure and its basis, by the digest of its key."""


class FigureFiles:
    """The files of figures of one model.

    `subject`: the model and the code, in texts. `packages`: those whose versions figures depend on.
    """

    def __init__(self, subject: tuple[str, ...], packages: tuple[str, ...]) -> None:
        self.subject = subject
        self.packages = packages

    def read(self, about: str) -> Mapping[str, tuple[str, Basis]]:
        """The texts of the figures of some searches, by digests of their keys."""
        return _read(self._key(about))

    def figure_of(self, text: str, kind: Any) -> Any:
        """The figure of a text; `ValueError` if it is none of that type."""
        return _type(kind).validate_json(text, strict=True)

    def write(self, about: str, known: Mapping[str, Known]) -> None:
        """Add figures of some searches."""
        key = self._key(about)
        # Another process may have added to it meanwhile.
        every = {mark: one for mark, one in _read(key).items() if mark not in known}
        for mark, one in known.items():
            every[mark] = json.dumps(_type(one.kind).dump_python(one.figure)), dict(one.basis)
        stored = {}
        room = TEXT_BYTES // 2
        # The newest are behind the others, so they are the first to find room.
        for mark in reversed(list(every)[-FIGURES:]):
            room -= len(every[mark][0]) + sum(map(len, every[mark][1].values())) * 2 + 64
            if room < 0:
                break
            stored[mark] = every[mark]
        remember(key, json.dumps(dict(reversed(stored.items()))))

    def _key(self, about: str) -> str:
        return key_of("figure", (*self.subject, about), self.packages)


def _read(key: str) -> dict[str, tuple[str, dict[str, str]]]:
    text = recalled(key)
    try:
        return {} if text is None else _STORED.validate_json(text, strict=True)
    except ValidationError:
        return {}


@functools.cache
def _type(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
