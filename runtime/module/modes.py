"""Training and evaluation of one module: two programs on one storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.errors import PlanError
from autopar.order.execution import Execution
from autopar.runtime.execution.compiling import compile_engine
from autopar.runtime.execution.engine import Engine


class Modes:
    """The engine of each mode; the evaluation engine is made when first needed, from `evaluation`.

    `planned`: whether the model was planned in training. `only`: why it has no other mode, if so.
    """

    def __init__(self, engine: Engine, evaluation: Callable[[], Execution] | None) -> None:
        self.main = engine
        self.evaluation = evaluation
        self.planned = True
        self.only = ""
        self._evaluating: Engine | None = None
        self.compiled: Mapping[str, Any] | None = None
        # The modes in which submodules were planned that have two.
        self.parts: Mapping[str, bool] = {}

    def require_parts(self, present: Mapping[str, nn.Module], *, training: bool) -> None:
        """Refuse submodules in another mode than that of the program for the whole's mode."""
        for path, part in present.items():
            wanted = self.parts[path] if training == self.planned else training
            if part.training != wanted:
                modes = {True: "training", False: "evaluation"}
                raise PlanError(
                    f"{path!r} is in {modes[part.training]} while the whole module is in "
                    f"{modes[training]}, for which its program has it in {modes[wanted]}: call "
                    f"{'train' if wanted else 'eval'}() on it, or give it its mode before "
                    "autopar.plan, and parallelize again"
                )

    def planned_in(self, original: nn.Module) -> None:
        """Take over the mode in which the original was planned, and know whether it has another."""
        self.planned = original.training
        parts = {path: part for path, part in original.named_modules() if has_modes(part)}
        self.parts = {path: part.training for path, part in parts.items()}
        changing = list(parts)
        if not original.training and changing:
            self.only = (
                f"the model was in evaluation when it was planned, and its {changing[0]!r} does "
                "something else in training: call train() before autopar.plan"
            )

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
            # On the same groups and storage: no collective is needed to make it.
            main = self.main
            self._evaluating = Engine(
                self.evaluation(), main.world, main.device, main.stored, exact=main.exact
            )
            if self.compiled is not None:
                compile_engine(self._evaluating, self.compiled)
        return self._evaluating

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the engines' programs; the evaluation engine's when it is made."""
        self.compiled = dict(options)
        compile_engine(self.main, self.compiled)
        if self._evaluating is not None:
            compile_engine(self._evaluating, self.compiled)

    def on(self, engine: Engine) -> Modes:
        """The modes of another module's engine."""
        other = Modes(engine, self.evaluation)
        other.planned = self.planned
        other.only = self.only
        other.parts = self.parts
        other.compiled = self.compiled
        return other


def has_modes(part: nn.Module) -> bool:
    """Whether a module behaves differently in training and in evaluation."""
    drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    return drops or (isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats)
