"""The splits of options in the terms of schemes: on graphs whose parts are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.schemes.splits import Part, Profiles, Split, profiles_of
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.micro_batches import split_batch
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 256,
    "vocab": 128,
    "sequence": 32,
}


def known(analysis: Analysis, name: str) -> dict[str, Split]:
    profile = profiles_of(analysis).by_name[name]
    return dict(
        zip((option.name for option in analysis.offers[name].options), profile.splits, strict=True)
    )


@pytest.fixture(scope="module")
def dense() -> Analysis:
    return analyse(transformer(Shape(**SHAPE), batch=8).graph, train=True)


@pytest.fixture(scope="module")
def experts() -> Analysis:
    return analyse(transformer(Shape(**SHAPE, experts=8), batch=8).graph, train=True)


def part(profiles: Profiles, name: str) -> Part:
    return profiles.by_name[name].part


def test_parts_of_a_transformer(dense: Analysis) -> None:
    actual = profiles_of(dense)
    assert (
        part(actual, "embed.lookup") is Part.LOOKUP
        and part(actual, "layers.0.attention.core") is Part.CORE
    )
    assert {
        part(actual, f"layers.0.{name}")
        for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    } == {Part.PRODUCT}
    assert {
        part(actual, f"layers.0.{name}") for name in ("norm1", "add1", "mlp.gelu", "attention.view")
    } == {Part.OTHER}


def test_splits_of_a_transformer(dense: Analysis) -> None:
    rows = {"d0": Split.BATCH, "d1": Split.SEQUENCE}
    assert (
        known(dense, "layers.1.mlp.up").items()
        >= {**rows, "k": Split.HIDDEN, "n": Split.INNER, "P": Split.PARTIAL}.items()
    )
    assert (
        known(dense, "layers.1.mlp.down").items()
        >= {**rows, "k": Split.INNER, "n": Split.HIDDEN, "R": Split.WHOLE, "B": Split.SHARE}.items()
    )
    assert (
        known(dense, "layers.1.attention.core").items()
        >= {"d0": Split.BATCH, "g": Split.INNER, "k": Split.RING}.items()
    )
    assert (
        known(dense, "head.loss").items()
        >= {"d0": Split.BATCH, "d0/8": Split.SEQUENCE, "d1": Split.INNER}.items()
    )


def test_products_that_leave_partial_sums(dense: Analysis) -> None:
    profile = profiles_of(dense).by_name["layers.0.mlp.up"]
    names = [option.name for option in dense.offers["layers.0.mlp.up"].options]
    assert [name for name, reduces in zip(names, profile.reduces, strict=True) if reduces] == ["k"]


def test_experts_are_told_from_weights_and_rows(experts: Analysis) -> None:
    assert part(profiles_of(experts), "layers.0.experts") is Part.EXPERTS
    assert (
        Split.EXPERT in known(experts, "layers.0.experts").values()
        and Split.INNER in known(experts, "layers.0.experts").values()
    )
    assert known(experts, "layers.0.attention.qkv") == known(experts, "layers.1.attention.qkv")
    assert (
        known(experts, "layers.0.add1").items() >= {"d0": Split.BATCH, "d1": Split.SEQUENCE}.items()
    )
    assert part(profiles_of(experts), "layers.0.experts.router") is Part.PRODUCT


def test_one_sample_has_no_batch() -> None:
    """Rows of a flattened batch of one are rows of the sequence, be it the whole batch or a
    micro-batch.
    """
    analysis = analyse(transformer(Shape(**SHAPE), batch=1).graph, train=True)
    one = split_batch(analyse(transformer(Shape(**SHAPE), batch=8).graph, train=True), 8)
    assert (
        Split.SEQUENCE in known(one, "head.loss").values()
        and Split.BATCH not in known(one, "head.loss").values()
    )
    assert known(analysis, "head.loss").items() >= {"d0": Split.SEQUENCE, "d1": Split.INNER}.items()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3, padding=1)
        self.last = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.relu(self.convolution(x)).mean(dim=(2, 3)))
        return output


def test_pictures_are_split_in_space_and_biases_are_no_experts() -> None:
    with torch.device("meta"):
        model = load_model(Pictures(), ModelOptions(), (torch.empty(8, 4, 16, 16),))
    analysis = analyse(model.graph, train=True)
    by_kind = {op.kind: op.name for op in analysis.warm}
    convolution = next(name for kind, name in by_kind.items() if "conv" in kind)
    assert {Split.BATCH, Split.SPACE, Split.INNER} <= {*known(analysis, convolution).values()}
    for name in (convolution, next(name for kind, name in by_kind.items() if "linear" in kind)):
        assert (
            part(profiles_of(analysis), name) is Part.PRODUCT
            and Split.EXPERT not in known(analysis, name).values()
        )


def test_weights_are_followed_to_their_parameters() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(32, 16, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.to(torch.bfloat16).t()

    model = load_model(
        Cast(), ModelOptions(), (torch.empty(8, 16, dtype=torch.bfloat16, device="meta"),)
    )
    actual = profiles_of(analyse(model.graph, train=True))
    assert sorted(
        profile.part for profile in actual.by_name.values() if profile.part is not Part.OTHER
    ) == [Part.PRODUCT, Part.WEIGHT, Part.WEIGHT]
    assert set(actual.roots.values()) == {("weight",)}


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (4, 2, 1), (4, 4, 0)])
def test_the_work_of_a_convolution(kernel: int, stride: int, padding: int) -> None:
    """A patch is multiplied once, not once for each of its pixels."""
    module = nn.Conv2d(3, 8, kernel, stride=stride, padding=padding, bias=False)
    model = load_model(module, ModelOptions(train=True), (torch.zeros(2, 3, 16, 16),))
    (work,) = (
        p.work
        for p in profiles_of(analyse(model.graph, train=True)).by_name.values()
        if p.part is Part.PRODUCT
    )
    assert work == 2 * (16 // stride) ** 2 * 8 * 3 * kernel**2


class Front(nn.Module):
    """A product of what is made of the input alone."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.up = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures that are flattened, or the first part of rows."""
        rows = x.view(-1, 12) if self.change == "flattened" else x.split(12, dim=1)[0]
        product: torch.Tensor = self.up(rows)
        return product


@pytest.mark.parametrize(("change", "shape"), [("flattened", (8, 1, 3, 4)), ("cut", (8, 24))])
def test_the_batch_of_inputs_that_are_changed_first(change: str, shape: tuple[int, ...]) -> None:
    model = load_model(Front(change), ModelOptions(train=True), (torch.zeros(shape),))
    actual = known(analyse(model.graph, train=True), "up/linear")
    assert actual["d0"] is Split.BATCH and actual["k"] is Split.INNER
