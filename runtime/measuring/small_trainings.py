"""Small models and the steps of their plans: what the runtime's host does around their kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.runtime.checking.check import planned_optimizer
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import analyse

HEAD = 16
"""Width of an attention head."""


class Chain(nn.Module):
    """A product and so many small operators, one behind the other."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """The last result."""
        x = self.first(x)
        for _ in range(self.length):
            x = torch.tanh(x)
        return x


class Layers(nn.Module):
    """Layers of attention and feed-forward, each with a norm and a residual."""

    def __init__(self, width: int, count: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, head) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's result."""
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return output


def small_model(kind: str, width: int, size: int, head: int = HEAD) -> nn.Module:
    """A "chain" of `size` operators, so many "products", or so many "layers".

    `head`: the width of a head of attention.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "chain":
            return Chain(width, size)
        if kind == "products":
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(size)))
        return Layers(width, size, head)


def small_batch(width: int, count: int, sequence: int) -> Tensor:
    """The rows of a small model: [count, sequence, width]."""
    return torch.linspace(-1, 1, count * sequence * width).view(count, sequence, width)


def planned_step(model: LoadedModel, plan: Plan) -> Callable[[], object]:
    """A step of a plan on this rank, with its optimizer, as `autopar run` takes it."""
    program = plan.execution(analyse(model.graph, train=True))
    module = ParallelModule(
        program,
        World.of(program),
        model_values(model, plan.schedule.types),
        options=ModuleOptions(device=torch.device("cpu")),
    )
    module.engine.plan = plan
    stepper = planned_optimizer(plan.model.optimizer, module)
    inputs = model.inputs
    assert inputs is not None

    def step() -> None:
        module.loss(*inputs).backward()  # type: ignore[no-untyped-call]
        if stepper is not None:
            stepper.step()
        module.zero_grad()

    return step
