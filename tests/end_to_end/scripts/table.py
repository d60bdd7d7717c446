"""The type of a script, the list of all scripts, and the outcome that is expected of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, nn

Values = Mapping[str, Tensor | float]
Expected = Literal["equal", "refused", "either", "left out"]
"""What all ranks do: give the values of one device, raise one and the same error of autopar, one of
both; or the script is not run.
"""
MICRO_BATCHES = frozenset({"micro-batches", "pipeline", "pipeline-gpipe"})
"""The schemes that run a step in several micro-batches."""


class Make(Protocol):
    """Makes a script's module: the original model, or the model under a plan."""

    def __call__(
        self,
        kind: str = "language",
        *,
        seed: int = 0,
        change: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        """A module of a kind with weights of `seed`; `change` may edit it before it is planned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, and what it is held against.

    `family`: the file that it stands in. `micro_batches`: what is expected where a step is several
    micro-batches (None: the same). `reference`: the original model, or the model planned for one
    rank, whose random numbers are those of any plan. `tolerance`: of values, relative to the
    largest of a tensor. `slow`: too slow for the fast tests.
    """

    name: str
    family: str
    run: Callable[[Make], Values]
    expected: Expected = "equal"
    micro_batches: Expected | None = None
    reference: Literal["original", "one rank"] = "original"
    tolerance: float = 1e-9
    slow: bool = False

    def expected_of(self, scheme: str) -> Expected:
        """The outcome that is expected under a scheme."""
        return (
            self.micro_batches
            if self.micro_batches is not None and scheme in MICRO_BATCHES
            else self.expected
        )


class Scripts:
    """The scripts of one file, in order."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.scripts: list[Script] = []

    def add(self, name: str, run: Callable[[Make], Values], **fields: object) -> None:
        """A script made of a function and its name."""
        self.scripts.append(Script(name=name, family=self.family, run=run, **fields))  # type: ignore[arg-type]

    def script(
        self, **fields: object
    ) -> Callable[[Callable[[Make], Values]], Callable[[Make], Values]]:
        """Adds the decorated function under its own name."""

        def added(run: Callable[[Make], Values]) -> Callable[[Make], Values]:
            self.add(run.__name__, run, **fields)
            return run

        return added


@functools.cache
def scripts() -> dict[str, Script]:
    """All scripts by name."""
    from . import agreement, gradients, loops, modes, moving, optimizers, surface, weights

    # Those that may break the ranks come last.
    files = (moving, weights, gradients, modes, loops, optimizers, surface, agreement)
    actual = [script for file in files for script in file.SCRIPTS.scripts]
    named = {script.name: script for script in actual}
    assert len(named) == len(actual), "two scripts of one name"
    return named
