"""Training and evaluation of one module: two programs on one storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.order.execution import Execution

from .compiling import compile_engine
from .engine import Engine


class Modes:
    """The engine of each mode; the evaluation engine is made when first needed, from `evaluation`.

    `planned`: whether the model was planned in training. `only`: the reason why it has no other mode, if so.
    """

    def __init__(self, engine: Engine, evaluation: Callable[[], Execution] | None) -> None:
        self.main, self.evaluation = engine, evaluation
        self.planned, self.only = True, ""
        self._evaluating: Engine | None = None
        self.compiled: Mapping[str, Any] | None = None

    def engine(self, *, training: bool) -> Engine:
        """The engine of a mode."""
        if training == self.planned:
            return self.main
        if training:
            if self.only:
                raise PlanError(self.only)
            return self.main
        if self.evaluation is None:
            return self.main
        if self._evaluating is None:
            main = self.main
            self._evaluating = Engine(self.evaluation(), main.world, main.device, main.stored, exact=main.exact)
            if self.compiled is not None:
                compile_engine(self._evaluating, self.compiled)
        return self._evaluating

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the engines' programs; the evaluation engine's when it is made."""
        self.compiled = dict(options)
        for engine in (self.main, *(() if self._evaluating is None else (self._evaluating,))):
            compile_engine(engine, self.compiled)

    def on(self, engine: Engine) -> Modes:
        """The modes of another module's engine."""
        other = Modes(engine, self.evaluation)
        other.planned, other.only, other.compiled = self.planned, self.only, self.compiled
        return other
