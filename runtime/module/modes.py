"""The programs of one module, on one storage: training, evaluation, and what changes ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.facts import Fact
from autopar.order.execution import Execution
from autopar.runtime.execution.compiling import compile_engine
from autopar.runtime.execution.engine import Engine
from autopar.runtime.ranks.agreement import agree, digest

from .changes import MOST, Change, Remaking, Shapes, refused

SIZES = 16
"""Programs for other sizes of inputs that are held; the one not used longest makes room."""

_Made = tuple[Execution, Mapping[str, Tensor], tuple[Fact, ...]]

_BRANCHES = "the model's own code reads its mode (self.training), which is evaluation now"


class Modes:
    """The engine of each mode, and of each change; all but the planned one are made when needed.

    `planned`: whether the model was planned in training. `only`: why it has no other mode without
    an export, if so. `parts`: the modes in which submodules were planned that have two. `facts`:
    what programs rest on outside of the module's own attributes.
    """

    def __init__(self, engine: Engine, remaking: Remaking | None) -> None:
        self.main = engine
        self.remaking = remaking
        self.facts: list[Fact] = []
        self.planned = True
        self.only = ""
        self.parts: Mapping[str, bool] = {}
        self.branches = False
        """Whether code of the model itself asks for its mode, which only an export can follow."""
        self.compiled: Mapping[str, Any] | None = None
        self._engines: dict[tuple[object, ...], Engine] = {}
        self._sizes: dict[Shapes, None] = {}
        self._changed: set[object] = set()

    @property
    def follows(self) -> bool:
        """Whether programs can be made for changed modules."""
        return self.remaking is not None and self.remaking.exports

    def changed_parts(self, present: Mapping[str, nn.Module], *, training: bool) -> list[Change]:
        """Submodules in another mode than that of the program for the whole's mode."""
        changes = []
        for path, part in present.items():
            wanted = self.parts[path] if training == self.planned else training
            if part.training != wanted:
                modes = {True: "training", False: "evaluation"}
                words = (
                    f"{path!r} is in {modes[part.training]} while the whole module is in "
                    f"{modes[training]}, for which its program has it in {modes[wanted]}"
                )
                changes.append(Change.of_mode(path, part.training, words))
        return changes

    def planned_in(self, original: nn.Module, reads: Mapping[str, frozenset[str]]) -> None:
        """Take over the mode in which the original was planned, and know whether it has another.

        `reads`: the attributes that the model's code has read, by its parts' paths.
        """
        self.planned = original.training
        self.branches = any(
            "training" in reads.get(path, ()) and not type(part).__module__.startswith("torch.")
            for path, part in original.named_modules()
        )
        parts = {path: part for path, part in original.named_modules() if has_modes(part)}
        self.parts = {path: part.training for path, part in parts.items()}
        changing = list(parts)
        if not original.training and changing:
            self.only = (
                f"the model was in evaluation when it was planned, and its {changing[0]!r} does "
                "something else in training"
            )

    def engine(
        self,
        *,
        training: bool,
        changes: Sequence[Change] = (),
        modes: Callable[[], Mapping[str, bool]] = dict,
        carries: bool = False,
        shapes: Shapes | None = None,
    ) -> Engine:
        """The engine of a mode, and of changes.

        `modes`: the present modes of all parts. `carries`: gradients come back from all outputs,
        where the order of the step allows it. `shapes`: of the inputs, where they are other ones.
        """
        evaluating = self.planned and not training
        changes = (*changes, *self._change_of_mode(training=training))
        keys = tuple(sorted(change.key for change in changes))

        def made(ends: tuple[str, ...]) -> _Made:
            assert self.remaking is not None
            if changes or shapes is not None:
                return self.remaking.changed(changes, modes(), ends, shapes)
            return self.remaking.execution(evaluating=evaluating, ends=ends), {}, ()

        engine = self.main
        key: tuple[object, ...] = (evaluating, keys)
        if shapes is not None:
            key = (*key, shapes)
            self._make_room(shapes)
        if changes:
            self._require_followed(keys, changes)
        if changes or shapes is not None:
            engine = self._engine(key, lambda: self._agreed(key, lambda: made(())))
        elif evaluating and self.remaking is not None:
            engine = self._engine((evaluating, keys), lambda: made(()))
        if not carries or self.remaking is None or not engine.lost_outputs:
            return engine
        ends = engine.lost_outputs
        try:
            return self._engine((*key, ends), lambda: made(ends))
        except PlanError:
            # Without ways back from them, its backward pass refuses their gradients.
            self._engines[*key, ends] = engine
            return engine

    def _change_of_mode(self, *, training: bool) -> list[Change]:
        """The change of the whole module's mode, where a rewritten graph does not follow it."""
        if training and not self.planned and self.only:
            return [Change.of_mode("", training, self.only)]
        if self.planned and not training and self.branches and self.follows:
            return [Change.of_mode("", training, _BRANCHES)]
        return []

    def _make_room(self, shapes: Shapes) -> None:
        """Hold programs of `SIZES` sizes at most: all ranks meet the same sizes in one order."""
        self._sizes.pop(shapes, None)
        self._sizes[shapes] = None
        if len(self._sizes) > SIZES:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            self._engines = {k: e for k, e in self._engines.items() if oldest not in k}

    def _require_followed(self, keys: object, changes: Sequence[Change]) -> None:
        """Refuse changes for which no program can be made."""
        if not self.follows:
            raise refused(changes[0], "the model cannot be exported once more")
        if keys not in self._changed and len(self._changed) == MOST:
            raise refused(
                changes[0],
                f"it has {MOST} programs for other changes. A number that changes often is an "
                "argument of the model, or a buffer",
            )
        self._changed.add(keys)

    def _agreed(self, keys: object, made: Callable[[], _Made]) -> _Made:
        """A program of changes, made by all ranks or by none."""
        result: _Made | None = None
        failure: Exception | None = None
        try:
            result = made()
        except PlanError as error:
            failure = error
        same = {"the changes of the module": digest(repr(keys))}
        agree(same, failure=failure, device=self.main.device)
        assert result is not None
        return result

    def _engine(self, key: tuple[object, ...], made: Callable[[], _Made]) -> Engine:
        """An engine on the groups and the storage of the planned one."""
        if key not in self._engines:
            execution, constants, facts = made()
            # A changed program may read what the planned one did not.
            known = {fact.words for fact in self.facts}
            self.facts += [fact for fact in facts if fact.words not in known]
            main = self.main
            engine = Engine(execution, main.world, main.device, main.stored, exact=main.exact)
            engine.lifted = {name: value.to(main.device) for name, value in constants.items()}
            if self.compiled is not None:
                compile_engine(engine, self.compiled)
            self._engines[key] = engine
        return self._engines[key]

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the engines' programs; those that are made later, too."""
        self.compiled = dict(options)
        for engine in (self.main, *self._engines.values()):
            compile_engine(engine, self.compiled)

    def on(self, engine: Engine) -> Modes:
        """The modes of another module's engine."""
        other = Modes(engine, self.remaking)
        other.facts = self.facts
        other.planned = self.planned
        other.only = self.only
        other.parts = self.parts
        other.branches = self.branches
        other.compiled = self.compiled
        return other


def has_modes(part: nn.Module) -> bool:
    """Whether a module behaves differently in training and in evaluation."""
    drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    return drops or (isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats)
