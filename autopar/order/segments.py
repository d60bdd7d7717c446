"""The segments of a program: its steps between actions on parameters.

The steps, apart from redistributions of parameters, are cut before the first reader of each unit and around recomputed
stretches.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import PlanError
from ..sharding.program import Compute, Program, Redistribute, departure
from ..sharding.schedule import Schedule
from .units import Mode, Unit, sources_of
from .value_flow import PlacedValue, makes, reads
from .views import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps, by their index in the program.

    `again`: their values are not kept but computed again in the backward pass. `units`: the units whose parameters they
    read. `wanted`: those of these units that the backward pass needs gathered.
    """

    steps: tuple[int, ...]
    again: bool
    units: tuple[int, ...]
    wanted: tuple[int, ...]


def segments_of(program: Program, schedule: Schedule, modes: dict[int, Mode], units: tuple[Unit, ...]) -> tuple[Segment, ...]:
    """The stretches between cuts, each with the units that it reads."""
    parts = _parts(program, schedule, modes)
    order = [index for steps, _ in parts for index in steps]
    starts = [0, *itertools.accumulate(len(steps) for steps, _ in parts)]
    unit_of = {index: unit.number for unit in units for index in unit.members}
    read = Reads(program, modes)
    cuts = {start for (_, again), edges in zip(parts, itertools.pairwise(starts), strict=True) if again for start in edges}
    first: dict[int, int] = {}
    for position, index in enumerate(order):
        for member in read.forward.get(index, ()):
            first.setdefault(unit_of[member], position)
    for position in first.values():
        part = bisect.bisect_right(starts, position) - 1
        cuts.add(starts[part] if part < len(parts) and parts[part][1] else position)
    again = {index for steps, repeated in parts if repeated for index in steps}
    before = units_before(program, modes, unit_of)
    found = []
    bounds = sorted({0, len(order)} | cuts)
    for low, high in itertools.pairwise(bounds):
        steps = _early(program, order[low:high])
        members = {member for index in steps for member in read.forward.get(index, ())}
        if high == len(order):
            members |= _of_outputs(program, modes)
        repeated = steps[0] in again
        needed = members if repeated else {member for index in steps for member in read.backward.get(index, ())}
        here, later = ({unit_of[member] for member in some} for some in (members, needed))
        found.append(Segment(steps=steps, again=repeated, units=_closed(here, before), wanted=_closed(later, before)))
    return tuple(found) or (Segment(steps=(), again=False, units=(), wanted=()),)


def _early(program: Program, indices: Sequence[int]) -> tuple[int, ...]:
    """Reorder a segment: each redistribution that communicates stands directly behind the operator that made its value.

    Its collective then overlaps the computation up to its first reader. Values of earlier segments are redistributed
    where they are read.
    """
    mesh = program.assignment.mesh.shape
    behind: dict[PlacedValue, list[int]] = {}
    found: list[list[int]] = []
    for index in indices:
        step = program.steps[index]
        if isinstance(step, Redistribute) and reads(step)[0] in behind and departure(step, mesh) is not None:
            behind[reads(step)[0]].append(index)
            continue
        found.append([index])
        if isinstance(step, Compute):
            behind.update(dict.fromkeys(makes(step), found[-1]))
    return tuple(itertools.chain.from_iterable(found))


def units_before(program: Program, modes: dict[int, Mode], unit_of: Mapping[int, int]) -> dict[int, set[int]]:
    """For every unit the units from whose values its redistributions start."""
    found: dict[int, set[int]] = {}
    for member, source in sources_of(program, modes).items():
        found.setdefault(unit_of[member], set()).add(unit_of[source])
    return found


def _closed(units: set[int], before: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Units with all units that must be gathered before them; these have lower numbers."""
    found: set[int] = set()
    rest = list(units)
    while rest:
        unit = rest.pop()
        if unit not in found:
            found.add(unit)
            rest += before.get(unit, ())
    return tuple(sorted(found))


def _of_outputs(program: Program, modes: dict[int, Mode]) -> set[int]:
    """The redistributions of parameters whose values leave the program."""
    outputs = set(program.assignment.outputs.items())
    return {index for index in modes if makes(program.steps[index])[0] in outputs}


def _behind(program: Program, schedule: Schedule, modes: dict[int, Mode]) -> list[int]:
    """The recomputed stretch of every step, or -1; a redistribution belongs to the operator behind it."""
    named = Counter(name for segment in schedule.recompute for name in segment)
    known = {step.operator.name for step in program.steps if isinstance(step, Compute)}
    if wrong := [name for name, count in named.items() if count > 1 or name not in known]:
        raise PlanError(f"the plan recomputes {', '.join(map(repr, wrong[:5]))}: not in the model, or named twice")
    stretch_of = {name: number for number, segment in enumerate(schedule.recompute) for name in segment}
    found, behind = [-1] * len(program.steps), -1
    for index in reversed(range(len(program.steps))):
        step = program.steps[index]
        if isinstance(step, Compute):
            behind = stretch_of.get(step.operator.name, -1)
        found[index] = behind
    return found


def _parts(program: Program, schedule: Schedule, modes: dict[int, Mode]) -> list[tuple[list[int], bool]]:
    """Cut the steps into parts, each recomputed stretch in one piece where possible.

    Steps between those of a stretch move in front of it; a step that depends on the stretch cuts it.
    """
    stretches = _behind(program, schedule, modes)
    found: list[tuple[int, list[int]]] = [(-1, [])]
    inside: set[PlacedValue] = set()
    for index, step in enumerate(program.steps):
        if index in modes:
            continue
        stretch, current = stretches[index], found[-1][0]
        if stretch == current:
            found[-1][1].append(index)
        elif stretch < 0 and not any(place in inside for place in reads(step)):
            found[-2][1].append(index)
            continue
        else:
            if stretch >= 0 and current >= 0:
                found.append((-1, []))
            found.append((stretch, [index]))
            inside = set()
        if stretch >= 0:
            inside.update(makes(step))
    gradients = program.assignment.gradients
    return [
        (steps, stretch >= 0 and any(name in gradients for index in steps for name, _ in makes(program.steps[index])))
        for stretch, steps in found
        if steps
    ]
