"""Schedules: what they do to numbers, and the closed forms of their times against the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ClusterError
from tests.costmodel.collectives.schedules.algorithms import (
    METHODS,
    build,
    costs,
    fastest,
    method,
    seconds,
)
from tests.costmodel.collectives.schedules.schedule import Message, Schedule, execute, required
from tests.costmodel.collectives.schedules.simulator import Link, simulate

ALL = [(kind, algorithm) for kind in METHODS for algorithm in METHODS[kind]]
LEVELLED = [(kind, algorithm) for kind, algorithm in ALL if METHODS[kind][algorithm].levels]
QUICK = (2, 3, 4, 5, 7, 8, 9, 12, 16, 17)
LINK = Link(latency=1.7e-5, rate=1.3e9)
GB = 1e9


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=0)


def check_time(
    kind: str, algorithm: str, sizes: tuple[int, ...], links: tuple[Link, ...], *, segments: int = 8
) -> None:
    schedule = build(kind, algorithm, sizes, segments=segments)
    for nbytes in (0.0, 1e3, 3.7e7):
        closed = seconds(kind, algorithm, nbytes, sizes, links, segments=segments)
        assert simulate(schedule, nbytes, sizes, links) == close(closed), (
            kind,
            algorithm,
            sizes,
            nbytes,
        )


def check_numbers(kind: str, algorithm: str, ranks: int | tuple[int, ...]) -> None:
    """Every rank ends up with the values that the definition of the collective gives it."""
    schedule = build(kind, algorithm, ranks)
    p = schedule.ranks
    own = p if kind == "all_to_all" else schedule.chunks
    inputs = np.random.default_rng(p).integers(-9, 10, (p, own, 2)).astype(float)
    outputs = np.array(execute(schedule, inputs.reshape(p, -1).tolist())).reshape(p, own, 2)
    parts = np.array_split(np.arange(own), p)
    # Of these collectives only one rank has a result.
    match kind:
        case "reduce":
            assert np.array_equal(outputs[0], inputs.sum(axis=0))
        case "gather":
            assert np.array_equal(outputs[0], joined(inputs, parts))
        case "send":
            assert np.array_equal(outputs[p - 1], inputs[0])
        case _:
            check_all_ranks(kind, inputs, outputs, parts)


def joined(inputs: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """The own part of every rank, one after the other."""
    return np.concatenate([inputs[rank, part] for rank, part in enumerate(parts)])


def check_all_ranks(
    kind: str, inputs: np.ndarray, outputs: np.ndarray, parts: list[np.ndarray]
) -> None:
    """The result of every rank of a collective that gives one to all of them."""
    root = inputs[0]
    total = inputs.sum(axis=0)
    for rank, mine in enumerate(parts):
        match kind:
            case "all_reduce":
                assert np.array_equal(outputs[rank], total)
            case "broadcast":
                assert np.array_equal(outputs[rank], root)
            case "all_gather" | "barrier":
                assert np.array_equal(outputs[rank], joined(inputs, parts))
            case "reduce_scatter":
                assert np.array_equal(outputs[rank, mine], total[mine])
            case "scatter":
                assert np.array_equal(outputs[rank, mine], root[mine])
            case "all_to_all":
                assert np.array_equal(outputs[rank], inputs[:, rank])


@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_closed_form_and_numbers(kind: str, algorithm: str) -> None:
    for ranks in QUICK:
        check_time(kind, algorithm, (ranks,), (LINK,))
        check_numbers(kind, algorithm, ranks)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_closed_form_and_numbers_of_all_groups_up_to_64(kind: str, algorithm: str) -> None:
    for ranks in range(2, 65):
        check_time(kind, algorithm, (ranks,), (LINK,))
        check_numbers(kind, algorithm, ranks)


SHAPES = [(2, 2), (8, 2), (4, 3), (3, 5), (8, 4), (2, 3, 2), (4, 2, 3)]


@pytest.mark.parametrize(("kind", "algorithm"), LEVELLED)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_closed_form_over_levels_with_shared_ports(
    kind: str, algorithm: str, sizes: tuple[int, ...]
) -> None:
    fast = Link(latency=3e-6, rate=3e11)
    slow = Link(latency=2e-5, rate=1.25e10)
    inside = [1, *np.cumprod(sizes)]
    for shared in (False, True):
        # All devices of a node share its port, or two do.
        outer = [
            Link(
                latency=slow.latency, rate=slow.rate / i, shared_by=int(inside[i]) if shared else 1
            )
            for i in range(1, len(sizes))
        ]
        check_time(kind, algorithm, sizes, (fast, *outer))
    check_numbers(kind, algorithm, sizes)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [pair for pair in ALL if pair[1] in ("chain", "two_tree", "in_switch", "parameter_server")],
)
@pytest.mark.parametrize("segments", [3, 4, 17])
def test_any_number_of_segments(kind: str, algorithm: str, segments: int) -> None:
    for ranks in (2, 3, 6, 9):
        check_time(kind, algorithm, (ranks,), (LINK,), segments=segments)


@given(
    which=st.sampled_from(LEVELLED),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_closed_form_on_random_levels(
    which: tuple[str, str], sizes: list[int], data: st.DataObject
) -> None:
    latency = st.floats(0, 1e-3)
    rate = st.floats(1e6, 1e12)
    inside = [1, *np.cumprod(sizes)]
    links = []
    for unit in inside[:-1]:
        shared = data.draw(st.sampled_from([n for n in range(1, int(unit) + 1) if unit % n == 0]))
        links.append(Link(latency=data.draw(latency), rate=data.draw(rate), shared_by=shared))
    nbytes = data.draw(st.floats(0, 1e12))
    closed = seconds(*which, nbytes, sizes, links)
    assert simulate(build(*which, sizes), nbytes, sizes, links) == pytest.approx(
        closed, rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize("algorithm", METHODS["all_reduce"])
def test_all_reduce_of_three_small_buffers(algorithm: str) -> None:
    repeated = build("all_reduce", algorithm, 3).chunks
    inputs = [np.repeat(row, repeated).tolist() for row in ([2, 4, 6], [1, 2, 3], [4, 8, 12])]
    for row in execute(build("all_reduce", algorithm, 3), inputs):
        assert row.tolist() == np.repeat([7, 14, 21], repeated).tolist()


@pytest.mark.parametrize(("workers", "expected"), [(2, 1.2), (10, 10.8)])
def test_gathering_1_2_gb_at_one_server_of_1_gb_per_second(workers: int, expected: float) -> None:
    link = (Link(latency=0, rate=GB),)
    assert seconds("reduce", "linear", 1.2 * GB, (workers,), link) == close(expected)
    assert simulate(
        build("reduce", "parameter_server", workers), 1.2 * GB, (workers,), link
    ) == close(expected)
    # Giving the sum back at the same time in small segments adds next to nothing; afterwards it
    # takes as long again.
    both = seconds("all_reduce", "parameter_server", 1.2 * GB, (workers,), link, segments=10**6)
    assert both == pytest.approx(expected, rel=1e-5)
    assert seconds("all_reduce", "linear", 1.2 * GB, (workers,), link) == close(2 * expected)


@pytest.mark.parametrize("ranks", QUICK)
def test_a_ring_moves_what_no_all_reduce_can_do_without(ranks: int) -> None:
    schedule = build("all_reduce", "ring", ranks)
    assert [schedule.sent(rank) for rank in range(ranks)] == [
        close(2 * (ranks - 1) / ranks)
    ] * ranks


def test_shared_ports_are_divided() -> None:
    # Four devices a node exchange with their like in the other node; two of them share a port.
    swap = tuple(Message(source=r, destination=(r + 4) % 8, chunks=(r,)) for r in range(8))
    schedule = Schedule(kind="all_gather", ranks=8, parts=8, chunks=8, rounds=(swap,))
    inner = Link(latency=0, rate=1e12)
    for shared, expected in ((1, 1.0), (2, 2.0), (4, 4.0)):
        links = (inner, Link(latency=0.5, rate=GB, shared_by=shared))
        assert simulate(schedule, 8 * GB, (4, 2), links) == close(0.5 + expected)


def test_ports_are_full_duplex_and_send_one_message_at_a_time() -> None:
    link = (Link(latency=0.25, rate=GB),)
    there = Message(source=0, destination=1, chunks=(0,))
    back = Message(source=1, destination=0, chunks=(1,))
    aside = Message(source=0, destination=2, chunks=(0,))

    def time(*rounds: tuple[Message, ...]) -> float:
        return simulate(
            Schedule(kind="all_gather", ranks=3, parts=1, chunks=3, rounds=rounds), GB, (3,), link
        )

    assert time((there, back)) == close(1.25)
    assert time((there, aside)) == close(2.25), "two messages share the port"
    assert time((there,), (aside,)) == close(2.5)
    last = Message(source=2, destination=0, chunks=(2,))
    assert time((there,), (last,)) == close(2.5), "rank 0 takes its rounds in order"
    assert time() == 0


def test_a_schedule_that_sends_what_a_rank_has_not_is_refused() -> None:
    wrong = Schedule(
        kind="broadcast",
        ranks=3,
        parts=1,
        chunks=1,
        rounds=((Message(source=1, destination=2, chunks=(0,)),),),
    )
    with pytest.raises(ClusterError, match="rank 1 is to send chunk 0 to rank 2 before it has it"):
        execute(wrong, [[1.0], [0.0], [0.0]])


def test_a_schedule_that_leaves_a_rank_out_shows() -> None:
    short = build("all_gather", "ring", 4)
    short = Schedule(kind=short.kind, ranks=4, parts=4, chunks=4, rounds=short.rounds[:-1])
    missing = [np.isnan(row).sum() for row in execute(short, np.eye(4).tolist())]
    assert missing == [1, 1, 1, 1]


def test_every_chunk_that_is_required_is_a_chunk() -> None:
    for kind, algorithm in ALL:
        schedule = build(kind, algorithm, 6)
        assert all(
            0 <= rank < 6 and 0 <= chunk < schedule.chunks for rank, chunk in required(schedule)
        )


def test_unknown_names() -> None:
    with pytest.raises(
        ClusterError, match="unknown collective 'allreduce': valid are all_reduce, "
    ):
        build("allreduce", "ring", 4)
    with pytest.raises(
        ClusterError,
        match=r"unknown algorithm of all_reduce 'rings': valid are .* Perhaps you meant 'ring'",
    ):
        method("all_reduce", "rings")
    with pytest.raises(ClusterError, match="unknown collective 'gossip'"):
        fastest("gossip", 1.0, (4,), (LINK,))
    with pytest.raises(ClusterError, match="at least one rank"):
        build("all_reduce", "ring", 0)
    with pytest.raises(ClusterError, match="ring runs over one level of links, not 2"):
        seconds("all_reduce", "ring", 1.0, (2, 2), (LINK, LINK))
    with pytest.raises(ClusterError, match="do not hold 4 ranks"):
        simulate(build("all_reduce", "ring", 4), 1.0, (3,), (LINK,))
    with pytest.raises(ClusterError, match="all of one multiple of 4 numbers"):
        execute(build("all_reduce", "ring", 4), [[1.0, 2.0]] * 4)


@pytest.mark.parametrize("kind", METHODS)
def test_one_rank_alone_has_nothing_to_do(kind: str) -> None:
    for algorithm in METHODS[kind]:
        assert build(kind, algorithm, 1).rounds == ()
        assert sum(cost.steps + cost.traffic for cost in costs(kind, algorithm, 1)) == 0


def test_the_fastest_by_size_and_topology() -> None:
    link = (Link(latency=1e-5, rate=1e10),)
    for nbytes in (1.0, 1e4, 1e6, 1e9):
        algorithm, segments, least = fastest("all_reduce", nbytes, (16,), link)
        assert least == min(
            seconds("all_reduce", name, nbytes, (16,), link, segments=s)
            for name in METHODS["all_reduce"]
            if name not in ("in_switch", "hierarchical", "parameter_server")
            for s in (3, 8, 32, 128, 512)
        )
        assert least == seconds("all_reduce", algorithm, nbytes, (16,), link, segments=segments)
    assert fastest("all_reduce", 1.0, (16,), link)[0] == "recursive_doubling"
    assert fastest("all_reduce", 1e9, (16,), link, switch=True)[0] == "in_switch"
    assert math.isclose(fastest("all_reduce", 1e9, (16,), link)[2], 2 * 15 / 16 * 0.1, rel_tol=0.01)
