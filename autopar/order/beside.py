"""Operators beside the exchanges of layers of experts, whose rows travel to experts and back.

Such a layer *leaves* (its rows set off), *works* (the experts compute on the rows that have come,
and the results set off) and *arrives* (the results have come). It leaves where it stands among the
steps, and arrives where its result is first read. What stands in between, such as the shared
experts of the layer, runs meanwhile: half of the products before the layer works, so that they
cover the way there and the way back alike. A backward pass goes the same way in the other
direction.

Between leaving and the first reader stand all operators that neither need the layer nor are needed
by it, and whose results meet its own before the next such layer. A layer beside which nothing is
multiplied runs as one operator.

Where passes of two micro-batches are merged, such a layer is a segment of its own with what runs
beside it. It leaves at the end of the segment before, and the result arrives in a later one: the
other micro-batch's segments run in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autopar.sharding.notation import TRAVELS
from autopar.sharding.program import Compute, Program, Redistribute, Step
from autopar.sharding.rules import products_of
from autopar.sharding.rules.experts import EXPERTS

from .value_flow import PlacedValue, makes, reads

Works = dict[int | None, list[int]]
"""The layers that work in front of each step of a segment, or at its end (None)."""


def travels(step: Step, mesh: Sequence[int]) -> bool:
    """Whether a step is a layer of experts whose rows travel between ranks."""
    return (
        isinstance(step, Compute)
        and step.operator.kind == EXPERTS
        and any(
            size > 1 and option.communication in TRAVELS
            for size, option in zip(mesh, step.decision.options, strict=True)
        )
    )


def with_neighbours(program: Program, steps: Sequence[int]) -> list[int]:
    """Reorder steps so that each layer leaves in front of what can run beside it."""
    mesh = program.assignment.mesh.shape
    stretches: list[list[int]] = [[]]
    for index in steps:
        # Each layer opens a stretch, up to the next one.
        if travels(program.steps[index], mesh):
            stretches.append([])
        stretches[-1].append(index)
    done = stretches[0]
    for layer, *behind in stretches[1:]:
        ahead, beside, behind = _around(program, done, layer, behind)
        done = [*ahead, layer, *beside, *behind]
    return done


def _around(
    program: Program, ahead: list[int], layer: int, behind: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """The steps in front of a layer, beside it, and behind those."""
    free = _not_needed(program, ahead, layer)
    # Values that the layer leads to, and values that it has nothing to do with.
    own = dict.fromkeys(makes(program.steps[layer]))
    independent = set[PlacedValue]()
    for index in free:
        independent.update(makes(program.steps[index]))
    later: list[int] = []
    join = None
    for index in behind:
        step = program.steps[index]
        if own.keys().isdisjoint(reads(step)):
            later.append(index)
            independent.update(makes(step))
        elif not independent.isdisjoint(reads(step)):
            join = step
            break
        else:
            own.update(dict.fromkeys(makes(step)))
    chosen = set(_needed(program, [*free, *later], reads(join))) if join is not None else set()
    # What reads a step that moves behind the layer moves with it.
    moved = {place for index in chosen for place in makes(program.steps[index])}
    for index in free:
        if index not in chosen and not moved.isdisjoint(reads(program.steps[index])):
            chosen.add(index)
            moved.update(makes(program.steps[index]))
    # Without a product it covers nothing, and moving it would only keep values longer.
    if not any(_products(program.steps[index]) for index in chosen):
        return ahead, [], behind
    return (
        [index for index in ahead if index not in chosen],
        [index for index in (*ahead, *behind) if index in chosen],
        [index for index in behind if index not in chosen],
    )


def _not_needed(program: Program, steps: Sequence[int], layer: int) -> list[int]:
    """The steps in front of a layer that it does not need, up to the layer before it."""
    mesh = program.assignment.mesh.shape
    needed = set(reads(program.steps[layer]))
    free: list[int] = []
    for index in reversed(steps):
        step = program.steps[index]
        if travels(step, mesh):
            # What stands in front of the layer before may be beside that one.
            break
        if needed.isdisjoint(makes(step)):
            free.append(index)
        else:
            needed.update(reads(step))
    free.reverse()
    made = {place for index in free for place in makes(program.steps[index])}
    # Communication starts as soon as its value is made, so it stays behind that.
    return [
        index
        for index in free
        if not isinstance(step := program.steps[index], Redistribute)
        or not made.isdisjoint(reads(step))
    ]


def _needed(program: Program, steps: Sequence[int], places: Iterable[PlacedValue]) -> Iterable[int]:
    """The steps that lead to some values, the last first."""
    wanted = set(places)
    for index in reversed(steps):
        step = program.steps[index]
        if not wanted.isdisjoint(makes(step)):
            wanted.update(reads(step))
            yield index


def works_before(program: Program, steps: Sequence[int], working: Collection[int] = ()) -> Works:
    """The layers of a segment that leave, work and arrive apart in it, by where they work.

    Those `working` have left in the segment before.
    """
    mesh = program.assignment.mesh.shape
    works: Works = {}
    for number, index in enumerate(steps):
        if index not in working and travels(program.steps[index], mesh):
            beside = beside_of(program, steps[number:])
            shares = [_products(program.steps[other]) for other in beside]
            if any(shares):
                place = number + 1 + _half(shares)
                works.setdefault(steps[place] if place < len(steps) else None, []).append(index)
    return works


def apart_from(program: Program, steps: Sequence[int]) -> dict[int, int]:
    """The layers that can be segments of their own: the steps from each to what reads its result.

    Not the layer of a stretch's first step, which could not leave before, nor one whose result is
    not read there or is under way with another's.
    """
    mesh = program.assignment.mesh.shape
    lengths = {}
    for number, index in enumerate(steps):
        if number and travels(program.steps[index], mesh):
            beside = beside_of(program, steps[number:])
            alone = not any(travels(program.steps[other], mesh) for other in beside)
            if alone and number + 1 + len(beside) < len(steps):
                lengths[index] = 1 + len(beside)
    return lengths


def beside_of(program: Program, steps: Sequence[int]) -> Sequence[int]:
    """The steps between the layer that is the first of these and the first reader of its result."""
    own = set(makes(program.steps[steps[0]]))
    for number in range(1, len(steps)):
        if not own.isdisjoint(reads(program.steps[steps[number]])):
            return steps[1:number]
    return steps[1:]


def as_they_work(
    program: Program, steps: Sequence[int], working: Collection[int] = ()
) -> tuple[int, ...]:
    """The steps of a segment, its layers where they work."""
    works = works_before(program, steps, working)
    apart = {index for layers in works.values() for index in layers}
    placed = [[*works.get(index, ()), *[index] * (index not in apart)] for index in steps]
    return tuple(index for some in (*placed, works.get(None, [])) for index in some)


def _half(shares: Sequence[float]) -> int:
    """The number of shares, from the first, that are half of their sum or more."""
    total = sum(shares)
    done = 0.0
    for number, share in enumerate(shares):
        done += share
        if 2 * done >= total:
            return number + 1
    return len(shares)


def _products(step: Step) -> float:
    """The multiply-adds of a step on all devices."""
    if isinstance(step, Redistribute) or step.decision.rule is None:
        return 0.0
    return products_of(step.operator.kind, step.decision.rule)
