"""Splits that exchange rows with neighbours or sum statistics: proven on two, three, four and two
by two ranks that communicate.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import FORMS, Local, LocalForm
from autopar.runtime.proof import Disproved, Sample, prove, sample, strategies
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.split_operators.halo_exchange import split_space
from autopar.sharding.communication import COMMUNICATIONS, operator_traffic
from autopar.sharding.rules import Call, rule_of
from tests.sharding.samples import n
from tests.sharding.samples_halo import FAMILIES


@pytest.mark.parametrize(
    "mesh",
    [(2,), (3,), (4,), pytest.param((2, 2), marks=[pytest.mark.slow, pytest.mark.ci])],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_equals_the_whole(family: str, mesh: tuple[int, ...]) -> None:
    failures = []
    for case in FAMILIES[family]():
        try:
            assert prove(case, mesh) > 0
        except Disproved as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


def _convolution(rows: int, kernel: int) -> Sample:
    return sample(
        "aten.conv2d.default",
        input=n(1, 2, rows, 8),
        weight=n(2, 2, kernel, kernel),
        padding=[kernel // 2] * 2,
    )


@pytest.mark.parametrize(
    ("rows", "kernel", "ranks"),
    [(12, 7, (2, 3, 4)), (12, 9, (2, 3)), (12, 13, (2,)), (12, 27, ()), (13, 3, ())],
)
def test_a_halo_lies_in_one_neighbour(rows: int, kernel: int, ranks: tuple[int, ...]) -> None:
    """And a shard has at least two rows."""
    case = _convolution(rows, kernel)
    for size in (2, 3, 4, 12):
        table = strategies(case, (size,))
        names = {table.names(index) for index in range(len(table.choices))}
        assert (("y0",) in names) == (size in ranks)


def test_bytes_of_an_exchange() -> None:
    """Rows times what lies across them; a later exchange holds the columns that came before."""
    case = _convolution(12, 5)
    call = Call.of(case.graph, case.operator)
    table = strategies(case, (2, 2))
    both = next(i for i in range(len(table.choices)) if table.names(i) == ("y1", "y0"))
    single = replace(table, choices=table.choices[both : both + 1])
    traffic = list(operator_traffic(call, single, (2, 2), frozenset(case.graph.tensors)))
    assert [axes for _, axes, _ in traffic] == [(1,), (0,)]
    sent = [[(move.phase, int(move.nbytes[0])) for move in moves] for _, _, moves in traffic]
    rows = 2 * 2 * 4 * 8
    columns = 2 * 2 * (6 + 4) * 8
    assert sent == [
        [(p, b) for p in ("forward", "backward") for _ in range(2)] for b in (rows, columns)
    ]
    quiet = list(operator_traffic(call, single, (2, 2), frozenset({"in1", "out0"})))
    assert all(move.phase == "forward" for _, _, moves in quiet for move in moves)


def test_wrong_halos_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few rows, and rows that are not paid for."""
    case = _convolution(12, 3)
    prove(case, (2,))
    with monkeypatch.context() as patched:
        patched.setitem(
            COMMUNICATIONS, "halo", replace(COMMUNICATIONS["halo"], moves=lambda split: [])
        )
        with pytest.raises(Disproved, match="issued"):
            prove(case, (2,))

    def without(call: LocalCall, group: AxisGroup) -> Local:
        function, attributes = split_space(call, group)
        borders = attributes["borders"]
        return function, {**attributes, "borders": (), "padding": (1, 1)} if borders else attributes

    monkeypatch.setitem(FORMS, "halo", LocalForm(talks=without))
    monkeypatch.setitem(
        COMMUNICATIONS, "halo", replace(COMMUNICATIONS["halo"], moves=lambda split: [])
    )
    with pytest.raises(Disproved, match="not close"):
        prove(case, (2,))


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (
            sample("aten.max_pool1d.default", self=n(2, 3, 12), kernel_size=[2], stride=[2]),
            "d0 d1 (y0 !x0=2) -> d0 d1 y0",
        ),
        (
            sample("aten.conv1d.default", input=n(2, 4, 12), weight=n(6, 4, 3), stride=[3]),
            "n c (y0 !x0=3), o c !u0, +o -> n o y0 | c: sum",
        ),
        (
            sample(
                "aten.max_pool1d.default",
                self=n(2, 3, 12),
                kernel_size=[3],
                stride=[2],
                padding=[1],
            ),
            "d0 d1 !x0 -> d0 d1 y0 | y0 + x0: halo",
        ),
    ],
    ids=["side by side", "side by side, with a weight", "overlapping"],
)
def test_windows_that_do_not_overlap_need_nothing_of_one_another(case: Sample, rule: str) -> None:
    assert rule_of(Call.of(case.graph, case.operator)).text.rstrip(" |") == rule
