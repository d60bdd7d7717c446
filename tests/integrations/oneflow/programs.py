"""Random programs over tensors: each step a function, a redistribution, or a hand-over to other
ranks; run globally and on one device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.integrations.oneflow.sbp import Sbp

RANKS = 4
PLACEMENTS: tuple[Any, ...] = (
    [0, 1, 2, 3],
    [[0, 1], [2, 3]],
    [0, 1],
    [2, 3],
    [1, 3],
    [2],
    [[0], [1]],
    [[[0, 1]], [[2, 3]]],
)
SIZES = (4, 8)

Unary = Callable[[Tensor], Tensor]
UNARY: dict[str, Unary] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "scaled": lambda x: 2 * x - 1,
    "square": lambda x: x.square() / 3,
    "transposed": lambda x: x.transpose(0, -1),
    "flattened": lambda x: x.reshape(-1, x.shape[-1]),
    "parts": lambda x: x.view(*x.shape[:-1], 2, x.shape[-1] // 2),
    "half": lambda x: x[..., : x.shape[-1] // 2],
    "row": lambda x: x[1],
    "added": lambda x: x.sum(0),
    "averaged": lambda x: x.mean(-1, keepdim=True) + x,
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "clamped": lambda x: x.clamp(-1, 1),
    "wider": lambda x: x.unsqueeze(0).expand(4, *x.shape),
    "exp": lambda x: torch.exp(-x.abs()),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": torch.sub,
    "mul": lambda x, y: x * y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "maximum": torch.maximum,
    "stack": lambda x, y: torch.stack([x, y]),
    "cat": lambda x, y: torch.cat([x, y], 0),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """`make` on the values numbered `reads`; `lie`: where a value is brought instead, and how."""

    name: str
    reads: tuple[int, ...]
    make: Callable[..., Tensor] | None = None
    lie: tuple[Any, tuple[Sbp, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """Leaves by shape, placement and words; steps; the loss is the mean of the last value's
    squares.
    """

    seed: int
    leaves: tuple[tuple[tuple[int, ...], Any, tuple[Sbp, ...]], ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        leaves = ", ".join(
            f"{list(shape)} on {where} {words}" for shape, where, words in self.leaves
        )
        return f"{self.seed}: {leaves}; " + "; ".join(
            f"{s.name}{s.reads}{s.lie or ''}" for s in self.steps
        )


def axes_of(where: Any) -> tuple[int, ...]:
    """The sizes of the axes of a placement."""
    return tuple(torch.tensor(where).shape)


def words_for(shape: tuple[int, ...], where: Any, rng: random.Random) -> tuple[Sbp, ...]:
    """Random words of which the shards are even."""
    left = list(shape)
    results = []
    for size in axes_of(where):
        dims = [dim for dim, count in enumerate(left) if count % size == 0 and count >= size]
        word = rng.choice(
            [
                *(autopar.sbp.split(dim) for dim in dims),
                autopar.sbp.broadcast,
                autopar.sbp.partial_sum,
            ]
        )
        if word not in (autopar.sbp.broadcast, autopar.sbp.partial_sum):
            left[word.placement.dim] //= size
        results.append(word)
    return tuple(results)


def random_program(seed: int) -> Program:
    """A program of three to eight steps whose shapes fit."""
    rng = random.Random(seed)
    where = rng.choice(PLACEMENTS)
    shapes: list[tuple[int, ...]] = [
        tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 3)))) for _ in range(2)
    ]
    leaves = tuple((shape, where, words_for(shape, where, rng)) for shape in shapes)
    at: list[Any] = [where, where]
    steps: list[Step] = []
    for _ in range(rng.randint(3, 8)):
        step, shape, place = _step(rng, shapes, at)
        steps.append(step)
        shapes.append(shape)
        at.append(place)
    return Program(seed=seed, leaves=leaves, steps=tuple(steps))


def _step(
    rng: random.Random, shapes: list[tuple[int, ...]], at: list[Any]
) -> tuple[Step, tuple[int, ...], Any]:
    while True:
        one = rng.randrange(max(0, len(shapes) - 3), len(shapes))
        kind = rng.random()
        if kind < 0.3:
            where = at[one] if rng.random() < 0.6 else rng.choice(PLACEMENTS)
            return (
                Step(name="lie", reads=(one,), lie=(where, words_for(shapes[one], where, rng))),
                shapes[one],
                where,
            )
        if kind < 0.7:
            name = rng.choice(list(UNARY))
            reads = (one,)
            make = UNARY[name]
        elif kind < 0.85:
            others = [
                i for i in range(len(shapes)) if at[i] == at[one] and shapes[i] == shapes[one]
            ]
            name = rng.choice(list(BINARY))
            reads = (one, rng.choice(others))
            make = BINARY[name]
        else:
            others = [i for i in range(len(shapes)) if at[i] == at[one]]
            name = "matmul"
            reads = (one, rng.choice(others))
            make = torch.matmul
        try:
            made = make(*(torch.empty(shapes[i]) for i in reads))
        except (RuntimeError, IndexError):
            continue
        if 0 < made.numel() <= 4096 and made.dim() <= 4:
            return Step(name=name, reads=reads, make=make), tuple(made.shape), at[one]


def run_alone(program: Program) -> tuple[Tensor, list[Tensor]]:
    """The last value and the gradients of the leaves on one device."""
    leaves = [value.requires_grad_() for value in _drawn(program)]
    values: list[Tensor] = list(leaves)
    for step in program.steps:
        values.append(
            values[step.reads[0]]
            if step.make is None
            else step.make(*(values[i] for i in step.reads))
        )
    values[-1].square().mean().backward()
    return values[-1].detach(), [torch.zeros_like(v) if v.grad is None else v.grad for v in leaves]


def _drawn(program: Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(program.seed)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape, _, _ in program.leaves
    ]


def run_globally(program: Program) -> tuple[Tensor, list[Tensor]]:
    """The same on the ranks that run, as plain whole tensors on each."""
    leaves = []
    for value, (_, where, words) in zip(_drawn(program), program.leaves, strict=True):
        place = autopar.placement("cpu", where)
        whole = autopar.to_global(value, place, (autopar.sbp.broadcast,) * len(axes_of(where)))
        leaf = whole.to_global(sbp=words).detach()
        leaves.append(leaf.requires_grad_())
    values: list[Any] = list(leaves)
    for step in program.steps:
        if step.make is not None:
            values.append(step.make(*(values[i] for i in step.reads)))
        else:
            assert step.lie is not None
            values.append(
                values[step.reads[0]].to_global(autopar.placement("cpu", step.lie[0]), step.lie[1])
            )
    values[-1].square().mean().backward()
    return values[-1].full(), [
        torch.zeros(leaf.shape, dtype=torch.float64) if leaf.grad is None else leaf.grad.full()
        for leaf in leaves
    ]


def mismatch(program: Program) -> str:
    """The differences between both, in words; empty where there are none."""
    try:
        wanted, gradients = run_alone(program)
        actual, given = run_globally(program)
    except Exception as error:
        return f"{program}: {type(error).__name__}: {error}"
    if actual.shape != wanted.shape or not torch.allclose(actual, wanted, rtol=1e-9, atol=1e-11):
        return f"{program}: the value differs"
    for number, (one, other) in enumerate(zip(given, gradients, strict=True)):
        if not torch.allclose(one, other, rtol=1e-8, atol=1e-10):
            return f"{program}: the gradient of leaf {number} differs"
    return ""
