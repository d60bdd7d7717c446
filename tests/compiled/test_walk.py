"""The compiled walk equals that in Python, number by number, and refuses what it cannot read."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import compiled
from autopar.compiled import in_python
from autopar.compiled.in_python import (
    BACKWARD,
    DIFFERENTIABLE,
    HEAVY,
    INPUT,
    MISSING,
    ONCE,
    REDISTRIBUTION,
    REMADE,
    VIEW,
    Memories,
    Places,
    Script,
    Way,
    new_memory,
)

needs_compiled = pytest.mark.skipif(
    compiled.walk is in_python.walk, reason="the package was installed without a compiler"
)
PLACES = 12
numbers = st.integers(0, PLACES - 1)
sizes = st.integers(0, 1000).map(lambda size: size / 3)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Script, int]:
    """Any steps over a few places, and the number of slots of what they keep."""
    code: list[int] = []
    held: list[float] = []
    code_at: list[int] = []
    sizes_at: list[int] = []
    slots = 0
    for worker in range(draw(st.integers(1, 12))):
        code_at.append(len(code))
        sizes_at.append(len(held))
        if draw(st.booleans()):
            flags = REDISTRIBUTION + draw(st.sampled_from((0, INPUT, DIFFERENTIABLE)))
            count = draw(st.integers(0, 3))
            code += (flags, worker, draw(numbers), draw(numbers), count)
            for _ in range(count):
                code += (draw(st.integers(0, 2)), draw(st.integers(0, 1)))
                held += (draw(sizes) for _ in range(4))
            continue
        inputs = draw(st.lists(numbers, max_size=4))
        outputs = draw(st.lists(numbers, min_size=1, max_size=3, unique=True))
        buffers = draw(st.integers(0, 2))
        kept = draw(st.lists(st.integers(0, len(inputs) + len(outputs) - 1), max_size=3))
        flows = draw(st.lists(st.tuples(numbers, st.integers(0, 2)), max_size=4))
        flags = sum(draw(st.sampled_from((0, flag))) for flag in (BACKWARD, ONCE, HEAVY))
        flags += draw(st.sampled_from((0, VIEW, REMADE))) if inputs else 0
        code += (flags, worker, slots, len(inputs), len(outputs), buffers, len(kept), len(flows))
        code += (*inputs, *outputs, *kept, *(number for flow in flows for number in flow))
        held += (draw(sizes) for _ in range(len(outputs) + buffers + 1 + 2 * len(flows)))
        slots += len(kept) + buffers
    arrays = array("q", code), array("d", held), array("q", code_at), array("q", sizes_at)
    return Script(*arrays), slots


def _places(slots: int) -> Places:
    nowhere = array("q", [MISSING])
    return Places(*(nowhere * PLACES for _ in range(5)), nowhere * slots)


def _memories() -> Memories:
    types = ("d", *"qqqqqq", "q", "q", "d")
    return Memories(*(array(of) for of in types))._replace(moments=array("q", [0]))


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(scripts(), st.data())
def test_compiled_walk_equals_python(drawn: tuple[Script, int], data: st.DataObject) -> None:
    script, slots = drawn
    count = len(script.code_at)
    ways = data.draw(st.lists(st.sampled_from(Way), min_size=1, max_size=4))
    results = []
    for walk in (in_python.walk, compiled.walk):
        places = _places(slots)
        memories = _memories()
        for way in ways:
            steps = range(count) if way is not Way.BACK else range(count)[::-1]
            if way is Way.BACK:
                gradient = new_memory(memories, 1.5)
                places.gradients[0] = gradient
                memories.holders[gradient] = 2
            walk(script, places, memories, steps, way)
        results.append((places, memories))
    assert results[0] == results[1]


@needs_compiled
def test_more_memories_than_there_is_room_for() -> None:
    """An operator of very many outputs, each of which takes memory."""
    code = array("q", [0, 0, 0, 0, PLACES, 0, 0, 0, *range(PLACES)])
    script = Script(code, array("d", [1.0] * (PLACES + 1)), array("q", [0]), array("q", [0]))
    memories = _memories()
    compiled.walk(script, _places(0), memories, [0] * 50, Way.FORWARD)
    assert len(memories.size) == 50 * PLACES
    assert len(memories.moments) == 51


@needs_compiled
def test_compiled_walk_refuses() -> None:
    script = Script(array("q"), array("d"), array("q"), array("q"))
    with pytest.raises(ValueError, match="not in the script"):
        compiled.walk(script, _places(0), _memories(), [0], Way.FORWARD)
    with pytest.raises(ValueError, match="types"):
        compiled.walk(script._replace(sizes=array("q")), _places(0), _memories(), [0], Way.BACK)
