"""Units, segments and the actions of a step: what is gathered, let go and reduced, when, and how
many bytes that moves.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.ir import Role
from autopar.order.actions import Action, Word
from autopar.order.execution import execution
from autopar.order.scheduled import Mode, Scheduled, makes, reads, scheduled
from autopar.order.units import gathers
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, R, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Collective, Compute, Program, Redistribute
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import Schedule
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.sharding.direct_assignment import pinned_assignment

SHAPE = Shape(
    layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=96, sequence=16, dropout=False
)
SMALL = 16 * 2**10
LARGE = 2**30
MODES = (("per_step", "whole"), ("per_step", "shards"), ("per_pass", "shards"))


def _batch_parallel(mesh: Mesh, *, split: bool) -> tuple[Assignment, Analysis]:
    """Data parallel over all axes; with `split` parameters are stored split over the last one."""
    analysis = analyse(transformer(SHAPE, batch=16).graph, train=True)
    wanted = {}
    for op in analysis.warm:
        options = analysis.offers[op.name].options
        scalar = not analysis.graph.tensors[op.outputs[0]].shape
        rows = [o for o in options if (o.inputs if scalar else o.outputs)[0] == S(0)]
        wanted[op.name] = [S(0) if rows else B] * len(mesh.axes)
    return pinned_assignment(
        analysis, mesh, wanted, split_storage=[len(mesh.axes) - 1] if split else []
    ), analysis


MESHES = {
    "data": _batch_parallel(Mesh.of(data=2), split=False),
    "zero": _batch_parallel(Mesh.of(data=2), split=True),
    "both": _batch_parallel(Mesh.of(node=2, gpu=2), split=True),
}


@functools.cache
def _program(name: str, micro_batches: int) -> Program:
    return execution(*MESHES[name], Schedule(micro_batches=micro_batches)).micro.program


def _of(name: str, schedule: Schedule) -> Scheduled:
    return scheduled(_program(name, schedule.micro_batches), schedule)


def _layer(analysis: Analysis, number: int) -> tuple[str, ...]:
    return tuple(op.name for op in analysis.warm if op.name.startswith(f"layers.{number}."))


def _steps(plan: Scheduled, members: Sequence[int]) -> list[Redistribute]:
    return [
        step for index in members if isinstance(step := plan.program.steps[index], Redistribute)
    ]


def _of_parameters(plan: Scheduled) -> list[Collective]:
    tensors = plan.program.graph.tensors
    return [c for c in plan.collectives() if tensors[c.tensor].role is Role.PARAMETER]


def _bytes(plan: Scheduled) -> Counter[tuple[str, str, int]]:
    counted: Counter[tuple[str, str, int]] = Counter()
    for c in plan.collectives():
        counted[c.phase, c.kind, c.axes] += c.nbytes
    return counted


schedules = st.builds(
    lambda mode, count, unit, prefetch, layers: Schedule(
        micro_batches=count,
        gathered=mode[0],
        accumulated=mode[1],
        unit_bytes=unit,
        prefetch=prefetch,
        recompute=tuple(_layer(MESHES["zero"][1], number) for number in layers),
    ),
    st.sampled_from(MODES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, SMALL, 3 * SMALL, LARGE]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([(), (0,), (0, 1)]),
)


# --- units ---


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("unit_bytes", [1, SMALL, 3 * SMALL, LARGE])
def test_units_hold_every_redistribution_of_a_parameter_once_in_the_order_of_reading(
    name: str, unit_bytes: int
) -> None:
    plan = _of(name, Schedule(unit_bytes=unit_bytes, gathered="per_pass"))
    steps = plan.program.steps
    mesh = plan.program.assignment.mesh.shape
    names = {t.name for t in plan.program.graph.parameters}
    parameters = [
        index
        for index, step in enumerate(steps)
        if isinstance(step, Redistribute) and step.tensor in names
    ]
    assert sorted(itertools.chain.from_iterable(unit.members for unit in plan.units)) == parameters
    firsts = [min(unit.members) for unit in plan.units]
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))
    for unit in plan.units:
        assert {plan.modes[index] for index in unit.members} == {unit.mode}
        for group in unit.groups:
            members = _steps(plan, group)
            kinds = {
                tuple(tuple(p.kind for p in layout) for layout in m.chain[m.bucketed :])
                for m in members
            }
            assert (
                len(kinds) == 1
                and len({plan.program.graph.tensors[m.tensor].dtype for m in members}) == 1
            ), "one message carries them"
        sizes = [
            max(
                local_bytes(layout, plan.program.graph.tensors[m.tensor].bytes, mesh)
                for layout in (m.chain[0], m.chain[-1])
            )
            for m in _steps(plan, unit.members)
        ]
        assert sum(sizes) <= max(unit_bytes, max(sizes)), (
            "larger than a unit is but what is large alone"
        )
    if unit_bytes == LARGE:
        assert len(plan.units) == len({unit.mode for unit in plan.units}), "one unit of each mode"
    elif unit_bytes == 1:
        assert all(len(unit.members) == 1 for unit in plan.units) and firsts == sorted(firsts)


def test_modes_follow_the_schedule_and_what_gathers() -> None:
    for gathered, accumulated in MODES:
        for name in MESHES:
            plan = _of(name, Schedule(gathered=gathered, accumulated=accumulated))  # type: ignore[arg-type]
            wanted = Mode.SHARDS if accumulated == "shards" else Mode.ONCE
            if gathered == "per_pass":
                wanted = Mode.PER_PASS
            for index, mode in plan.modes.items():
                (step,) = _steps(plan, [index])
                assert mode is (
                    wanted if gathers(step, plan.program.assignment.mesh.shape) else Mode.ONCE
                ), step
            assert any(plan.gather_rounds(unit.number) for unit in plan.units) is (name != "data")


def test_buckets_hold_every_gradient_that_is_partial_where_it_is_stored() -> None:
    """Data parallel: one all-reduce a unit, of the parameters first read there, the last read
    first; over both axes with two.
    """
    for unit_bytes in (1, SMALL, LARGE):
        plan = _of("data", Schedule(unit_bytes=unit_bytes))
        names = [name for bucket in plan.buckets for name in bucket.parameters]
        trained = [t.name for t in plan.program.graph.parameters]
        assert sorted(names) == sorted(trained)
        assert all(
            len(unit.buckets) == 1 and unit.buckets[0].sums == ((0,),) for unit in plan.units
        )
        assert sum(bucket.nbytes for bucket in plan.buckets) == sum(
            t.bytes for t in plan.program.graph.parameters
        )
        assert all(
            unit.buckets[0].parameters
            == tuple(m.tensor for m in reversed(_steps(plan, unit.members)))
            for unit in plan.units
        )
    two = _of("both", Schedule())
    assert {bucket.sums for unit in two.units for bucket in unit.buckets} <= {((0,),), ((0, 1),)}
    assert not _of("zero", Schedule(unit_bytes=LARGE)).buckets or all(
        b.sums == ((0,),) for b in _of("zero", Schedule()).buckets
    )


# --- how often ---


def test_gathers_and_reductions_of_each_mode() -> None:
    """Parameters that are all stored split and used whole are gathered by unit, not one by one."""
    for unit_bytes in (SMALL, LARGE):
        first = _of("zero", Schedule(unit_bytes=unit_bytes))
        messages = sum(len(unit.groups) for unit in first.units if first.gather_rounds(unit.number))
        assert messages < len(first.modes) / 2, "fewer messages than parameters"

        def counts(unit_bytes: int = unit_bytes, **options: object) -> Counter[tuple[str, str]]:
            plan = _of("zero", Schedule(unit_bytes=unit_bytes, **options))  # type: ignore[arg-type]
            return Counter(
                (c.phase, c.kind) for c in _of_parameters(plan) if c.kind != "all_reduce"
            )

        once = counts()
        assert once["forward", "all_gather"] == once["backward", "reduce_scatter"] == messages
        assert counts(micro_batches=4) == once, (
            "gathered once, reduced once, whatever the number of micro-batches"
        )
        shards = counts(micro_batches=4, accumulated="shards")
        assert (
            shards["forward", "all_gather"] == messages
            and shards["backward", "reduce_scatter"] == 4 * messages
        )
        again = counts(micro_batches=4, gathered="per_pass", accumulated="shards")
        assert again["backward", "reduce_scatter"] == 4 * messages
        assert (
            again["forward", "all_gather"] + again["backward", "all_gather"] > 4 * messages
            if unit_bytes == SMALL
            else True
        )


def test_what_the_backward_pass_does_not_read_is_not_gathered_for_it() -> None:
    """Weights are needed again, what is only added is not: with a unit for each parameter, biases
    are gathered for forward alone.
    """
    plan = _of("zero", Schedule(unit_bytes=1, gathered="per_pass"))
    wanted = {unit for segment in plan.segments for unit in segment.wanted}
    tensors = {_steps(plan, plan.units[unit].members)[0].tensor for unit in wanted}
    everything = {
        _steps(plan, unit.members)[0].tensor for unit in plan.units if unit.mode is Mode.PER_PASS
    }
    assert tensors < everything
    biases = {name for name in everything if name.endswith("bias") and "norm" not in name}
    assert biases and not biases & tensors
    assert {
        name
        for name in everything
        if name.endswith("weight") and "norm" not in name and "embed" not in name
    } <= tensors


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_units_move_the_bytes_of_their_parameters_one_by_one(name: str, schedule: Schedule) -> None:
    """Reductions move the same bytes however they are packed; gathers too, but for what is gathered
    again beside its neighbours.
    """
    plan = _of(name, schedule)
    alone = _of(name, replace(schedule, unit_bytes=1))
    ours = _bytes(plan)
    theirs = _bytes(alone)
    for key in set(ours) | set(theirs):
        if key[1] == "all_gather" and schedule.gathered == "per_pass":
            continue
        assert ours[key] == theirs[key], key
    assert len(plan.collectives()) <= len(alone.collectives()) or schedule.gathered == "per_pass"


# --- segments ---


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_segments_hold_every_other_step_once_in_an_order_that_runs(
    name: str, schedule: Schedule
) -> None:
    plan = _of(name, schedule)
    inside = [index for segment in plan.segments for index in segment.steps]
    assert sorted([*inside, *plan.modes]) == list(range(len(plan.program.steps)))
    assert sorted(plan.order) == list(range(len(plan.program.steps)))
    made = {place for index in plan.order for place in makes(plan.program.steps[index])}
    known: set[object] = set()
    for index in plan.order:
        step = plan.program.steps[index]
        assert all(place in known or place not in made for place in reads(step)), (
            "nothing is read before it is made"
        )
        known.update(makes(step))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_a_segment_names_the_units_that_it_reads(name: str, schedule: Schedule) -> None:
    plan = _of(name, schedule)
    unit_of = {
        place: unit.number
        for unit in plan.units
        for index in unit.members
        for place in makes(plan.program.steps[index])
    }
    seen: set[int] = set()
    for segment in plan.segments:
        each = [
            {unit_of[p] for p in reads(plan.program.steps[index]) if p in unit_of}
            for index in segment.steps
        ]
        read = set[int]().union(*each)
        assert read <= set(segment.units) and set(segment.wanted) <= set(segment.units)
        if not segment.recomputed:
            assert all(units <= seen for units in each[1:] if not units & each[0]), (
                "cut before the first reader of a unit"
            )
        seen |= read
        if segment.recomputed:
            assert set(segment.wanted) == set(segment.units), "made again, it reads all of it again"


def test_a_recomputed_stretch_is_one_segment() -> None:
    analysis = MESHES["zero"][1]
    layers = tuple(_layer(analysis, number) for number in range(2))
    for gathered in ("per_step", "per_pass"):
        for unit_bytes in (1, SMALL, LARGE):
            plan = _of("zero", Schedule(recompute=layers, gathered=gathered, unit_bytes=unit_bytes))  # type: ignore[arg-type]
            names = [
                tuple(
                    s.operator.name
                    for i in segment.steps
                    if isinstance(s := plan.program.steps[i], Compute)
                )
                for segment in plan.segments
                if segment.recomputed
            ]
            assert names == list(layers), "each stretch in one piece"


def test_stretches_that_interleave_run_in_an_order_that_holds() -> None:
    assignment, analysis = MESHES["zero"]
    names = [op.name for op in analysis.warm]
    for first in range(0, len(names) - 12, 5):
        recompute = (tuple(names[first : first + 12 : 2]), tuple(names[first + 12 :]))
        plan = execution(
            assignment, analysis, Schedule(recompute=recompute, unit_bytes=SMALL)
        ).micro
        assert sorted(plan.order) == list(range(len(plan.program.steps)))


def test_unknown_and_repeated_operators_are_named() -> None:
    assignment, analysis = MESHES["zero"]
    name = analysis.warm[3].name
    for wrong in ((("no such",),), ((name,), (name,))):
        with pytest.raises(PlanError, match=r"recomputes .* not in the model, or named twice"):
            execution(assignment, analysis, Schedule(recompute=wrong))


# --- the order ---


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_a_unit_is_there_when_a_visit_needs_it_and_let_go_once(
    name: str, schedule: Schedule
) -> None:
    plan = _of(name, schedule)
    held: Counter[int] = Counter()
    gathered: Counter[int] = Counter()
    rounds: Counter[int] = Counter()
    for action in plan.actions():
        if action.word is Word.GATHER:
            assert action.unit is not None and action.round is not None
            if action.round == 0:
                assert not held[action.unit], "not gathered while it is there"
                rounds[action.unit] = 0
                gathered[action.unit] += 1
            assert action.round == rounds[action.unit], "round after round"
            rounds[action.unit] += 1
            held[action.unit] = rounds[action.unit] == plan.gather_rounds(action.unit)
        elif action.word is Word.RELEASE:
            assert action.unit is not None
            held[action.unit] -= 1
            assert held[action.unit] == 0
        elif action.word in (Word.FORWARD, Word.BACKWARD):
            segment = plan.segments[action.segment or 0]
            needed = segment.units if action.word is Word.FORWARD else segment.wanted
            assert all(held[unit] == 1 for unit in needed if plan.gather_rounds(unit))
    assert not any(held.values()), "all is let go at the end"
    for unit in plan.units:
        if plan.gather_rounds(unit.number):
            # A unit that stays from one pass to the next is the only one that passes need.
            alone = len(plan.units) == 1
            assert (
                gathered[unit.number] == 1
                if unit.mode is not Mode.PER_PASS
                else gathered[unit.number] >= (1 if alone else schedule.micro_batches)
            )


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_every_gradient_is_reduced_when_it_is_complete(name: str, schedule: Schedule) -> None:
    """Once a step, behind the last micro-batch (mode once), or once a micro-batch; and behind all
    backward visits that add to it.
    """
    plan = _of(name, schedule)
    actual = plan.actions()
    reduced = [(n, action) for n, action in enumerate(actual) if action.word is Word.REDUCE]
    for unit in plan.units:
        mine = [(n, a) for n, a in reduced if a.unit == unit.number and a.round == 0]
        wanted = list(range(schedule.micro_batches))
        if not plan.reduce_rounds(unit.number, last=True):
            wanted = []
        elif unit.mode is Mode.ONCE:
            wanted = wanted[-1:]
        assert [a.micro_batch for _, a in mine] == wanted
        for n, action in mine:
            readers = {
                number
                for number, segment in enumerate(plan.segments)
                if unit.number in segment.units
            }
            behind = {
                a.segment
                for a in actual[:n]
                if a.word is Word.BACKWARD and a.micro_batch == action.micro_batch
            }
            assert readers <= behind
            later = itertools.takewhile(lambda a: a.segment is None, actual[n::-1])
            assert {a.word for a in later} <= {Word.REDUCE, Word.GATHER, Word.RELEASE}
    messages = [c for _, action in reduced for c in plan.issued(action)]
    assert sum(c.kind == "all_reduce" for c in messages) == sum(
        len(bucket.sums) for bucket in plan.buckets
    )


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(list(MESHES)), schedule=schedules)
def test_passes_are_in_order_and_gathers_come_so_many_visits_early(
    name: str, schedule: Schedule
) -> None:
    plan = _of(name, schedule)
    actions = plan.actions()
    visits = [
        (a.word, a.micro_batch, a.segment)
        for a in actions
        if a.word in (Word.FORWARD, Word.BACKWARD)
    ]
    numbers = range(len(plan.segments))
    assert visits == [
        visit
        for m in range(schedule.micro_batches)
        for visit in (
            *((Word.FORWARD, m, n) for n in numbers),
            *((Word.BACKWARD, m, n) for n in reversed(numbers)),
        )
    ]
    needs = [
        plan.segments[n].units if word is Word.FORWARD else plan.segments[n].wanted
        for word, _, n in visits
    ]  # type: ignore[index]
    place = -1
    for action in actions:
        if action.word in (Word.FORWARD, Word.BACKWARD):
            place += 1
        elif action.word is Word.GATHER:
            assert action.unit is not None and action.round is not None
            ahead = next(n for n in range(place + 1, len(visits)) if action.unit in needs[n])
            rounds = plan.gather_rounds(action.unit) - action.round
            # Only visits that need a unit count.
            early = sum(map(bool, needs[place + 1 : ahead]))
            assert early == schedule.prefetch * rounds or (
                place == -1 and early < schedule.prefetch * rounds
            )
        elif (
            action.word is Word.RELEASE
            and action.unit is not None
            and plan.units[action.unit].mode is Mode.PER_PASS
        ):
            assert action.unit in needs[place], (
                "let go behind the last of consecutive visits that need it"
            )
            rounds = plan.gather_rounds(action.unit)
            later = [need for need in needs[place + 1 :] if need]
            assert not any(
                action.unit in need for need in later[: max(rounds * schedule.prefetch, 1)]
            )


def test_the_units_of_the_last_segment_stay_for_its_backward_pass() -> None:
    plan = _of("zero", Schedule(unit_bytes=SMALL, gathered="per_pass"))
    actions = plan.actions()
    last = len(plan.segments) - 1
    turn = next(n for n, a in enumerate(actions) if a.word is Word.BACKWARD)
    stays = set(plan.segments[last].units) & set(plan.segments[last].wanted)
    assert stays
    between = actions[
        next(
            n for n, a in enumerate(actions) if a.word is Word.FORWARD and a.segment == last
        ) : turn
    ]
    assert not stays & {a.unit for a in between if a.word in (Word.GATHER, Word.RELEASE)}


def test_inference_gathers_each_unit_once_and_reduces_nothing() -> None:
    analysis = analyse(transformer(SHAPE, batch=16).graph, train=False)
    wanted = {
        op.name: [
            S(0) if any(o.outputs[0] == S(0) for o in analysis.offers[op.name].options) else R
        ]
        for op in analysis.warm
    }
    assignment = pinned_assignment(analysis, Mesh.of(data=2), wanted, split_storage=[0])
    plan = execution(assignment, analysis, Schedule(unit_bytes=SMALL, gathered="per_pass")).micro
    words = Counter(action.word for action in plan.actions())
    assert set(words) == {Word.FORWARD, Word.GATHER, Word.RELEASE} and words[Word.FORWARD] == len(
        plan.segments
    )
    assert words[Word.GATHER] >= sum(plan.gather_rounds(unit.number) for unit in plan.units)
    assert words[Word.RELEASE] >= sum(plan.gather_rounds(unit.number) > 0 for unit in plan.units)
    assert {c.phase for c in plan.collectives()} == {"forward"}


def test_the_collectives_are_those_of_the_actions() -> None:
    for name in MESHES:
        plan = _of(name, Schedule(unit_bytes=SMALL, gathered="per_pass", micro_batches=2))
        issued = Counter(
            (c.kind, c.axes, c.nbytes, c.tensor)
            for action in plan.actions()
            for c in plan.issued(action)
        )
        assert Counter((c.kind, c.axes, c.nbytes, c.tensor) for c in plan.collectives()) == issued
        assert not plan.issued(Action(word=Word.RELEASE, unit=0))


@pytest.mark.parametrize("count", [1, 4])
def test_micro_batches_have_a_program_of_their_own(count: int) -> None:
    (chunk,) = execution(*MESHES["zero"], Schedule(micro_batches=count)).chunks
    assert (chunk.split is None) is (chunk.micro is chunk.whole) is (count == 1)
    whole, micro = (plan.program.graph.tensors for plan in (chunk.whole, chunk.micro))
    assert all(
        micro[name].size * count == whole[name].size for name in chunk.whole.program.graph.inputs
    )


def test_scheduling_twice_gives_the_same() -> None:
    for name, (assignment, analysis) in MESHES.items():
        schedule = Schedule(unit_bytes=SMALL, gathered="per_pass", micro_batches=2)
        one, two = (execution(assignment, analysis, schedule).micro for _ in range(2))
        assert one.actions() == two.actions() and one.units == two.units, name
        assert scheduled(one.program, schedule).segments == one.segments
