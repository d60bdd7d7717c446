"""Layers of experts on real ranks: training equals one device under every way to split them, and
rows travel twice each way.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.ir import DTYPE_BYTES
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import analyse
from autopar.sharding.communication import domains_of_a_token
from tests.end_to_end.models import BATCH, SEQUENCE, WIDTH
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import request

LAYERS = 2
CHOSEN = 2
EXPERTS = 4


@functools.cache
def _subject(folder: Path, train: bool) -> Subject:
    return subject("mixtral", folder, train=train, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files would lie."""
    return tmp_path_factory.mktemp("models")


def _pinned(model: Subject, sizes: tuple[int, ...], *options: str) -> Plan:
    """The plan in which every layer of experts takes these options on the axes, read back from its
    file.
    """
    wanted = request(sizes, train=model.train)
    assert wanted.mesh is not None
    layers = [op.name for op in model.model.graph.operators if op.kind == "autopar.experts"]
    assert len(layers) == LAYERS
    axes: Mapping[str, str] = {
        axis.name: option for axis, option in zip(wanted.mesh.axes, options, strict=True)
    }
    wanted = replace(wanted, limits=Pins(operators=dict.fromkeys(layers, axes)))
    plan = Plan.model_validate_json(search_plan(model.model.graph, wanted).to_json())
    assert all(plan.operators[name].strategy == options for name in layers)
    return plan


def _inside(plan: Plan) -> Counter[tuple[str, str, int]]:
    """The collectives inside layers of experts; partial results are summed behind them."""
    return Counter(
        (c.phase, c.kind, c.nbytes)
        for c in plan.collectives
        if c.tensor.endswith("experts/experts:0") and c.kind not in ("all_reduce", "reduce_scatter")
    )


def _travel(
    itemsize: int, ranks: int, others: int, *, train: bool
) -> Counter[tuple[str, str, int]]:
    """Two all-to-alls each way of tokens x k x hidden / p, and before them the numbers of rows."""
    rows = BATCH * SEQUENCE * CHOSEN * WIDTH["hidden_size"] * itemsize // (ranks * others)
    phases = ("forward", "backward") if train else ("forward",)
    counts = {("forward", "all_gather", ranks * EXPERTS * 8): LAYERS}
    return Counter(counts | {(phase, "all_to_all", rows): 2 * LAYERS for phase in phases})


def _once(sizes: tuple[int, ...], options: tuple[str, ...]) -> Counter[tuple[str, str, int]]:
    """Along each axis the numbers of rows, and an all-to-all there and back each way of a row for
    each place, on this axis and those outside, that has an expert of a token.
    """
    width = 4 * WIDTH["hidden_size"]
    tokens = (
        BATCH * SEQUENCE // math.prod(s for s, o in zip(sizes, options, strict=True) if "t" in o)
    )
    moved: Counter[tuple[str, str, int]] = Counter()
    places = 1
    for size, option in zip(sizes, options, strict=True):
        if not option.endswith(":once"):
            continue
        places *= size
        rows = tokens * domains_of_a_token(EXPERTS, CHOSEN, places)
        # Scores of single precision, and four bytes for each number of an expert.
        for phase, nbytes in (
            ("forward", width + 8 * CHOSEN),
            ("forward", width),
            ("backward", width),
            ("backward", width + 4 * CHOSEN),
        ):
            moved[phase, "all_to_all", round(rows * nbytes)] += LAYERS
        moved["forward", "all_gather", 8 * size * size] += LAYERS
    return moved


# e: experts, t: tokens (t/8: of each of the eight sequences a part), f: the inner dim; e+t: rows
# travel to their experts.
CASES = {
    (2,): ("e+t", "e+t/8", "t", "e+t:once"),
    (4,): ("e+t", "e+t:once"),
    (2, 2): (
        *("t e+t", "e+t t", "e+t f", "t f", "e t", "e f", "t e+t/8", "e+t e+t"),
        *("e+t:once e+t:once", "e+t:once f", "t e+t:once", "e+t/8:once e+t/8:once"),
    ),
    (2, 2, 2): ("t e+t:once e+t:once", "e+t:once f e+t:once"),
}


def _checked(folder: Path, sizes: tuple[int, ...], *, train: bool) -> list[str]:
    """The errors of the plans of a mesh, each with the collectives that it should have inside the
    layers.
    """
    model = _subject(folder, train)
    itemsize = DTYPE_BYTES[model.model.graph.tensors[model.model.graph.outputs[0]].dtype]
    named = []
    for text in CASES[sizes]:
        options = tuple(text.split())
        plan = _pinned(model, sizes, *options)
        ranks = math.prod(
            size for size, option in zip(sizes, options, strict=True) if option.startswith("e+t")
        )
        others = 2 if "t" in options else 1
        if "once" in text:
            assert not train or _inside(plan) == _once(sizes, options), text
        else:
            travel = _travel(itemsize, ranks, others, train=train) if ranks > 1 else Counter()
            assert _inside(plan) == travel, text
        named.append((text, plan))
    return failures(model, request(sizes, train=train), named)


@pytest.mark.parametrize(
    "sizes",
    [
        *((2,), (4,)),
        pytest.param((2, 2), marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param((2, 2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training(sizes: tuple[int, ...], folder: Path) -> None:
    """Outputs, gradients and updated weights, and the collectives that are issued are those that
    are priced.
    """
    assert not _checked(folder, sizes, train=True)


@pytest.mark.slow
def test_folding(folder: Path) -> None:
    """Experts over all ranks, while attention splits the batch on one axis and heads on the other;
    as the scheme says, too.
    """
    model = _subject(folder, True)
    wanted = request((2, 2), train=True)
    assert wanted.mesh is not None
    first, second = (axis.name for axis in wanted.mesh.axes)
    named = []
    for option in ("e+t", "e+t:once", "e+t/8:once"):
        pins = {
            "*self_attn.[qkv]_proj/linear": {first: "d0", second: "n"},
            "*self_attn.o_proj/linear": {first: "d0", second: "k"},
            "*experts/experts": {first: option, second: option},
        }
        named.append(
            (option, search_plan(model.model.graph, replace(wanted, limits=Pins(operators=pins))))
        )
    scheme = scheme_named("expert 2 x expert+megatron-sp 2")
    analysis = analyse(model.model.graph, train=True)
    free = replace(wanted, mesh=None)
    named.append((scheme.name, search_plan(model.model.graph, pinned(free, scheme, analysis))))
    assert not failures(model, wanted, named)


@pytest.mark.slow
def test_schedules(folder: Path) -> None:
    """Tokens are sorted within their micro-batch, and a layer that is made again sends its rows
    again.
    """
    model = _subject(folder, True)
    plan = _pinned(model, (2,), "e+t")
    layer = tuple(name for name in plan.operators if "layers.1.mlp" in name)
    schedules = [
        {"micro_batches": 2},
        {"micro_batches": 4, "gathered": "per_pass", "accumulated": "shards"},
        {"recompute": (layer,)},
    ]
    named = [
        (str(s), plan.model_copy(update={"schedule": plan.schedule.model_copy(update=s)}))
        for s in schedules
    ]
    assert not failures(model, request((2,), train=True), named)


@pytest.mark.slow
def test_inference(folder: Path) -> None:
    assert not _checked(folder, (4,), train=False)
