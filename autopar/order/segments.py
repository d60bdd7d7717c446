"""The segments of a program: its steps between actions on parameters.

The steps, apart from redistributions of parameters, are cut before the first reader of each unit
and around recomputed stretches. No cut separates a layer of experts from what runs beside its
exchanges.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.sharding.program import Compute, Program, Redistribute, departure
from autopar.sharding.schedule import Schedule

from .beside import apart_from, beside_of, with_neighbours, works_before
from .units import Mode, Unit, sources_of
from .value_flow import PlacedValue, makes, reads
from .views import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps, by their index in the program.

    `recomputed`: their values are not saved but computed again in the backward pass. `units`: the
    units whose parameters they read. `wanted`: those of these units that the backward pass needs
    gathered. `leaving`: layers of experts whose rows set off at its end; `working`: those that work
    on rows from the segment before; `arriving`: those of earlier segments whose results are first
    read here.
    """

    steps: tuple[int, ...]
    recomputed: bool
    units: tuple[int, ...]
    wanted: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    working: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()


def segments_of(
    program: Program, schedule: Schedule, modes: dict[int, Mode], units: tuple[Unit, ...]
) -> tuple[Segment, ...]:
    """The stretches between cuts, each with the units that it reads."""
    parts = [
        (with_neighbours(program, steps), repeated)
        for steps, repeated in _parts(program, schedule, modes)
    ]
    order = [index for steps, _ in parts for index in steps]
    starts = [0, *itertools.accumulate(len(steps) for steps, _ in parts)]
    unit_of = {index: unit.number for unit in units for index in unit.members}
    read = Reads(program, modes)
    recomputed = {index for steps, repeated in parts if repeated for index in steps}
    before = units_before(program, modes, unit_of)
    segments = []
    cuts = _cuts(parts, starts, order, read, unit_of)
    cuts = _around_layers(program, parts, starts, cuts)
    apart = _layers_apart(program, parts, starts) if schedule.merges else {}
    bounds = sorted({0, len(order)} | cuts | {edge for edges in apart.values() for edge in edges})
    leaves = {edges[0]: layer for layer, edges in apart.items()}
    reads_at = {edges[1]: layer for layer, edges in apart.items()}
    for low, high in itertools.pairwise(bounds):
        working = (leaves[low],) if low in leaves else ()
        steps = _early(program, order[low:high], working)
        members = {member for index in steps for member in read.forward.get(index, ())}
        # Parameters that leave the program have to be there at its end.
        if high == len(order):
            members |= _of_outputs(program, modes)
        repeated = steps[0] in recomputed
        # What is computed again reads all that it read in the forward pass.
        needed = (
            members
            if repeated
            else {member for index in steps for member in read.backward.get(index, ())}
        )
        here, later = ({unit_of[member] for member in some} for some in (members, needed))
        segments.append(
            Segment(
                steps=steps,
                recomputed=repeated,
                units=_closed(here, before),
                wanted=_closed(later, before),
                leaving=(leaves[high],) if high in leaves else (),
                working=working,
                arriving=(reads_at[low],) if low in reads_at else (),
            )
        )
    # A program without steps still has passes, which need a segment.
    return tuple(segments) or (Segment(steps=(), recomputed=False, units=(), wanted=()),)


def _cuts(
    parts: Sequence[tuple[Sequence[int], bool]],
    starts: Sequence[int],
    order: Sequence[int],
    read: Reads,
    unit_of: Mapping[int, int],
) -> set[int]:
    """The positions in `order` at which a segment begins.

    They are the ends of recomputed stretches, and the first reader of each unit.
    """
    cuts = {
        start
        for (_, repeated), edges in zip(parts, itertools.pairwise(starts), strict=True)
        if repeated
        for start in edges
    }
    first: dict[int, int] = {}
    for position, index in enumerate(order):
        for member in read.forward.get(index, ()):
            first.setdefault(unit_of[member], position)
    for position in first.values():
        part = bisect.bisect_right(starts, position) - 1
        # A recomputed stretch runs again in one piece, so its units are gathered in front of it.
        cuts.add(starts[part] if part < len(parts) and parts[part][1] else position)
    return cuts


def _around_layers(
    program: Program,
    parts: Sequence[tuple[Sequence[int], bool]],
    starts: Sequence[int],
    cuts: set[int],
) -> set[int]:
    """Move cuts between a layer of experts and what runs beside it in front of the layer."""
    bounds = set(cuts)
    for start, (steps, _) in zip(starts, parts, strict=False):
        for layers in works_before(program, steps).values():
            for layer in layers:
                number = steps.index(layer)
                first = start + number
                inside = range(first + 1, first + 1 + len(beside_of(program, steps[number:])))
                if not bounds.isdisjoint(inside):
                    bounds.difference_update(inside)
                    bounds.add(first)
    return bounds


def _layers_apart(
    program: Program, parts: Sequence[tuple[Sequence[int], bool]], starts: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """The layers that are segments of their own, from the first position to behind the last.

    A recomputed layer runs in one piece with its stretch.
    """
    edges = {}
    for start, (steps, repeated) in zip(starts, parts, strict=False):
        for layer, length in apart_from(program, steps).items() if not repeated else ():
            first = start + steps.index(layer)
            edges[layer] = (first, first + length)
    return edges


def _early(
    program: Program, indices: Sequence[int], working: Collection[int] = ()
) -> tuple[int, ...]:
    """Reorder a segment so that communication starts as soon as its value is made.

    A redistribution that communicates then stands directly behind the operator before it.

    Its collective then overlaps the computation up to its first reader. Values of earlier segments
    are redistributed where they are read.
    """
    mesh = program.assignment.mesh.shape
    layers = set(itertools.chain.from_iterable(works_before(program, indices, working).values()))
    behind: dict[PlacedValue, list[int]] = {}
    runs: list[list[int]] = []
    for index in indices:
        step = program.steps[index]
        if (
            isinstance(step, Redistribute)
            and reads(step)[0] in behind
            and departure(step, mesh) is not None
        ):
            behind[reads(step)[0]].append(index)
            continue
        runs.append([index])
        # The result of a layer beside which something runs is on its way until it is read.
        if isinstance(step, Compute) and index not in layers:
            # All results share the operator's list, to which their redistributions are added.
            behind.update(dict.fromkeys(makes(step), runs[-1]))
    return tuple(itertools.chain.from_iterable(runs))


def units_before(
    program: Program, modes: dict[int, Mode], unit_of: Mapping[int, int]
) -> dict[int, set[int]]:
    """The units from whose values the redistributions of each unit start."""
    earlier: dict[int, set[int]] = {}
    for member, source in sources_of(program, modes).items():
        earlier.setdefault(unit_of[member], set()).add(unit_of[source])
    return earlier


def _closed(units: set[int], before: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Units with all units that must be gathered before them; these have lower numbers."""
    closed: set[int] = set()
    rest = list(units)
    while rest:
        unit = rest.pop()
        if unit not in closed:
            closed.add(unit)
            rest += before.get(unit, ())
    return tuple(sorted(closed))


def _of_outputs(program: Program, modes: dict[int, Mode]) -> set[int]:
    """The redistributions of parameters whose values leave the program."""
    outputs = set(program.assignment.outputs.items())
    return {index for index in modes if makes(program.steps[index])[0] in outputs}


def _behind(program: Program, schedule: Schedule, modes: dict[int, Mode]) -> list[int]:
    """The recomputed stretch of every step, or -1.

    A redistribution belongs to the operator behind it.
    """
    named = Counter(name for segment in schedule.recompute for name in segment)
    known = {step.operator.name for step in program.steps if isinstance(step, Compute)}
    # A plan from a file may be of another model.
    if wrong := [name for name, count in named.items() if count > 1 or name not in known]:
        raise PlanError(
            f"the plan recomputes {', '.join(map(repr, wrong[:5]))}: not in the model, or named "
            "twice"
        )
    stretch_of = {
        name: number for number, segment in enumerate(schedule.recompute) for name in segment
    }
    stretches = [-1] * len(program.steps)
    behind = -1
    for index in reversed(range(len(program.steps))):
        step = program.steps[index]
        if isinstance(step, Compute):
            behind = stretch_of.get(step.operator.name, -1)
        stretches[index] = behind
    return stretches


def _parts(
    program: Program, schedule: Schedule, modes: dict[int, Mode]
) -> list[tuple[list[int], bool]]:
    """Cut the steps into parts, each recomputed stretch in one piece where possible.

    Steps between those of a stretch move in front of it; a step that depends on the stretch cuts
    it.
    """
    stretches = _behind(program, schedule, modes)
    parts: list[tuple[int, list[int]]] = [(-1, [])]
    inside: set[PlacedValue] = set()
    for index, step in enumerate(program.steps):
        if index in modes:
            continue
        stretch = stretches[index]
        current = parts[-1][0]
        if stretch == current:
            parts[-1][1].append(index)
        elif stretch < 0 and not any(place in inside for place in reads(step)):
            parts[-2][1].append(index)
            continue
        else:
            # An empty part goes between two stretches, so that in front of every stretch there is a
            # part for the steps that move out of it.
            if stretch >= 0 and current >= 0:
                parts.append((-1, []))
            parts.append((stretch, [index]))
            inside = set()
        if stretch >= 0:
            inside.update(makes(step))
    gradients = program.assignment.gradients
    return [
        (
            steps,
            stretch >= 0
            # A stretch without gradients saves nothing, so it has nothing to compute again.
            and any(
                name in gradients for index in steps for name, _ in makes(program.steps[index])
            ),
        )
        for stretch, steps in parts
        if steps
    ]
