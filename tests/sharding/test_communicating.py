"""Operators that are split by communicating inside themselves equal the whole, and issue what they
are priced at.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.device.operator_seconds import operator_seconds
from autopar.costmodel.step.mesh_prices import MeshPrices, communication_seconds
from autopar.planning.space.candidates import name_axes
from autopar.runtime.proof import Disproved, Sample, prove, sample, strategies, with_gradient
from autopar.runtime.split_operators import ring_attention
from autopar.sharding.communication import operator_traffic
from autopar.sharding.rules import RULES, Call, Entry
from autopar.torch_operators import attention_blocks
from tests.sharding.samples import n
from tests.sharding.samples_communicating import FAMILIES, SDPA

MESHES = ((2,), (3,), (4,))


def talks(case: Sample, mesh: tuple[int, ...]) -> bool:
    """Whether some strategy communicates inside on this mesh."""
    table = strategies(case, mesh)
    inside = np.array([option.communication is not None for option in table.options])
    return bool(inside[table.choices].any())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_equals_the_whole(family: str) -> None:
    failures = []
    for case in FAMILIES[family]():
        for mesh in MESHES:
            assert talks(case, mesh), f"{case} cannot be split on {mesh}"
            try:
                prove(case, mesh)
            except Disproved as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_axes(family: str) -> None:
    case = next(iter(FAMILIES[family]()))
    assert talks(case, (2, 2)) and prove(case, (2, 2)) > 4


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "SCORES_AT_ONCE", 30)
    given = {
        "query": n(2, 4, 12, 3),
        "key": n(2, 2, 12, 3),
        "value": n(2, 2, 12, 5),
        "enable_gqa": True,
    }
    assert prove(sample(SDPA, "masked", **given, attn_mask=n(4, 12, 12)), (2,)) > 3
    assert prove(sample(SDPA, "causal", **given, is_causal=True), (2,)) > 3


CAUSAL = sample(
    SDPA, query=n(1, 1, 12, 4), key=n(1, 1, 12, 4), value=n(1, 1, 12, 4), is_causal=True
)


def test_what_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that forgets where its block comes from; a scan and a softmax of each shard alone."""
    forgetful = monkeypatch.context()
    with forgetful as patch, pytest.raises(Disproved):
        patch.setattr(
            ring_attention.Round,
            "block",
            lambda self, number, queries, keys: attention_blocks.Place(1.0),
        )
        prove(CAUSAL, (2,))
    for kind in ("aten.cumsum.default", "aten.softmax.int"):
        monkeypatch.setitem(RULES, kind, Entry(rule="a b -> a b"))
        with pytest.raises(Disproved):
            prove(sample(kind, self=n(6, 6), dim=1), (2,))


def test_random_weights_are_not_split_in_a_ring() -> None:
    case = sample(SDPA, query=n(2, 2, 4, 2), key=n(2, 2, 4, 2), value=n(2, 2, 4, 2), dropout_p=0.4)
    assert not talks(case, (2,))


def test_a_rank_keeps_its_own_shards() -> None:
    """Autograd keeps the same tensors of a ring however many ranks there are: queries, keys,
    values, output and one number a query.
    """
    kept: list[int] = []
    spec = ring_attention.Round(
        ring_attention.AxisGroup("", 1, 0), attention_blocks.Place(1.0, causal=True)
    )
    q, k, v = (x.requires_grad_() for x in (n(2, 3, 8, 4), n(2, 3, 8, 4), n(2, 3, 8, 4)))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        ring_attention.ring(q, k, v, None, spec)
    assert sum(kept) == 4 * q.numel() + 2 * 3 * 8


def prices_of(
    case: Sample, size: int
) -> dict[str | None, tuple[float, float, list[tuple[str, str, float]]]]:
    """By communication: the seconds of arithmetic, those of collectives, and (phase, kind, bytes)
    of each; the first option of each.
    """
    cluster = load_cluster("dgx-h100").sized(size)
    levels = bind_axes(cluster, (size,))
    assert levels is not None
    prices = MeshPrices(cluster=cluster, mesh=name_axes(cluster, (size,), levels))
    call = Call.of(case.graph, case.operator)
    table = strategies(case, (size,))
    gradients = with_gradient(case)
    ahead, back = operator_seconds(call, table, (size,), cluster, gradients)
    inside = communication_seconds(call, table, prices, gradients)
    issued = {
        int(row): [(m.phase, m.kind, float(m.nbytes[at])) for m in moves]
        for rows, _, moves in operator_traffic(call, table, (size,), gradients)
        for at, row in enumerate(rows)
    }
    named: dict[str | None, tuple[float, float, list[tuple[str, str, float]]]] = {}
    for row, (option,) in enumerate(table.choices):
        word = table.options[option].communication or table.options[option].name
        named[word] = (float(ahead[row] + back[row]), float(inside[row]), issued.get(row, []))
    return named


def test_a_ring_is_priced_by_the_work_of_all_its_rounds() -> None:
    """As much arithmetic as a split of the batch: each rank meets all keys. K and V go around in
    one message.
    """
    shape = (8, 2, 4096, 64)
    case = sample(
        SDPA, **{name: torch.empty(shape, device="meta") for name in ("query", "key", "value")}
    )
    actual = prices_of(case, 8)
    assert (
        actual["ring"][0] == pytest.approx(actual["d0"][0], rel=0.25)
        and actual["ring"][0] > actual["d0"][0]
    )
    block = 2 * 8 * 2 * 512 * 64 * 4
    backward = [("backward", "send", block)] * 15
    assert actual["ring"][2] == [("forward", "send", block)] * 7 + backward and actual["d0"][
        1:
    ] == (0.0, [])


def test_half_precision_sums_gradients_in_single() -> None:
    shape = (2, 2, 8, 4)
    case = sample(
        SDPA,
        query=torch.empty(shape).bfloat16(),
        key=torch.empty(shape).bfloat16(),
        value=torch.empty(shape).bfloat16(),
    )
    block = 2 * 2 * 2 * 4 * 4 * 2
    assert prices_of(case, 2)["ring"][2] == [
        ("forward", "send", block),
        *(("backward", "send", b) for b in (block, 2 * block, 2 * block)),
    ]
