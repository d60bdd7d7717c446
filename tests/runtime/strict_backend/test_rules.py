"""The strict backend tells which rule was broken, by whom, and in which orders, and never hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import RunError
from autopar.runtime.launch import run_ranks
from autopar.runtime.strict_backend.progress import find_circle
from autopar.runtime.strict_backend.statements import BYTES, Statement
from tests.runtime.strict_backend import breaking

pytestmark = pytest.mark.usefixtures("strict_ranks")


RULES = [
    (breaking.other_kind, r"action 0F1.*all_reduce .sum. of 3 float32 .in action 0F1. on rank 1"),
    (breaking.other_kind, r"\n  rank 1: broadcast of 2 float32 from place 0; all_reduce"),
    (breaking.other_size, r"of 3 float32 on rank 0, but all_reduce .sum. of 4 float32 on rank 2"),
    (breaking.other_type, r"of 3 float32 on rank 0, but all_reduce .sum. of 3 float64 on rank 2"),
    (breaking.other_reduction, r"all_reduce .sum. .* on rank 0, but all_reduce .max."),
    (breaking.other_root, r"from place 0 on rank 0, but broadcast .* from place 1 on rank 1"),
    (breaking.other_order, r"group .0, 1, 2.: all_reduce .* of 2 .* but all_reduce .* of 4"),
    (breaking.other_parts, r"rank 0 sends 1 to rank 1, which expects 2"),
    (breaking.missing_rank, r"all_reduce .* on rank 0, but barrier on rank 2"),
    (breaking.crossed_groups, r"no rank can go on(.|\n)*all_reduce(.|\n)*all_reduce"),
    (breaking.members_alone, r"rank 0 makes the group .0, 2. while|but barrier on rank 1"),
    (breaking.unlike_groups, r"rank 0 makes the group .0, 1. while rank 1 makes .1, 2."),
    (
        breaking.made_in_a_circle,
        r"no rank can go on(.|\n)*rank 0 waits for ranks .1,. to make the gr",
    ),
    (breaking.both_send, r"ranks 0 and 1 both send first, and each send waits for its receive"),
    (breaking.sends_in_a_circle, r"no rank can go on(.|\n)*send of 2 float32 to rank"),
    (breaking.message_size, r"rank 0 sends 2 float32 .* rank 1 sends nothing and receives 3 float"),
    (breaking.message_and_collective, r"no rank can go on(.|\n)*send of 2 float32 to rank 1"),
    (breaking.lacking_type, r"NCCL has no torch.int16; send the bytes"),
    (breaking.other_device, r"a tensor on meta, but the group is on the cpu"),
    (breaking.in_pieces, r"a tensor with strides \(1, 4\) is in pieces"),
]


@pytest.mark.parametrize(
    ("program", "told"),
    RULES,
    ids=[f"{program.__name__} {n}" for n, (program, _) in enumerate(RULES)],
)
def test_a_broken_rule_is_told(program: Callable[[], None], told: str) -> None:
    with pytest.raises(RunError, match=told):
        run_ranks(program, 3, timeout=60.0)


def test_messages_in_a_batch_may_cross() -> None:
    assert run_ranks(breaking.batched, 3, timeout=60.0) == [[2.0] * 2, [0.0] * 2, [1.0] * 2]


def test_a_result_is_garbage_until_it_has_been_waited_for() -> None:
    assert run_ranks(breaking.late, 3, timeout=60.0) == [(True, 9.0)] * 3


def test_coalesced_collectives() -> None:
    assert run_ranks(breaking.coalesced, 3, timeout=60.0) == [[6.0, 9.0, 6.0, 9.0, 3.0, 6.0]] * 3


def test_collectives_in_place() -> None:
    results = run_ranks(breaking.in_place, 3, timeout=60.0)
    assert results == [[0.0, 1.0, 2.0, float(rank)] for rank in range(3)]


def test_objects_and_numbers_of_all_forms() -> None:
    texts = [f"rank {rank}" for rank in range(3)]
    results = run_ranks(breaking.objects, 3, timeout=60.0)
    assert [result[:4] for result in results] == [
        [texts, [2], 2j if rank != 1 else 1j, True] for rank in range(3)
    ]
    assert results[1][4] == [1.0, 2.0]


def test_a_statement_forgets_what_has_no_room() -> None:
    long = Statement(rank=1, kind="all_reduce", before=("x" * 900, "y" * 900, "z" * 900))
    read = Statement.from_bytes(long.to_bytes())
    assert len(long.to_bytes()) == BYTES
    assert read.before == ("y" * 900, "z" * 900)


def test_ranks_that_wait_for_a_running_one_are_no_circle() -> None:
    """Rank 1 has told nothing, so it runs; rank 2 waits for it, and rank 0 for rank 2."""
    waits: dict[int, dict[str, Any]] = {
        rank: {
            "version": 1,
            "beat": 1,
            "host": {"text": "", "group": "g", "peers": []},
            "heads": {"g": {"text": "", "collective": True, "peers": [1], "ranks": [0, 1, 2]}},
        }
        for rank in (0, 2)
    }
    assert find_circle(waits) == []
    waits[1] = {"version": 1, "beat": 1, "host": None, "heads": {}}
    assert find_circle(waits) == []
    waits[1]["host"] = {"text": "", "group": "h", "peers": [0]}
    assert find_circle(waits) == [("host", 0, ""), ("queue", 0, "g"), ("host", 1, "")]


def test_an_operation_that_its_queue_has_not_begun_is_no_circle() -> None:
    """The thread of a queue may wait for the processor as long as the machine is busy."""
    waits: dict[int, dict[str, Any]] = {
        rank: {
            "version": 1,
            "beat": 1,
            "host": {"text": "", "group": "g", "peers": []},
            "heads": {},
        }
        for rank in (0, 1)
    }
    assert find_circle(waits) == []
    waits[0]["heads"]["g"] = {"text": "", "collective": False, "peers": [1], "ranks": [0, 1]}
    assert find_circle(waits) == []
