"""Strategy checkpoints that the context names.

One is loaded and matched to the model, another is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.file_limits import PLAN_BYTES
from autopar.integrations.mindspore.strategy_files import (
    OperatorStrategy,
    Strategies,
    read_strategies,
    strategies_of_plan,
    write_strategies,
)
from autopar.ir import Graph, Operator
from autopar.plan import Plan
from autopar.printable import printable
from autopar.reading import read_bytes

from .marks import Cuts

PLAN_MARK = '"schema": "autopar-plan"'
_HEAD = 4096
SHOWN = 20
LONGEST = 1000
"""Names that a message lists, and letters of one that are looked at: a file may hold anything."""


def is_plan(path: str) -> bool:
    """Whether a file is a plan of autopar, and not a strategy checkpoint of MindSpore."""
    content = read_bytes(path, PLAN_BYTES, what="strategy checkpoint", error=PlanError)
    return PLAN_MARK.encode() in content[:_HEAD]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A strategy checkpoint for a model.

    It has cuts by operator, and the parts of parameters whose operators have none.
    """

    cuts: Mapping[str, Cuts]
    parts: Mapping[str, tuple[int, ...]]


def loaded_strategies(path: str, graph: Graph) -> Loaded:
    """The strategies of a file, matched to a model by the names of parameters.

    `PlanError` lists unmatched ones.
    """
    strategies = read_strategies(path)
    own = {tensor.name: tensor for tensor in graph.parameters}
    names = {name: _matching(name, own) for name in strategies.parameters}
    missing = [name for name, match in names.items() if match is None]
    cuts: dict[str, Cuts] = {}
    for key, strategy in strategies.operators.items():
        parameter = _ending(key, own, "_.")
        if parameter is None:
            missing += [] if names else [key]
            continue
        operator = _reader(graph, parameter, strategy)
        if operator is None:
            raise PlanError(
                f"{path}: no operator that reads {parameter!r} takes the inputs of the strategy "
                f"{key!r}, {_few(strategy.cuts)}"
            )
        cuts[operator.name] = strategy.cuts
    if missing:
        listed = "".join(
            f"\n  {printable(name[:LONGEST], lines=False)}" for name in missing[:SHOWN]
        )
        more = f"\n  and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise PlanError(f"{path} does not match the model; it has no parameters like{listed}{more}")
    covered = {name for op in graph.operators if op.name in cuts for name in op.inputs}
    rest = [(name, match) for name, match in names.items() if match and match not in covered]
    parts = {match: _parts(strategies, name, own[match].shape, path) for name, match in rest}
    return Loaded(cuts=cuts, parts=parts)


def _matching(name: str, own: Mapping[str, Any]) -> str | None:
    """The parameter called `name`, or the one whose name ends in it.

    A parameter's full name begins with the name of the network around it.
    """
    return _ending(name, own, ".")


def _ending(text: str, own: Mapping[str, Any], marks: str) -> str | None:
    """The longest of the names that a text is, or ends with behind one of the marks."""
    starts = [0, *(place + 1 for place, letter in enumerate(text[:LONGEST]) if letter in marks)]
    return next((text[start:] for start in starts if text[start:] in own), None)


def _few(cuts: Cuts) -> str:
    """Cuts, or their beginning."""
    text = str(cuts)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _reader(graph: Graph, parameter: str, strategy: OperatorStrategy) -> Operator | None:
    """The first operator that reads a parameter and has inputs of so many dims."""

    def fits(operator: Operator) -> bool:
        shapes = [graph.tensors[name].shape for name in operator.inputs]
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]] = list(
            zip(shapes, strategy.cuts, strict=False)
        )
        return len(strategy.cuts) <= len(shapes) and all(
            len(shape) == len(one) for shape, one in pairs
        )

    return next((op for op in graph.operators if parameter in op.inputs and fits(op)), None)


def _parts(strategies: Strategies, name: str, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    parts = strategies.parameters[name].parts
    if len(parts) != len(shape) or any(
        size % count for size, count in zip(shape, parts, strict=True)
    ):
        raise PlanError(
            f"{path}: {name!r} is cut into {list(parts)} parts, which do not divide its shape "
            f"{list(shape)}"
        )
    return parts


def save_strategies(plan: Plan, graph: Graph, path: str) -> None:
    """Write a plan's strategies for MindSpore (`.json`, or protobuf `.ckpt`).

    A path `*.plan.json` takes the plan itself.
    """
    if path.endswith(".plan.json"):
        plan.save(Path(path))
    else:
        write_strategies(strategies_of_plan(plan, graph), path)
