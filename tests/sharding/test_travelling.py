"""Splits that communicate inside an operator: classes of a loss, rows of a look-up, rows and
experts of a grouped product.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from autopar.runtime.proof import Execution, Sample, decisions, prove, sample, strategies
from autopar.runtime.split_operators import experts_once
from autopar.sharding.program import Compute, operator_collectives
from autopar.sharding.rules import RULES, Entry
from tests.sharding.samples import f, ints, n

MESHES = ((2,), (3,), (4,), (2, 2))


def _targets(*shape: int) -> torch.Tensor:
    """Classes below 12, the first left out."""
    values = ints(*shape, high=12)
    if values.numel() > 1:
        values.view(-1)[0] = -100
    return values


LOSSES = [
    sample(
        "aten.cross_entropy_loss.default",
        self=n(*scores),
        target=_targets(*rows),
        reduction=kind,
        label_smoothing=smooth,
        **weight,
    )
    for (scores, rows), kind, smooth, weight in itertools.product(
        (((12, 12), (12,)), ((12, 12, 2), (12, 2)), ((12,), ())),
        (0, 1, 2),
        (0.0, 0.1),
        ({}, {"weight": f(12)}),
    )
]
LOOK_UPS = [
    sample("aten.index.Tensor", str(places), self=n(12, 4), indices=[torch.tensor(places)])
    for places in (tuple(range(11, -1, -1)), (7,) * 12, (0, 3, 3, -1, 11, 5, -12, 6, 1, 0, 2, 10))
]
FILLS = [
    sample("aten.masked_scatter.default", name, self=n(12, 2, 3), mask=mask, source=source)
    for name, mask, source in (
        ("an image each", torch.arange(2).view(1, 2, 1).expand(12, 2, 3) == 1, n(12, 3)),
        ("all on one rank", torch.arange(12).view(12, 1, 1).expand(12, 2, 3) < 3, n(12, 2)),
        ("more than places", torch.arange(12).view(12, 1, 1).expand(12, 2, 3) % 5 == 4, n(24, 1)),
        ("elements", torch.arange(72).view(12, 2, 3) % 7 == 3, n(12)),
        ("a mask of two dims", torch.arange(24).view(12, 2, 1) % 3 == 0, n(12, 4)),
    )
]


def _grouped(*ends: int) -> Sample:
    importlib.import_module("transformers.integrations.moe")
    offsets = torch.tensor(ends, dtype=torch.int32)
    return sample(
        "transformers.grouped_mm_fallback.default",
        str(ends),
        input=n(12, 4),
        weight=n(4, 4, 6),
        offs=offsets,
    )


PRODUCT = "transformers.grouped_mm_fallback.default"
WIDE = (24, "float64", "(!c2=2 f)")
NARROW = (12, "float64", "f")
LAST = (6, "float64", "!o")
GATED = (
    (PRODUCT, (("input", "%rows"), ("weight", "%w0"), ("offs", "%ends")), (WIDE,)),
    ("aten.index_select.default", (("self", "%w1"), ("dim", 0), ("index", "%experts")), (WIDE,)),
    ("aten.add.Tensor", (("self", "%0"), ("other", "%1")), (WIDE,)),
    ("aten.chunk.default", (("self", "%2"), ("chunks", 2), ("dim", -1)), (NARROW, NARROW)),
    ("aten.silu.default", (("self", "%3"),), (NARROW,)),
    ("aten.mul.Tensor", (("self", "%5"), ("other", "%4")), (NARROW,)),
    (PRODUCT, (("input", "%6"), ("weight", "%w2"), ("offs", "%ends")), (LAST,)),
    ("aten.index_select.default", (("self", "%w3"), ("dim", 0), ("index", "%experts")), (LAST,)),
    ("aten.add.Tensor", (("self", "%7"), ("other", "%8")), (LAST,)),
)
"""A gate beside what it gates, and biases."""


def _layer(note: str, *, tokens: int = 12, **routing: torch.Tensor) -> Sample:
    """A layer of four experts over tokens, or sorted rows."""
    importlib.import_module("transformers.integrations.moe")
    operands = [n(4, 6, 24), n(4, 24), n(4, 12, 6), n(4, 6)]
    # The scores come behind the operands.
    behind = {name: routing.pop(name) for name in ("scores",) if name in routing}
    return sample(
        "autopar.experts",
        note,
        rows=n(tokens, 6),
        **routing,
        operands=operands,
        **behind,
        network=GATED,
    )


def _chosen(*experts: int) -> dict[str, torch.Tensor]:
    return {"chosen": torch.tensor(experts)}


def _scored(*experts: int) -> dict[str, torch.Tensor]:
    """Experts with the weights of their results."""
    return {**_chosen(*experts), "scores": n(len(experts)).abs()}


LAYERS: dict[str, dict[str, torch.Tensor]] = {
    "two each, summed": _scored(
        *(0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1, 0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1)
    ),
    "three each, summed": _scored(*range(4), *[1, 2, 3, 0, 2, 1] * 5, 0, 2),
    "all to one, summed": _scored(*[2] * 24),
    "one each, summed": _scored(0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1),
    "some to none, summed": _scored(4, 1, 3, 2, 5, 1, 2, 0, 3, 3, 0, 4, *[4] * 12),
    "two each": _chosen(0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1, 0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1),
    "one each": _chosen(0, 1, 3, 2, 1, 1, 2, 0, 3, 3, 0, 1),
    "all to one": _chosen(*[2] * 24),
    "some to none": _chosen(4, 1, 3, 2, 5, 1, 2, 0, 3, 3, 0, 4),
    "sorted": {"ends": torch.tensor([2, 2, 5, 12], dtype=torch.int32)},
    "sorted, some to none": {"ends": torch.tensor([1, 4, 7, 9], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_layers_of_experts(name: str, mesh: tuple[int, ...]) -> None:
    """Tokens, experts and the inner dim split, alone and together; rows travel while other axes
    split the rows or the inner dim.
    """
    case = _layer(name, **LAYERS[name])
    table = strategies(case, mesh)
    names = {table.names(i) for i in range(len(table.choices))}
    assert (
        len(mesh) == 1
        or {("t", "e+t"), ("e+t", "t"), ("e+t", "f"), ("e+t", "e+t"), ("e", "t"), ("t", "f")}
        <= names
    )
    assert not any(len({"e", "e+t", "e+t:once"} & {*taken}) > 1 for taken in names)
    several = "scores" in LAYERS[name] and len(LAYERS[name]["chosen"]) > 12
    assert several == any("e+t:once" in taken for taken in names)
    assert prove(case, mesh) == len(table.choices) > 5


def test_rows_go_once_to_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent are as many rows as there are places with experts of the tokens, and about as many as
    are priced.
    """
    generator = torch.Generator().manual_seed(0)
    count = 240
    chosen = torch.rand(count, 4, generator=generator).argsort(dim=1)[:, :2]
    case = _layer("random", tokens=count, **_scored(*chosen.flatten().tolist()))
    decision = next(
        d
        for d in decisions(case, (2, 2))
        if [option.name for option in d.options] == ["e+t:once", "e+t:once"]
    )
    sent: list[int] = []

    send = experts_once._Hop.sent

    def counted(hop: experts_once._Hop, *values: Any) -> Any:
        sent.append(sum(hop.outgoing))
        return send(hop, *values)

    monkeypatch.setattr(experts_once._Hop, "sent", counted)
    Execution(case).check(decision, (2, 2))
    nodes, ranks = (
        torch.zeros(count, n).scatter_(1, chosen * n // 4, 1.0).sum().item() for n in (2, 4)
    )
    assert sum(sent) == nodes + ranks
    step = Compute(operator=case.operator, decision=decision)
    priced = operator_collectives(case.graph, step, (2, 2), frozenset())
    row = 6 * 8 + 2 * (8 + 4)
    # Behind the counts of an axis come its rows.
    for axis, rows in ((0, nodes), (1, ranks)):
        nbytes = [c.nbytes for c in priced if c.axes == (axis,)][1]
        assert nbytes * 4 / row == pytest.approx(rows, rel=0.05)


def test_a_layer_that_mixes_up_its_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a token stay together: read as k parts of all tokens they would be others'."""
    case = _layer("two each", **LAYERS["two each"])
    right = RULES[case.kind].rule
    assert not isinstance(right, str)
    monkeypatch.setitem(
        RULES, case.kind, Entry(rule=lambda call: right(call).replace("(t !k=2)", "(!k=2 t)"))
    )
    with pytest.raises(AssertionError):
        prove(case, (2,))


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses_with_split_classes(case: Sample) -> None:
    mesh = (2, 2) if case.values[0].dim() > 2 else (3,)
    assert "vocabulary" in {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 2


@pytest.mark.parametrize("case", LOOK_UPS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rows_are_looked_up_on_other_ranks(case: Sample, mesh: tuple[int, ...]) -> None:
    assert "dispatch" in {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 3


@pytest.mark.parametrize("case", FILLS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_elements_travel_to_the_places_of_a_mask(case: Sample, mesh: tuple[int, ...]) -> None:
    assert "dispatch" in {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 1


@pytest.mark.parametrize(
    "ends", [(2, 2, 5, 12), (0, 0, 0, 12), (1, 4, 7, 9), (12, 12, 12, 12), (3, 6, 9, 12)]
)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_rows_travel_to_their_experts(ends: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    """Experts without rows, ranks without rows, and rows of no expert among them."""
    case = _grouped(*ends)
    assert {None, "dispatch"} <= {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 6


def test_a_communication_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are split without a word would add up rows of the wrong experts."""
    case = _grouped(3, 6, 9, 12)
    monkeypatch.setitem(RULES, case.kind, Entry(rule="t k, e k n, e -> t n | k: sum; e: sum"))
    with pytest.raises(AssertionError):
        prove(case, (2,))
