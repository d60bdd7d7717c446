"""The batch leaves dim 0 inside a module, or begins elsewhere: schemes of rows follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.beside_one_device import planned, wrong


class Attention(nn.Module):
    """Torch's attention, which moves the batch to dim 1."""

    def __init__(self, keys: int | None = None, *, first: bool = True, latents: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, kdim=keys, vdim=keys, batch_first=first)
        self.out = nn.Linear(16, 4)
        self.latents = nn.Parameter(torch.randn(latents, 16)) if latents else None

    def forward(self, queries: Tensor, keys: Tensor | None = None) -> Tensor:
        """Queries (or latents, the same ones for every sample) attend to the keys."""
        keys = queries if keys is None else keys
        if self.latents is not None:
            queries = self.latents.expand(keys.shape[0], -1, -1)
        return self.out(self.attention(queries, keys, keys)[0]).square().mean()


class Spectrum(nn.Module):
    """Short Fourier transforms, whose frames lie behind the frequencies."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.hidden = nn.Linear(9, 8)
        self.out = nn.Linear(8, 4)
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        """Features of the frames."""
        frames = torch.stft(x, 16, 8, window=self.window, center=self.centred, return_complex=True)
        return self.out(self.hidden(frames.abs().transpose(1, 2))).square().mean()


class Steps(nn.Module):
    """A recurrent cell over sequences whose steps come first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The last state."""
        state = x.new_zeros(x.shape[1], 10)
        for step in x:
            state = self.cell(step, state)
        return self.out(state).square().mean()


class Columns(nn.Module):
    """Samples are columns."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(8, 6))
        self.out = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Two products from the left."""
        return (self.out @ (self.hidden @ x).tanh()).square().mean()


Case = tuple[Callable[[], nn.Module], Sequence[tuple[int, ...]]]
CASES: Mapping[str, Case] = {
    "attention": (Attention, [(8, 6, 16)]),
    "as many steps as samples": (Attention, [(8, 8, 16)]),
    "steps first": (lambda: Attention(first=False), [(6, 8, 16)]),
    "across": (lambda: Attention(16), [(8, 3, 16), (8, 6, 16)]),
    "across, other width": (lambda: Attention(12), [(8, 3, 16), (8, 6, 12)]),
    "latents": (lambda: Attention(12, latents=3), [(8, 3, 16), (8, 6, 12)]),
    "spectrum": (lambda: Spectrum(centred=False), [(8, 64)]),
    "centred spectrum": (lambda: Spectrum(centred=True), [(8, 64)]),
    "cell": (Steps, [(3, 8, 6)]),
    "columns": (Columns, [(6, 8)]),
}


@pytest.mark.parametrize("name", CASES)
def test_schemes_of_rows_follow_the_batch(name: str) -> None:
    """Every product splits the batch, and nothing differs from one device."""
    torch.manual_seed(0)
    make, shapes = CASES[name]
    net = make().double()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    plans = [
        planned(net, inputs, scheme=scheme, stages=1, micro_batches=count)
        for scheme, count in (("data", 1), ("data", 2), ("zero3", 1), ("zero3", 4))
    ]
    assert wrong(net, inputs, plans) == [[]] * 4


class Factors(nn.Module):
    """Ratings as products of two looked-up rows: no operator is a product of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(10, 4)
        self.items = nn.Embedding(12, 4)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The loss of pairs."""
        return ((self.users(users) * self.items(items)).sum(-1) - 1).square().mean()


def test_a_model_of_look_ups_alone_has_the_schemes_of_rows() -> None:
    torch.manual_seed(0)
    net = Factors().double()
    inputs = [torch.randint(10, (8,)) for _ in range(2)]
    plans = [planned(net, inputs, scheme=scheme, stages=1) for scheme in ("data", "zero3")]
    assert all(plan.operators["mul"].strategy == ("d0",) for plan in plans)
    assert wrong(net, inputs, plans) == [[]] * 2


class Bags(nn.Module):
    """Means of looked-up rows, of which an input says where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        """The loss of bags, by offsets or as rows of one length."""
        return self.out(self.bags(indices, offsets)).square().mean()


@pytest.mark.parametrize("flat", [True, False])
def test_schemes_of_rows_follow_the_bags(flat: bool) -> None:
    torch.manual_seed(0)
    net = Bags().double()
    rows = torch.randint(20, (8, 3))
    starts = torch.tensor([0, 2, 5, 5, 10, 14, 18, 20])
    inputs = [rows.flatten(), starts] if flat else [rows]
    plans = [planned(net, inputs, scheme=scheme, stages=1) for scheme in ("data", "zero3")]
    assert all(plan.operators["out/linear"].strategy == ("d0",) for plan in plans)
    assert wrong(net, inputs, plans) == [[]] * 2
