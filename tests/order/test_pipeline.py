"""Whole orders of pipelines: what is sent is received, nothing stands still, torch reads them, and
what cannot be run is told.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.order.actions import Action, Pair, Word, one_by_one
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.playing import OrderError, play
from autopar.order.schedules import SCHEDULES
from tests.order.order_checks import check_order

SENDS = (Word.SEND_FORWARD, Word.SEND_BACKWARD)
RECEIVES = (Word.RECEIVE_FORWARD, Word.RECEIVE_BACKWARD)
Pipeline = tuple[str, int, int, int]


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Schedule, stages, micro-batches, chunks a stage."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    p = draw(st.integers(1, 6))
    v = draw(st.integers(1, 3)) if SCHEDULES[name].chunks else 1
    possible = [m for m in range(1, 13) if not SCHEDULES[name].refusal(p, m, v)]
    return name, p, draw(st.sampled_from(possible)), v


@st.composite
def webs(draw: st.DrawFn, chunks: int) -> list[tuple[int, int]]:
    """Any pairs of an earlier and a later chunk, with those of neighbours or without."""
    pairs = [(a, b) for b in range(chunks) for a in range(b)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return sorted({*skips, *(neighbours(chunks) if draw(st.booleans()) else ())})


@given(data=st.data(), pipeline=pipelines(), train=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_order_runs_to_its_end(data: st.DataObject, pipeline: Pipeline, train: bool) -> None:
    name, p, m, v = pipeline
    edges = data.draw(webs(p * v))
    orders = pipeline_order(name, p, m, v, edges=edges, train=train)
    check_order(orders, edges)
    assert len(list(play(orders))) == sum(map(len, orders))
    across = [edge for edge in edges if edge[0] % p != edge[1] % p]
    sent = sorted(
        (a.word, a.chunk, a.peer, a.micro_batch)
        for order in orders
        for a in one_by_one(order)
        if a.word in SENDS
    )
    ahead = [(Word.SEND_FORWARD, a, b, k) for a, b in across for k in range(m)]
    back = [(Word.SEND_BACKWARD, b, a, k) for a, b in across for k in range(m)]
    assert sent == sorted(ahead + back if train else ahead)
    for stage, order in enumerate(orders):
        passes = [a for a in order if not isinstance(a, Action) or a.peer is None]
        planned = SCHEDULES[name].order(stage, p, m, v)
        ahead = [a for a in one_by_one(planned) if a.word is Word.FORWARD]
        assert passes == (planned if train else ahead)


@given(data=st.data(), pipeline=pipelines())
@settings(max_examples=60, deadline=None)
def test_messages_follow_the_pass_that_makes_them_and_are_received_when_one_is_needed(
    data: st.DataObject, pipeline: Pipeline
) -> None:
    name, p, m, v = pipeline
    edges = data.draw(webs(p * v))
    for order in pipeline_order(name, p, m, v, edges=edges):
        for before, after in pairwise(order):
            # A pair sends behind both passes, and receives before both.
            if not isinstance(before, Action) or not isinstance(after, Action):
                message = before if isinstance(before, Action) else after
                pair = after if message is before else before
                own = [(a.chunk, a.micro_batch) for a in one_by_one([pair])]
                if isinstance(message, Action) and message.peer is not None:
                    assert (message.chunk, message.micro_batch) in own
                continue
            behind_pair = before.word is Word.SEND_FORWARD and after.word is Word.SEND_BACKWARD
            if after.word in SENDS and not behind_pair:
                assert (before.chunk, before.micro_batch) == (after.chunk, after.micro_batch)
                assert before.word in (
                    after.word,
                    Word.FORWARD if after.word is Word.SEND_FORWARD else before.word,
                )
            if before.word in RECEIVES and after.word not in RECEIVES:
                assert (before.chunk, before.micro_batch) == (after.chunk, after.micro_batch)
        assert not order or all(a.word not in RECEIVES for a in one_by_one(order[-1:]))


def test_a_value_that_skips_a_stage_is_received_in_the_order_of_its_sender() -> None:
    """Chunk 0 hands on to 1 and to 3, both on stage 1, which needs the former of both micro-batches
    first.
    """
    edges = [(0, 1), (0, 3), (1, 2), (2, 3)]
    received = [
        str(a)
        for a in pipeline_order("interleaved", 2, 2, 2, edges=edges, train=False)[1]
        if a.word is Word.RECEIVE_FORWARD
    ]
    assert received == [
        "1RECV_F0>0",
        "3RECV_F0>0",
        "1RECV_F1>0",
        "3RECV_F1>0",
        "3RECV_F0>2",
        "3RECV_F1>2",
    ]


def test_chunks_of_one_stage_send_nothing() -> None:
    (only,) = pipeline_order("interleaved", 1, 2, 3, edges=neighbours(3))
    assert " ".join(map(str, only)) == "0F0 1F0 2F0 2B0 0F1 1B0 1F1 0B0 2F1 2B1 1B1 0B1"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (3, 3, 1), (1, 2, 1)])
def test_torch_reads_and_plays_the_order(name: str, p: int, m: int, v: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    v = v if SCHEDULES[name].chunks else 1
    orders = pipeline_order(name, p, m, v, edges=neighbours(p * v))
    read = {
        stage: [
            schedules._Action.from_str(str(replace(action, peer=None)))
            for action in one_by_one(order)
        ]
        for stage, order in enumerate(orders)
    }
    for stage, order in enumerate(orders):
        expected = [(a.chunk, a.word.value, a.micro_batch) for a in one_by_one(order)]
        assert [
            (a.stage_index, a.computation_type.value, a.microbatch_index) for a in read[stage]
        ] == expected
    played = schedules._simulate_comms_compute(read, lambda chunk: chunk % p, p * v)
    assert sum(action is not None for done in played.values() for action in done) == sum(
        len(list(one_by_one(order))) for order in orders
    )


def _read(text: str) -> Action:
    """An action from its text: chunk, word, micro-batch, and the other chunk behind an arrow."""
    own, _, peer = text.partition(">")
    word = next(w for w in sorted(Word, key=len, reverse=True) if w in own)
    chunk, _, number = own.partition(word)
    return Action(
        word=word, chunk=int(chunk), micro_batch=int(number), peer=int(peer) if peer else None
    )


def _item(text: str) -> Action | Pair:
    """An action, or a pair with a plus between its passes."""
    first, plus, second = text.partition("+")
    return (_read(first), _read(second)) if plus else _read(text)


WRONG = {
    "stands still": (
        ["0RECV_B0>1 0F0 0SEND_F0>1 0B0", "1RECV_F0>0 1F0 1B0 1SEND_B0>0"],
        "itself: stage 0 at 0RECV_B0>1, stage 1 at 1RECV_F0>0",
    ),
    "unreceived": (["0F0 0SEND_F0>1", "1F1"], "from stage 0 to stage 1 0SEND_F0>1 is not received"),
    "unsent": (["0F0", "1RECV_F0>0 1F0"], "from stage 0 to stage 1 0SEND_F0>1 is not sent"),
    "sent twice": (["0F0 0SEND_F0>1 0SEND_F0>1", "1RECV_F0>0 1F0"], "0SEND_F0>1 is not received"),
    "orders differ": (
        ["0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1>0 1F1 1RECV_F0>0 1F0"],
        "0SEND_F0>1 is sent where 0SEND_F1>1 is received",
    ),
    "orders differ of values and gradients": (
        ["0F0 0RECV_B0>1 0B0 2RECV_F0>1 2F0", "1F0 1SEND_F0>2 1B0 1SEND_B0>0"],
        "1SEND_F0>2 is sent where 1SEND_B0>0 is received",
    ),
    "no input": (["0F0 0SEND_F0>1", "1F0 1RECV_F0>0"], "stage 1 runs 1F0 before 1RECV_F0>0"),
    "no input on the same stage": (["1F0 0F0"], "stage 0 runs 1F0 before 0F0"),
    "no gradient": (
        ["0F0 0SEND_F0>1 0B0 0RECV_B0>1", "1RECV_F0>0 1F0 1I0 1SEND_B0>0 1W0"],
        "stage 0 runs 0B0 before 0RECV_B0>1",
    ),
    "no gradient on the same stage": (["0F0 1F0 0B0 1B0"], "stage 0 runs 0B0 before 1B0 or 1I0"),
    "no forward pass": (["0B0 0F0"], "stage 0 runs 0B0 before 0F0"),
    "weights before inputs": (["0F0 0W0 0I0"], "stage 0 runs 0W0 before 0I0"),
    "sent before made": (
        ["0SEND_F0>1 0F0", "1RECV_F0>0 1F0"],
        "stage 0 runs 0SEND_F0>1 before 0F0",
    ),
    "gradient sent before made": (
        ["0F0 0SEND_F0>1 0RECV_B0>1 0B0", "1RECV_F0>0 1F0 1SEND_B0>0 1B0"],
        "1SEND_B0>0 before 1B0 or 1I0",
    ),
    "a pass merged with its own backward pass": (["0F0+0B0"], "stage 0 runs 0B0 before 0F0"),
    "merged with the pass that it needs": (["0F0+1F0"], "stage 0 runs 1F0 before 0F0"),
    "two homes": (["0F0", "0F1"], "chunk 0 is on stage 0 and on stage 1"),
    "nobody": (["0F0 0SEND_F0>7"], "0SEND_F0>7 leads to chunk 7, which no stage holds"),
    "no peer": (["0F0 0SEND_F0"], "0SEND_F0 does not say with which chunk"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_order_that_cannot_be_run_is_an_error(case: str) -> None:
    lines, words = WRONG[case]
    orders = [[_item(text) for text in line.split()] for line in lines]
    with pytest.raises(OrderError, match=words):
        check_order(orders, neighbours(3))


def test_what_cannot_be_ordered_is_an_error() -> None:
    with pytest.raises(OrderError, match="from chunk 1 to chunk 0 of 2"):
        pipeline_order("1f1b", 2, 2, edges=[(1, 0)])
    with pytest.raises(OrderError, match="from chunk 0 to chunk 2 of 2"):
        pipeline_order("1f1b", 2, 2, edges=[(0, 2)])
    with pytest.raises(UsageError, match="no multiple"):
        pipeline_order("interleaved", 2, 3, 2, edges=[])


NEW = '''
"""Each micro-batch by itself."""
from autopar.order.schedules.row import PipelineSchedule

SCHEDULE = PipelineSchedule(
    name="one_by_one", description="each micro-batch by itself", source="-", year=2030, preferred=9,
    words=lambda s, p, m, v: "FB" * m,
    seconds=lambda t, m, v: m * float(t.forward.sum() + t.backward.sum()),
    bubble=lambda p, w, v: 1e-3, refuses=lambda p, m, v: "odd" if m % 2 else "",
)
'''
ADDED = """
import importlib.util, sys
spec = importlib.util.find_spec("autopar.order.schedules")
spec.submodule_search_locations.append(sys.argv[1])
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from autopar.cli.parser import build_parser
from autopar.plan_parts import SchedulePlan
from autopar.planning.space.schedules import schedules_for
from autopar.planning.space.schedules import thrifty
from autopar.planning.stages.estimate import Pipe
from autopar.planning.model.request import Request
from autopar.costmodel import load_cluster
from autopar.order.schedules import step_seconds
from autopar.order.times import Times
from autopar.order.pipeline import neighbours, pipeline_order
from tests.order.order_checks import check_order
assert build_parser().parse_args(["plan", "m", "--schedule", "one_by_one"]).schedule == "one_by_one"
assert SchedulePlan(pipeline="one_by_one").pipeline == "one_by_one"
assert SchedulePlan.model_json_schema()["properties"]["pipeline"]["enum"][-1] == "one_by_one"
assert [n for n, _ in schedules_for(2, 4, pieces=9)][-1] == "one_by_one"
assert "one_by_one" not in dict(schedules_for(2, 3, pieces=9))
assert thrifty(None, 2, 4) == "one_by_one" == thrifty("one_by_one", 2, 4)
assert Pipe(stages=2, micro_batches=4, weight=0.1).bubble("one_by_one") == 1e-3
assert Request(cluster=load_cluster("dgx-h100"), schedule="one_by_one").schedule == "one_by_one"
assert step_seconds("one_by_one", Times.of([1.0] * 3, [2.0] * 3), 4) == 36.0
check_order(pipeline_order("one_by_one", 3, 4, edges=neighbours(3)), neighbours(3))
"""


def test_a_new_schedule_is_one_new_file(tmp_path: Path) -> None:
    """It is then known to the command line, the plan file, the search and the prices."""
    (tmp_path / "added.py").write_text(NEW, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", ADDED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
