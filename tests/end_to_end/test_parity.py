"""Plans on real ranks: outputs, gradients and weights of one device, and the collectives that they
price, in that order.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.end_to_end.models import MODELS
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import NamedPlans, plans, random_plans, request

FAST = tuple(name for name in MODELS if name != "llama")
"""Without the model whose precision is looser than that of its twin."""
TRAINED = ("gpt2",)
"""The model that the fast tests train under every scheme; the pipelines, scripts and schedules
train the others.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ONNX files lie."""
    return tmp_path_factory.mktemp("models")


@functools.cache
def _subject(name: str, folder: Path, train: bool, dtype: str = "float64") -> Subject:
    return subject(name, folder, train=train, dtype=dtype)


@pytest.mark.parametrize(
    "name",
    [
        n if n in TRAINED else pytest.param(n, marks=[pytest.mark.slow, pytest.mark.ci])
        for n in FAST
    ],
)
def test_training(name: str, folder: Path) -> None:
    """The plan found and every scheme on two ranks; the plan found and others on two by two."""
    model = _subject(name, folder, True)
    wanted = request((2,), train=True)
    actual = failures(model, wanted, list(plans(model.model, wanted, randoms=1)))
    wanted = request((2, 2), train=True)
    assert not actual + failures(
        model, wanted, list(random_plans(model.model, wanted, count=2, seed=1))
    )


@pytest.mark.parametrize("name", FAST)
def test_inference(name: str, folder: Path) -> None:
    model = _subject(name, folder, False)
    wanted = request((2,), train=False)
    named = [
        ("found", NamedPlans(model.model, wanted)["found"]),
        *random_plans(model.model, wanted, count=2),
    ]
    assert not failures(model, wanted, named)


@pytest.mark.slow
@pytest.mark.ci
def test_three_axes(folder: Path) -> None:
    model = _subject("gpt2", folder, True)
    wanted = request((2, 2, 2), train=True)
    assert not failures(model, wanted, list(random_plans(model.model, wanted, count=1)))


@pytest.mark.slow
@pytest.mark.ci
def test_four_ranks_on_one_axis(folder: Path) -> None:
    model = _subject("gpt2", folder, True)
    wanted = request((4,), train=True)
    named = NamedPlans(model.model, wanted)
    assert not failures(
        model, wanted, [(name, named[name]) for name in ("found", "megatron-sp", "random0")]
    )


# --- the full matrix: in pieces, so that each ends within minutes ---

SLOW_MESHES = ((2,), (4,), (2, 2), (8,), (2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("sizes", SLOW_MESHES, ids=str)
@pytest.mark.parametrize("name", (*MODELS, "gpt2_labels"))
def test_matrix(name: str, sizes: tuple[int, ...], train: bool, dtype: str, folder: Path) -> None:
    """The plan found, every scheme, and 20 random plans."""
    model = _subject(name, folder, train, dtype)
    wanted = request(sizes, train=train)
    actual = []
    named = list(plans(model.model, wanted, randoms=20))
    for start in range(0, len(named), 9):
        actual += failures(model, wanted, named[start : start + 9])
    assert not actual


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", (*FAST, "gpt2_labels"))
def test_more_plans(name: str, folder: Path) -> None:
    """Every scheme and six more random plans on two by two ranks, in training."""
    model = _subject(name, folder, True)
    wanted = request((2, 2), train=True)
    assert not failures(model, wanted, list(plans(model.model, wanted, randoms=6, seed=100)))


@pytest.mark.slow
def test_resnet50_on_two_ranks(folder: Path) -> None:
    """ResNet-50 as the onnx package ships it, without weights: drawn from a seed."""
    model = subject("resnet50_onnx", folder, train=True, dtype="float64")
    wanted = request((2,), train=True)
    named = NamedPlans(model.model, wanted)
    assert not failures(
        model, wanted, [(name, named[name]) for name in ("found", "data", "random0")]
    )
