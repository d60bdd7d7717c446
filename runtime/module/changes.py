"""Changes of a module since it was planned, and the programs that follow them.

A program rests on numbers and texts that the model's code has read, on the modes of its parts, and
on which parameters train. If one of these changes, the model is exported once more, without its
weights, and gets the strategies of the plan. Every program is held for later, so that a change back
costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, PlanError
from autopar.facts import Fact, is_literal
from autopar.ir import Graph
from autopar.model import LoadedModel
from autopar.order.execution import Execution
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.rules.modes import evaluated

from .plan_sizes import execution_at

MOST = 8
"""Programs for changed modules; a value that changes in every step would export every step."""
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a graph's inputs."""
_TRAINS = "requires_grad"
_MODE = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one attribute: of a module's own, its mode, or whether a parameter trains.

    `path`: of the module, or of the parameter. `words`: the change and what it was before.
    `shared`: whether the model has the value at a place that a skeleton shares, or of the script.
    """

    path: str
    name: str
    value: Any
    words: str
    shared: bool = False

    @classmethod
    def of_mode(cls, path: str, training: bool, words: str) -> Change:
        """A part that is in another mode."""
        return cls(path=path, name=_MODE, value=training, words=words)

    @classmethod
    def unfrozen(cls, path: str) -> Change:
        """A parameter that requires a gradient now."""
        words = f"{path!r} requires a gradient, and was frozen when the model was planned"
        return cls(path=path, name=_TRAINS, value=True, words=words)

    @classmethod
    def of_fact(cls, fact: Fact) -> Change:
        """Another value of what the model's code has read outside of its modules."""
        value = fact.present()
        place = f" ({fact.place})" if fact.place else ""
        was = f" as {fact.was}" if fact.was else ""
        words = f"{fact.words!r} was read{was} when the model was planned{place}"
        change = cls(path="", name=fact.words, value=value, words=words, shared=True)
        if isinstance(value, np.ndarray):
            return replace(change, value=value.tolist())
        if not is_literal(value):
            raise refused(change, "it is no plain value now")
        return change

    @property
    def key(self) -> tuple[str, str, str]:
        """The change as texts, equal for equal changes."""
        return self.path, self.name, repr(self.value)


def refused(change: Change, why: object) -> PlanError:
    """The error of a change that no program follows."""
    return PlanError(
        f"{change.words}, and the program would not follow: {why}. Make the change before "
        "autopar.plan, and parallelize again"
    )


def other_sizes(graph: Graph, shapes: Shapes, why: object) -> PlanError:
    """The error of inputs for whose sizes no program can be made."""
    pairs = zip(graph.inputs, shapes, strict=True)
    words = ", ".join(
        f"{name!r} is {list(shape)}, planned as {list(graph.tensors[name].shape)}"
        for name, shape in pairs
        if shape != graph.tensors[name].shape
    )
    return PlanError(
        f"{words}, and no program of these sizes can be made: {why}. Give it in the planned sizes, "
        "or plan again with example inputs of the others (autopar.plan(..., reuse_from=plan))"
    )


def skeleton_of(module: nn.Module, shared: Callable[[Any], bool]) -> nn.Module | None:
    """A copy of a module whose parameters and buffers are on the meta device.

    Attributes for which `shared` holds are not copied. None if others cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    machinery = vars(nn.Module())
    for part in module.modules():
        held = (value for name, value in vars(part).items() if name not in machinery)
        memo.update((id(value), value) for value in held if shared(value))
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        # A module may hold anything: a file, a lock, a tensor with a history.
        return None


class Remaking:
    """Makes executions of a module that has changed, on the strategies of its plan.

    `graph`: of the model as planned. `reload` imports a changed skeleton. Neither may hold the
    original module, whose weights would stay in memory.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        skeleton: nn.Module | None,
        reload: Callable[..., LoadedModel] | None,
    ) -> None:
        self.plan = plan
        self.graph = graph
        self.skeleton = skeleton
        self.reload = reload

    @property
    def exports(self) -> bool:
        """Whether the model can be exported once more."""
        return self.skeleton is not None and self.reload is not None

    def execution(self, *, evaluating: bool = False, ends: Sequence[str] = ()) -> Execution:
        """The execution of the model as planned, or of what was planned in training in evaluation.

        `ends`: outputs from which gradients come back beside the loss's.
        """
        return self._on_plan(evaluated(self.graph) if evaluating else self.graph, ends)

    def changed(
        self,
        changes: Sequence[Change],
        modes: Mapping[str, bool],
        ends: Sequence[str] = (),
        shapes: Shapes | None = None,
    ) -> tuple[Execution, Mapping[str, Tensor], tuple[Fact, ...]]:
        """The execution of the model with changes, in these modes, its constants and its facts.

        `shapes`: of its inputs, where they are not the planned ones. Raises a `PlanError` that
        names a change or these if the plan has no strategies for what comes out.
        """
        assert self.skeleton is not None and self.reload is not None
        try:
            with _changed(self.skeleton, changes, modes):
                model = self.reload(self.skeleton, shapes)
            self._require_alike(model.graph)
            assert model.torch is not None and model.torch.facts is not None
            execution = self._on_plan(model.graph, ends, resized=shapes is not None)
            return execution, model.torch.constants, model.torch.facts.of_code
        except AutoparError as error:
            if shapes is not None:
                raise other_sizes(self.graph, shapes, error) from error
            raise refused(changes[0], error) from error

    def _on_plan(self, graph: Graph, ends: Sequence[str], *, resized: bool = False) -> Execution:
        train = self.plan.model.mode == "train"
        analysis = analyse(graph, train=train, ends=tuple(ends))
        made = execution_at(self.plan, analysis) if resized else self.plan.execution(analysis)
        if self.plan.stages and graph is not self.graph:
            pairs = zip(made.chunks, self.execution().chunks, strict=True)
            if any(now.stored.keys() - planned.stored.keys() for now, planned in pairs):
                raise PlanError("the stages' operators then read parameters that other stages hold")
        return made

    def _require_alike(self, graph: Graph) -> None:
        """Raise unless a graph takes, gives and stores what the planned one does."""
        pairs = (
            ("inputs", self.graph.inputs, graph.inputs),
            ("outputs", self.graph.outputs, graph.outputs),
            ("loss", self.graph.loss, graph.loss),
            ("parameters", _shapes(self.graph), _shapes(graph)),
        )
        for what, planned, present in pairs:
            if planned != present:
                raise PlanError(f"the model then has other {what}")


def _shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in graph.parameters}


@contextmanager
def _changed(
    skeleton: nn.Module, changes: Sequence[Change], modes: Mapping[str, bool]
) -> Iterator[None]:
    """The skeleton with changes and in modes, for as long as the context lasts."""
    parts = dict(skeleton.named_modules())
    before = {path: dict(part.__dict__) for path, part in parts.items()}
    frozen: list[nn.Parameter] = []
    try:
        for path, training in modes.items():
            if path in parts:
                parts[path].training = training
        for change in changes:
            if change.name == _TRAINS:
                parameter = skeleton.get_parameter(change.path)
                frozen.append(parameter)
                parameter.requires_grad_(True)
            elif change.name != _MODE and not change.shared:
                parts[change.path].__dict__[change.name] = change.value
        yield
    finally:
        for path, part in parts.items():
            part.__dict__.clear()
            part.__dict__.update(before[path])
        for parameter in frozen:
            parameter.requires_grad_(False)
