"""The one table of local forms: by operator kind, or by the word of a communicating split.

Every family of forms registers its own rows, once each; `families` names the families, and is
imported when the first row is asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from autopar.ir import Value

from .local_call import Function, LocalCall

Changes = Callable[[LocalCall], Mapping[str, Value]]
Knowledge = Callable[[LocalCall], Mapping[str, Value] | None]
Local = tuple[Function, Mapping[str, Value]]
"""The function that a rank runs, and the attributes to change or add."""
Talk = Callable[..., Local]
"""Called with a `LocalCall` and its group of ranks, or a group for each axis taken in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalForm:
    """The local form of one kind of operator, or of every operator split under a word.

    function: computes the kind on one device if neither torch nor the table of ONNX does. sizes:
    the attributes that differ on a shard. local: runs instead of the function if `knows` returns
    arguments about this rank's place. A field that is None is as without a row.
    """

    function: Function | None = None
    sizes: Changes | None = None
    knows: Knowledge | None = None
    local: Function | None = None
    talks: Talk | None = None

    def __post_init__(self) -> None:
        assert (self.knows is None) == (self.local is None), (
            "a local function goes with what it is told"
        )


FORMS: dict[str, LocalForm] = {}
"""Kind or word → form; read by `form_of`."""
_NONE = LocalForm()


def register(
    names: str,
    *,
    function: Function | None = None,
    sizes: Changes | None = None,
    knows: Knowledge | None = None,
    local: Function | None = None,
    talks: Talk | None = None,
) -> None:
    """Enter the form of the kinds (or the word) `names`, separated by spaces; each has one row."""
    form = LocalForm(function=function, sizes=sizes, knows=knows, local=local, talks=talks)
    for name in names.split():
        if name in FORMS:
            raise ValueError(f"{name} has a local form already")
        FORMS[name] = form


def form_of(name: str) -> LocalForm:
    """The form of a kind or word; an empty one if it runs unchanged."""
    _load()
    return FORMS.get(name, _NONE)


@functools.cache
def _load() -> None:
    """Import the families, late, because they import this table."""
    import_module("autopar.runtime.local_forms.families")


@contextlib.contextmanager
def standing_in(name: str, form: LocalForm) -> Iterator[None]:
    """Let `form` be that of `name` inside the block."""
    before = form_of(name)
    FORMS[name] = form
    try:
        yield
    finally:
        del FORMS[name]
        if before is not _NONE:
            FORMS[name] = before
