"""A thing that exporters spell at length is one operator, with equal values on ranks, too."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.frontends.torch import import_torch, reader
from autopar.model import TorchModel
from autopar.runtime.checking import differences, observe
from tests.frontends.torch.test_importer import compare_with_eager
from tests.raising.drawn_plans import drawn_plans_equal
from tests.runtime.helpers import alone

WIDTH = 8
X = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0))
RMS = "aten.rms_norm.default"
LAYER = "aten.layer_norm.default"
ROTATE = "autopar.rotate.default"
ATTENTION = "aten.scaled_dot_product_attention.default"


def root(value: Tensor) -> Tensor:
    """The inverse root of the mean square."""
    return torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5)


def halves(value: Tensor) -> Tensor:
    """The pairs of an element and the one half the width further on, turned by a right angle."""
    half = value.shape[-1] // 2
    return torch.cat((-value[..., half:], value[..., :half]), dim=-1)


def centred(value: Tensor) -> Tensor:
    """A layer norm without scale."""
    apart = value - value.mean(-1, keepdim=True)
    return apart / (apart.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


NORMS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "as llama": (RMS, lambda x, w, b: w * (x.float() * root(x.float())).to(x.dtype)),
    "as gemma": (RMS, lambda x, w, b: ((x.float() * root(x.float())) * (1 + w.float())).type_as(x)),
    "as gemma 4": (RMS, lambda x, w, b: ((x.float() * root(x.float())) * w.float()).type_as(x)),
    "one over": (RMS, lambda x, w, b: x * (1 / torch.sqrt((x * x).mean((-1,), True) + 1e-6)) * w),
    "divided": (RMS, lambda x, w, b: x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)),
    "power": (RMS, lambda x, w, b: x * (x**2).mean(-1, keepdim=True).add(1e-6).pow(-0.5) * w),
    "two dims": (
        RMS,
        lambda x, w, b: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6),
    ),
    "centred": (LAYER, lambda x, w, b: centred(x) * w + b),
    "centred without bias": (LAYER, lambda x, w, b: centred(x.double()).float() * w),
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the first dim": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5),
    "another tensor": lambda x, w, b: x * root(x + 1),
    "a learned addend": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, True) + b.square().sum()),
    "a mean of cubes": lambda x, w, b: x * torch.rsqrt(x.abs().pow(3).mean(-1, True) + 1e-5),
    "the root itself": lambda x, w, b: x * torch.sqrt(x.pow(2).mean(-1, True) + 1e-5),
    "a quotient that is rounded": lambda x, w, b: torch.div(
        x, (x.pow(2).mean(-1, True) + 1e-5).sqrt(), rounding_mode="floor"
    ),
    "a scaled addend": lambda x, w, b: (
        x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), torch.tensor(1e-5), alpha=2))
    ),
    "of rounded values": lambda x, w, b: x * root(x.to(torch.float8_e4m3fn).to(torch.float32)),
    "no sum": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(-1, True) * 1e-5 + w.square()),
}


class Normed(nn.Module):
    """A norm between two products."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The products and the norm."""
        y: Tensor = self.after(self.function(self.before(x), self.weight, self.bias))
        return y + self.bias * 0


def kinds(module: nn.Module, *inputs: Tensor) -> Counter[str]:
    """The kinds of a module's operators."""
    return Counter(op.kind for op in import_torch(module, inputs).graph.operators)


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_one_operator_in_any_spelling(name: str) -> None:
    kind, function = NORMS[name]
    module = Normed(function)
    counts = kinds(module, X)
    assert counts[kind] == 1 and not counts.keys() & {"aten.mean.dim", "aten.pow.Tensor_Scalar"}
    compare_with_eager(module, X)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_a_norm_stays(name: str) -> None:
    module = Normed(OTHERS[name])
    assert not {RMS, LAYER} & kinds(module, X).keys()


def test_a_norm_whose_statistic_is_read_elsewhere_keeps_it() -> None:
    class Both(Normed):
        def forward(self, x: Tensor) -> Tensor:
            scale = root(x)
            y: Tensor = self.after(x * scale * self.weight) + scale
            return y + self.bias

    counts = kinds(Both(NORMS["divided"][1]), X)
    assert counts[RMS] == 1 and counts["aten.rsqrt.default"] == 1


@pytest.mark.parametrize("name", ["as llama", "as gemma", "as gemma 4"])
def test_narrow_norms_have_one_type(name: str) -> None:
    """A scale in single precision is of a norm in single precision."""
    module = Normed(NORMS[name][1]).to(torch.bfloat16)
    graph = import_torch(module, (X.bfloat16(),)).graph
    (norm,) = (op for op in graph.operators if op.kind == RMS)
    types = {graph.tensors[name].dtype for name in (*norm.inputs, *norm.outputs)}
    assert types == {"float32" if name == "as gemma" else "bfloat16"}
    # A norm computes in single precision, and rounds once.
    if name == "as gemma 4":
        x = module.before(X.bfloat16())
        written = module.function(x, module.weight, module.bias)
        one = nn.functional.rms_norm(x, (WIDTH,), module.weight, 1e-5)
        torch.testing.assert_close(one, written, rtol=0, atol=0)


def test_nothing_that_a_module_computes_narrower_is_made_wider() -> None:
    """A norm in single precision of a model in double is no norm in double."""
    module = Normed(NORMS["as llama"][1]).double()
    graph = import_torch(module, (X.double(),)).graph
    (norm,) = (op for op in graph.operators if op.kind == RMS)
    assert {graph.tensors[name].dtype for name in (*norm.inputs, *norm.outputs)} == {"float32"}
    compare_with_eager(module, X.double())


class Attention(nn.Module):
    """Grouped heads with rotary positions, repeated as `how` says."""

    def __init__(self, how: str = "expand", heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.how = how
        self.heads = heads
        self.groups = groups
        self.q = nn.Linear(WIDTH, heads * 4)
        self.k = nn.Linear(WIDTH, groups * 4)
        self.v = nn.Linear(WIDTH, groups * 4)
        self.o = nn.Linear(heads * 4, WIDTH)
        angles = torch.outer(torch.arange(6.0), 10 ** -torch.arange(2.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def repeated(self, x: Tensor) -> Tensor:
        """Each head for its group of queries."""
        times = self.heads // self.groups
        if self.how == "expand":
            b, g, s, w = x.shape
            return x[:, :, None].expand(b, g, times, s, w).reshape(b, g * times, s, w)
        if self.how == "in turn":
            return x.repeat(1, times, 1, 1)
        return x.repeat_interleave(times, dim=1)

    def turned(self, x: Tensor) -> Tensor:
        """Rotary positions."""
        return x * self.cos + halves(x) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        """The results of all heads."""
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = functional.scaled_dot_product_attention(
            self.turned(q), self.repeated(self.turned(k)), self.repeated(v), is_causal=True
        )
        y: Tensor = self.o(made.transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize("how", ["expand", "interleave"])
def test_repeated_heads_are_grouped_attention(how: str) -> None:
    module = Attention(how)
    graph = import_torch(module, (X,)).graph
    (op,) = (op for op in graph.operators if op.kind == ATTENTION)
    assert op.attributes["enable_gqa"] is True
    assert [graph.tensors[name].shape[1] for name in op.inputs] == [4, 2, 2]
    assert Counter(op.kind for op in graph.operators)[ROTATE] == 2
    compare_with_eager(module, X)


def test_heads_that_are_repeated_in_turn_are_not_grouped() -> None:
    module = Attention("in turn")
    graph = import_torch(module, (X,)).graph
    (op,) = (op for op in graph.operators if op.kind == ATTENTION)
    assert "enable_gqa" not in op.attributes
    compare_with_eager(module, X)


class Turned(nn.Module):
    """A rotation of the first elements of a row, by angles that are learned or given."""

    def __init__(self, turn: Callable[[Tensor, Tensor, Tensor], Tensor], learned: bool) -> None:
        super().__init__()
        self.turn = turn
        self.first = nn.Linear(WIDTH, WIDTH)
        angles = torch.randn(6, 4)
        if learned:
            self.angles = nn.Parameter(angles)
        else:
            self.register_buffer("angles", angles)

    def forward(self, x: Tensor) -> Tensor:
        """Some of the row turned, the rest passed on."""
        y = self.first(x)
        made = self.turn(y[..., :4], self.angles.cos(), self.angles.sin())
        return torch.cat((made, y[..., 4:]), -1)


def by_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation with halves from `chunk`, the products in the other order."""
    first, second = x.chunk(2, dim=-1)
    return sin * torch.cat((-second, first), -1) + cos * x


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of halves by angles of one half."""
    first, second = x.chunk(2, dim=-1)
    cos = cos[..., :2]
    sin = sin[..., :2]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of pairs, of which the elements lie half a row apart afterwards."""
    cos = cos[..., :2]
    sin = sin[..., :2]
    one = x[..., ::2]
    other = x[..., 1::2]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def crossed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No rotation: an element meets the wrong angle."""
    first, second = x.chunk(2, dim=-1)
    cos = cos[..., :2]
    sin = sin[..., :2]
    return torch.cat((first * cos - second * sin, second * sin + first * cos), -1)


TURNS: dict[str, tuple[bool, bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "halves": (True, False, lambda x, cos, sin: x * cos + halves(x) * sin),
    "chunks": (True, False, by_chunks),
    "by halves": (True, True, by_halves),
    "by pairs": (True, True, by_pairs),
    "crossed": (False, False, crossed),
    "learned": (True, True, lambda x, cos, sin: x * cos + halves(x) * sin),
    "two tensors": (False, False, lambda x, cos, sin: x * cos + halves(x + 1) * sin),
    "the other way": (
        False,
        False,
        lambda x, cos, sin: x * cos + torch.cat((x[..., 2:], -x[..., :2]), -1) * sin,
    ),
    "twice": (False, False, lambda x, cos, sin: torch.add(x * cos, halves(x) * sin, alpha=2)),
}


@pytest.mark.parametrize("name", TURNS)
def test_rotations(name: str) -> None:
    is_one, learned, turn = TURNS[name]
    module = Turned(turn, learned)
    assert kinds(module, X)[ROTATE] == is_one
    compare_with_eager(module, X)


@pytest.mark.parametrize("pairs", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("width", [2, 4])
def test_a_rotation_has_the_gradients_of_its_products(pairs: tuple[bool, bool], width: int) -> None:
    given = [
        X[:2, :, :4].double(),
        torch.randn(6, width).double(),
        torch.randn(2, 1, width).double(),
    ]
    leaves = [value.requires_grad_() for value in given]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made: Tensor = torch.ops.autopar.rotate(x, cos, sin, *pairs)
        return made

    assert torch.autograd.gradcheck(turned, leaves)
    assert torch.autograd.gradgradcheck(turned, leaves)
    x, cos, sin = leaves
    if width == 4 and pairs == (False, False):
        torch.testing.assert_close(turned(*leaves), x * cos + halves(x) * sin)
    if width == 2 and pairs == (True, False):
        torch.testing.assert_close(turned(*leaves), by_pairs(x, cos, sin))


class Decoder(nn.Module):
    """Two decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream behind both layers."""
        for i in range(2):
            x = x + self.attentions[i](x * root(x) * self.norms[2 * i])
            gate, up = self.ups[i](x * root(x) * self.norms[2 * i + 1]).chunk(2, -1)
            x = x + self.downs[i](functional.silu(gate) * up)
        return x


def loss_of(outputs: Tensor, *inputs: Tensor) -> Tensor:
    """A loss, so that all gradients are those of one number."""
    return outputs.square().mean()


def decoder(monkeypatch: pytest.MonkeyPatch, *, as_written: bool = False) -> TorchModel:
    """The decoder with its loss, raised or as it is exported."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        if as_written:
            patch.setattr(reader, "raised", lambda graph: graph)
        return import_torch(Decoder(), (X,), loss=loss_of)


def values_of(model: TorchModel) -> dict[str, Tensor]:
    """The parameters of the decoder and its constants, by their names in the graph."""
    torch.manual_seed(0)
    module = Decoder()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach() for name, value in (named | dict(model.constants)).items()}


def test_a_raised_graph_computes_what_the_exported_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = decoder(monkeypatch)
    exported = decoder(monkeypatch, as_written=True)
    assert len(ours.graph.operators) < 0.6 * len(exported.graph.operators)
    one, other = (
        observe(alone(model.graph, values_of(model)), [X], steps=2) for model in (ours, exported)
    )
    report = differences(other, one, graph=ours.graph)
    assert report.passed, str(report)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_drawn_plans_of_a_raised_graph_equal_one_device(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    model = decoder(monkeypatch)
    values: dict[str, Any] = values_of(model)
    exported = decoder(monkeypatch, as_written=True).graph
    drawn_plans_equal(model.graph, values, [X], sizes, written=exported)
