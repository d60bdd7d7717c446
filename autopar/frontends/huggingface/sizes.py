"""Sizes of a batch that are asked for, by name, and the options that ask for them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import UsageError

SEQUENCE = "sequence"
IMAGE = "image"
FRAMES = "frames"
OPTIONS: Mapping[str, str] = {"seq": SEQUENCE, "image": IMAGE, "frames": FRAMES}
"""The options of planning that size a batch, and the dims that they name."""
_SPELLED = {dim: f"--{option}" for option, dim in OPTIONS.items()}


class Sizes:
    """The sizes of a batch, of which every one that was asked for must be used.

    `used`: the spelling of the options whose sizes a batch has, in the order of their use, and of
    those that it is offered.
    """

    def __init__(self, asked: Mapping[str, int], model: str) -> None:
        self._asked = dict(asked)
        self._model = model
        self.used: list[str] = []
        for dim, size in asked.items():
            if size < 1:
                raise UsageError(f"{_SPELLED[dim]} is {size}; it must be at least 1")

    def asked(self, dim: str) -> int | None:
        """The size that was asked for, if one was."""
        if _SPELLED[dim] not in self.used:
            self.used.append(_SPELLED[dim])
        return self._asked.get(dim)

    def offer(self, dim: str, what: str) -> None:
        """Tell the option that would add something to the batch."""
        self.used.append(f"{_SPELLED[dim]} for {what}")

    def has(self, dim: str) -> bool:
        """Whether a size was asked for."""
        return dim in self._asked

    def require_used(self) -> None:
        """Refuse sizes of what the batch does not have."""
        for dim in self._asked:
            if _SPELLED[dim] not in self.used:
                sized = ", ".join(self.used)
                raise UsageError(f"{self._model} takes no {_SPELLED[dim]}; its batch has {sized}")
