"""Training and evaluation of one module: two programs on one storage."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import PlanError
from autopar.order.execution import Execution

from .engine import Engine


class Modes:
    """The engine of each mode; that of evaluation is made when it is first asked for, if `evaluation` tells how it is executed.

    `planned`: whether the model was in training when it was planned. `only`: why the other mode is none of its, where that is so.
    """

    def __init__(self, engine: Engine, evaluation: Callable[[], Execution] | None) -> None:
        self.main, self.evaluation = engine, evaluation
        self.planned, self.only = True, ""
        self._evaluating: Engine | None = None

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
        return self._evaluating

    def on(self, engine: Engine) -> Modes:
        """The same for another module."""
        other = Modes(engine, self.evaluation)
        other.planned, other.only = self.planned, self.only
        return other
