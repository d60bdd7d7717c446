"""Dispatchers of rows to experts: their bytes, and the kernels of one of them as measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import collective_time, load_cluster
from autopar.sharding.communication import domains_of_a_token
from benchmarks.validating.summed.dispatch import Dispatcher, Group, Travel, travel_seconds

H100 = load_cluster("dgx-h100").sized(64)
NODE = Group(size=8, level="nvlink", cluster=H100)
FOUR = Group(size=32, level="nvlink:8+nic:4", cluster=H100)


def travel(tokens: int, nbytes: float, group: Group, experts: int = 256, top_k: int = 8) -> Travel:
    return Travel(
        tokens=tokens,
        nbytes=nbytes,
        each=top_k,
        ranks=domains_of_a_token(experts, top_k, group.size),
        nodes=domains_of_a_token(experts, top_k, group.nodes),
    )


def test_rows_go_one_by_one_or_once_to_a_rank() -> None:
    rows = travel(4096, 8192.0, NODE)
    for name, count in (("alltoall", 8.0), ("rank", rows.ranks)):
        seconds = travel_seconds(Dispatcher(name=name), "dispatch", rows, NODE)
        nbytes = 4096 * 8192 * count
        expected = collective_time("all_to_all", nbytes, 8, level="nvlink", cluster=H100)
        assert seconds == pytest.approx(float(expected))
    assert travel_seconds(Dispatcher(name="node"), "combine", rows, replace(NODE, size=1)) == 0.0


@pytest.mark.parametrize(
    ("way", "nbytes", "group", "measured"),
    [
        # deepep_normal, 20 multiprocessors, 4,096 tokens of 7,168 elements, top 8 of 256 experts:
        # dispatch in 8 bits with scales, combine in 16 (ai-dynamo/aiconfigurator@095f58a5,
        # H100; across nodes with the notice; its devices are not sure to be H100).
        ("dispatch", 7392.0, NODE, 4.92e-4),
        ("combine", 14336.0, NODE, 9.83e-4),
        ("dispatch", 7392.0, FOUR, 1.860e-3),
        ("combine", 14336.0, FOUR, 3.634e-3),
    ],
)
def test_kernels_that_send_a_row_once_to_a_node_are_as_measured(
    way: str, nbytes: float, group: Group, measured: float
) -> None:
    rows = travel(4096, nbytes, group)
    seconds = travel_seconds(Dispatcher(name="node"), way, rows, group)
    assert seconds == pytest.approx(measured, rel=0.15)


def test_more_multiprocessors_help_until_a_link_is_full() -> None:
    rows = travel(4096, 8192.0, FOUR)
    few, usual, many = (
        travel_seconds(Dispatcher(name="node", sms=sms), "combine", rows, FOUR)
        for sms in (4, 20, 40)
    )
    assert few > usual == many
    assert usual < travel_seconds(Dispatcher(name="alltoall"), "combine", rows, FOUR)
