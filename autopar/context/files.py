"""Strategy checkpoints that the context names: what is kept of the one that is loaded, and the one that is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..ir import Graph, Operator
from ..plan import Plan
from ..strategy_files import OperatorStrategy, Strategies, read_strategies, strategies_of_plan, write_strategies
from .marks import Cuts

PLAN_MARK = '"schema": "autopar-plan"'
_HEAD = 4096


def is_plan(path: str) -> bool:
    """Whether a file is a plan of autopar, and not a strategy checkpoint of MindSpore."""
    try:
        with open(path, "rb") as stream:
            return PLAN_MARK.encode() in stream.read(_HEAD)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a strategy checkpoint says of a model: cuts by operator, and the parts of parameters whose operators have none."""

    cuts: Mapping[str, Cuts]
    parts: Mapping[str, tuple[int, ...]]


def loaded_strategies(path: str, graph: Graph) -> Loaded:
    """The strategies of a file for a model, matched by the names of parameters; a `PlanError` lists those that the model has not."""
    found = read_strategies(path)
    own = {tensor.name: tensor for tensor in graph.parameters}
    names = {name: _matching(name, own) for name in found.parameters}
    missing = [name for name, match in names.items() if match is None]
    cuts: dict[str, Cuts] = {}
    for key, strategy in found.operators.items():
        parameter = next((p for p in sorted(own, key=len, reverse=True) if key == p or key.endswith((f"_{p}", f".{p}"))), None)
        if parameter is None:
            missing += [] if names else [key]
            continue
        operator = _reader(graph, parameter, strategy)
        if operator is None:
            raise PlanError(f"{path}: no operator that reads {parameter!r} takes the inputs of the strategy {key!r}, {strategy.cuts}")
        cuts[operator.name] = strategy.cuts
    if missing:
        listed = "\n  ".join(missing[:20])
        raise PlanError(f"{path} does not match the model; it has no parameters like\n  {listed}")
    covered = {name for op in graph.operators if op.name in cuts for name in op.inputs}
    rest = [(name, match) for name, match in names.items() if match and match not in covered]
    parts = {match: _parts(found, name, own[match].shape, path) for name, match in rest}
    return Loaded(cuts=cuts, parts=parts)


def _matching(name: str, own: Mapping[str, Any]) -> str | None:
    """The parameter of that name, or the one whose name it ends with, behind the name of a network around it."""
    ends = [candidate for candidate in own if name.endswith(f".{candidate}")]
    return name if name in own else max(ends, key=len, default=None)


def _reader(graph: Graph, parameter: str, strategy: OperatorStrategy) -> Operator | None:
    """The first operator that reads a parameter and has inputs of so many dims."""

    def fits(operator: Operator) -> bool:
        shapes = [graph.tensors[name].shape for name in operator.inputs]
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]] = list(zip(shapes, strategy.cuts, strict=False))
        return len(strategy.cuts) <= len(shapes) and all(len(shape) == len(one) for shape, one in pairs)

    return next((op for op in graph.operators if parameter in op.inputs and fits(op)), None)


def _parts(found: Strategies, name: str, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    parts = found.parameters[name].parts
    if len(parts) != len(shape) or any(size % count for size, count in zip(shape, parts, strict=True)):
        raise PlanError(f"{path}: {name!r} is cut into {list(parts)} parts, which do not divide its shape {list(shape)}")
    return parts


def save_strategies(plan: Plan, graph: Graph, path: str) -> None:
    """Write the strategies of a plan for MindSpore: `.json`, or `.ckpt` in protobuf; to a path that ends with `.plan.json`, the plan."""
    if path.endswith(".plan.json"):
        plan.save(Path(path))
    else:
        write_strategies(strategies_of_plan(plan, graph), path)
