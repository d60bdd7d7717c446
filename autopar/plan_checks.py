"""Checks that the parts of a plan file fit each other, for commands that have no model."""

from __future__ import annotations

from collections.abc import Iterator

from .errors import PlanError
from .plan import Plan
from .printable import printable
from .sharding.layout import parse_layout


def require_consistent(plan: Plan) -> None:
    """Raise `PlanError` unless layouts have an entry per axis and all chunks are equal."""
    if plan.stages and len(plan.stages) % plan.schedule.interleave:
        raise PlanError(
            f"the plan has {len(plan.stages)} chunks, which are not {plan.schedule.interleave} for "
            "each stage"
        )
    lengths = {len(plan.mesh), *(len(stage.mesh) for stage in plan.stages)}
    sizes = " or ".join(map(str, sorted(lengths)))
    meshes = plan.meshes()
    for name, operator in plan.operators.items():
        if len(operator.strategy) != len(meshes[name]):
            said = f"a strategy for {len(operator.strategy)} mesh axes, not {len(meshes[name])}"
            raise PlanError(printable(f"the plan's operator {name!r} has {said}", lines=False))
    checked: set[str] = set()
    for where, text in _layouts(plan):
        if text in checked:
            continue
        checked.add(text)
        try:
            layout = parse_layout(text)
        except ValueError as error:
            raise PlanError(
                printable(f"the plan holds a bad layout of {where!r}: {error}", lines=False)
            ) from error
        if len(layout) not in lengths:
            raise PlanError(
                printable(
                    f"the plan's layout of {where!r}, {text!r}, is for {len(layout)} mesh axes, "
                    f"not {sizes}",
                    lines=False,
                )
            )


def _layouts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every layout with the name of its tensor."""
    for operator in plan.operators.values():
        yield from operator.inputs
        yield from operator.outputs
    yield from ((name, parameter.storage) for name, parameter in plan.parameters.items())
    yield from plan.outputs.items()
    for name, chains in plan.redistributions.items():
        for chain in chains:
            yield from ((name, text) for text in chain)
            if not chain:
                raise PlanError(
                    printable(f"the plan has an empty redistribution of {name!r}", lines=False)
                )
