"""Places of values in a program: reads and results of a step, and casts of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.sharding.layout import Layout
from autopar.sharding.program import Compute, Program, Redistribute, Step, moves_value, only_casts
from autopar.sharding.schedule import Types

PlacedValue = tuple[str, Layout]


def reads(step: Step) -> tuple[PlacedValue, ...]:
    """The places that a step reads."""
    if isinstance(step, Redistribute):
        return ((step.tensor, step.chain[0]),)
    return tuple(zip(step.operator.inputs, step.decision.inputs, strict=True))


def makes(step: Step) -> tuple[PlacedValue, ...]:
    """The places that a step fills."""
    if isinstance(step, Redistribute):
        return ((step.tensor, step.chain[-1]),)
    return tuple(zip(step.operator.outputs, step.decision.outputs, strict=True))


def boundaries(
    stretches: Sequence[Sequence[Step]], leaving: Iterable[PlacedValue]
) -> tuple[list[list[PlacedValue]], list[list[PlacedValue]]]:
    """Values that enter each stretch of steps, and values that leave it or are in `leaving`."""
    made = [dict.fromkeys(place for step in steps for place in makes(step)) for steps in stretches]
    read = [dict.fromkeys(place for step in steps for place in reads(step)) for steps in stretches]
    entering = [
        [place for place in here if place not in own] for here, own in zip(read, made, strict=True)
    ]
    wanted = {place for places in entering for place in places} | set(leaving)
    return entering, [[place for place in own if place in wanted] for own in made]


def with_casts(program: Program, types: Types) -> Program:
    """Add a cast before the first reader of each parameter used as stored but in another type.

    Parameters that are gathered or cut are cast by that redistribution.
    """
    storage = program.assignment.storage
    tensors = program.graph.tensors
    done = {
        step.tensor for step in program.steps if isinstance(step, Redistribute) and only_casts(step)
    }
    left = {
        name: layout
        for name, layout in storage.items()
        # A program that has its casts already gets no second ones.
        if types.casts(tensors[name]) and name not in done
    }
    steps: list[Step] = []

    def cast(places: tuple[PlacedValue, ...]) -> None:
        for name, layout in places:
            if left.get(name) == layout:
                del left[name]
                steps.append(
                    Redistribute(
                        tensor=name,
                        chain=(layout,),
                        gradient=False,
                        differentiable=name in program.assignment.gradients,
                    )
                )

    for step in program.steps if left else ():
        if isinstance(step, Compute) or not moves_value(step):
            cast(reads(step))
        steps.append(step)
    # A parameter may leave the program without having been read.
    cast(tuple(program.assignment.outputs.items()))
    return (
        Program(graph=program.graph, assignment=program.assignment, steps=tuple(steps))
        if steps
        else program
    )
