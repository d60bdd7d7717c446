"""Casts in the order of a step: which parameters are cast by themselves, how often, and what else
of the order stays.
"""

from __future__ import annotations

import pytest

from autopar.order.actions import Word
from autopar.order.scheduled import scheduled
from autopar.order.units import Mode, sources_of
from autopar.order.value_flow import with_casts
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import B, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Program, Redistribute, only_casts
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import PLAIN, Schedule, Types
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.sharding.direct_assignment import pinned_assignment

SHAPE = Shape(
    layers=2, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=96, sequence=16, dropout=False
)
TYPES = Types(master="float32", reduce="float32")


def program_of(*, split: bool) -> Program:
    """Data parallel in 16 bits, parameters stored whole or split."""
    analysis = analyse(transformer(SHAPE, batch=8, dtype="bfloat16").graph, train=True)
    wanted = {}
    for op in analysis.warm:
        scalar = not analysis.graph.tensors[op.outputs[0]].shape
        options = analysis.offers[op.name].options
        wanted[op.name] = [
            S(0) if any((o.inputs if scalar else o.outputs)[0] == S(0) for o in options) else B
        ]
    assignment = pinned_assignment(
        analysis, Mesh.of(data=2), wanted, split_storage=[0] if split else []
    )
    return build_program(analysis.graph, assignment)


@pytest.mark.parametrize("split", [False, True])
def test_each_parameter_that_stays_is_cast_once(split: bool) -> None:
    program = program_of(split=split)
    assert with_casts(program, PLAIN.types) is program
    actual = with_casts(program, TYPES)
    casts = [
        step.tensor for step in actual.steps if isinstance(step, Redistribute) and only_casts(step)
    ]
    assert sorted(casts) == (
        [] if split else sorted(tensor.name for tensor in program.graph.parameters)
    ), "what is gathered is cast on the way"
    assert with_casts(actual, TYPES).steps == actual.steps, "once is enough"
    rest = [
        step for step in actual.steps if not (isinstance(step, Redistribute) and only_casts(step))
    ]
    assert rest == list(program.steps)


@pytest.mark.parametrize("gathered", ["per_step", "per_pass"])
def test_casts_are_gathered_once_a_step(gathered: str) -> None:
    plan = scheduled(
        program_of(split=False), Schedule(types=TYPES, micro_batches=4, gathered=gathered)
    )  # type: ignore[arg-type]
    assert all(
        unit.mode is Mode.ONCE and plan.gather_rounds(unit.number) == 1 for unit in plan.units
    )
    words = [action.word for action in plan.actions()]
    assert words.count(Word.GATHER) == words.count(Word.RELEASE) == len(plan.units)
    assert words.count(Word.REDUCE) == sum(
        plan.reduce_rounds(unit.number, last=True) for unit in plan.units
    )


def test_what_starts_from_a_cast_comes_behind_it() -> None:
    plan = scheduled(program_of(split=False), Schedule(types=TYPES))
    order = [member for unit in plan.units for group in unit.groups for member in group]
    sources = sources_of(plan.program, plan.modes)
    assert sources and all(
        order.index(source) < order.index(member) for member, source in sources.items()
    )


def test_units_hold_as_much_as_without_casts() -> None:
    program = program_of(split=False)
    parts = [
        scheduled(program, Schedule(types=types, unit_bytes=40_000)).units
        for types in (PLAIN.types, TYPES)
    ]
    assert len(parts[0]) > 1 and len(parts[0]) == len(parts[1])
    assert [2 * bucket.nbytes for unit in parts[0] for bucket in unit.buckets] == [
        b.nbytes for unit in parts[1] for b in unit.buckets
    ]
