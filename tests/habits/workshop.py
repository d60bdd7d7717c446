"""A workshop for habits of training scripts: each runs on one device, and on ranks under a plan.

A habit is a function of a `Workshop`. It makes a model, hands it to `planned`, trains it as a
script would, and returns what the script would look at. On one device `planned` returns the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar
from autopar.errors import AutoparError, RunError
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.stand_ins import Elsewhere

VOCABULARY = 16
WIDTH = 8
BATCH = 8
SEQUENCE = 4
STEPS = 3
TOLERANCE = 1e-7
SECONDS = 40.0
"""The most that a habit may take on its ranks."""
PATIENCE = timedelta(seconds=3)
"""The time in which both ranks end with an error that they share."""
ALONE = "this rank alone: "
PIPELINE: Mapping[str, Any] = {"stages": 2, "micro_batches": 4}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "data": {"scheme": "data"},
    "data, micro-batches": {"scheme": "data", "micro_batches": 2},
    "zero3": {"scheme": "zero3"},
    "megatron": {"scheme": "megatron"},
    "search": {},
    "1f1b": {**PIPELINE, "schedule": "1f1b"},
    "zero bubble": {**PIPELINE, "schedule": "zero_bubble"},
    "interleaved": {**PIPELINE, "schedule": "interleaved", "interleave": 2},
}
MORE_RANKS: Mapping[tuple[str, int], Mapping[str, Any]] = {
    ("zero3", 4): {"devices": 4, "scheme": "zero3"},
    ("1f1b", 4): {"devices": 4, **PIPELINE, "schedule": "1f1b"},
    ("zero bubble", 3): {"devices": 3, **PIPELINE, "stages": 3, "schedule": "zero_bubble"},
}
"""Plans by kind and number of ranks, under which a part of the habits is tried."""


class Block(nn.Module):
    """A layer of a transformer, with dropout that is off unless a habit turns it on."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # Without a bias: that of keys has gradients of nothing but rounding.
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of the shape of its input: batch, sequence, width."""
        parts = self.mix(self.norm(x)).unflatten(2, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    """A small language model; `tied`: its head is its embedding. It returns its loss."""

    def __init__(self, *, layers: int = 4, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(drop) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy of the labels."""
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())


class Scores(Gpt):
    """The same model without a loss: it returns its logits."""

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        """Scores of the next token."""
        return self.logits(tokens)


class Workshop:
    """The means of a habit: seeded models, batches, and `planned`."""

    def __init__(self, plan: Mapping[str, Any] | None = None) -> None:
        self.options = plan
        self.made: list[nn.Module] = []

    @property
    def alone(self) -> bool:
        """Whether this is the one device."""
        return self.options is None

    def model(self, kind: Callable[..., nn.Module] = Gpt, **options: Any) -> Any:
        """A model in float64, its weights by the seed."""
        torch.manual_seed(0)
        return kind(**options).double().train()

    def planned(self, model: nn.Module, *example: Any, **options: Any) -> Any:
        """The model under the plan; on one device the model itself."""
        if self.options is None:
            self.made.append(model)
            return model
        given = example or self.batch(0)
        wanted = {"devices": 2, "cluster": "local-cpu", "mode": "train", **self.options, **options}
        plan = autopar.plan(model, given, **wanted)
        module = autopar.parallelize(model, plan, given)
        self.made.append(module)
        return module

    def start(self, kind: Callable[..., nn.Module] = Gpt, **options: Any) -> Any:
        """A planned model of this kind."""
        return self.planned(self.model(kind, **options), *self.example(kind))

    def example(self, kind: Callable[..., nn.Module]) -> tuple[Tensor, ...]:
        """The arguments of a model of this kind."""
        return self.batch(0)[:1] if issubclass(kind, Scores) else self.batch(0)  # type: ignore[arg-type]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a batch."""
        draw = torch.Generator().manual_seed(number + 1)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def batches(self, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches, one for each step."""
        return (self.batch(number) for number in range(count))

    def steps(
        self,
        module: Any,
        optimizer: Any = None,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[Tensor], object] = lambda loss: None,
        count: int = STEPS,
    ) -> list[Any]:
        """Usual steps; `before` the update, `after` it. The losses."""
        chosen = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for tokens, labels in self.batches(count):
            chosen.zero_grad()
            loss = module(tokens, labels)
            loss.backward()
            before()
            chosen.step()
            after(loss)
            losses.append(loss.detach())
        return losses


Habit = Callable[[Workshop], Any]
HABITS: dict[str, Habit] = {}
"""Every habit by its description."""


def habit(description: str) -> Callable[[Habit], Habit]:
    """Enter a function into the table of habits."""

    def enter(function: Habit) -> Habit:
        assert description not in HABITS, description
        HABITS[description] = function
        return function

    return enter


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a habit: its figures with the final weights, or why it was refused.

    `loud`: an error that is not one of autopar's.
    """

    values: Sequence[Any] = ()
    refused: str = ""
    loud: str = ""


def ended(habit: Habit, workshop: Workshop) -> Ended:
    """Run a habit here, as one device or as one rank."""
    torch.manual_seed(0)
    try:
        values = [*_whole(habit(workshop))]
        for module in workshop.made:
            values.append(_weights(module))
    except AutoparError as error:
        return Ended(refused=f"{type(error).__name__}: {_line(error)}")
    except Exception as error:
        return Ended(loud=f"{type(error).__name__}: {_line(error)}")
    return Ended(values=values)


def on_rank(habit: Habit, workshop: Workshop) -> Ended:
    """Run a habit as one rank; an error that the other ranks do not share ends all."""
    mine = ended(habit, workshop)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ended {dist.get_rank()}", "")
    if mine.refused or mine.loud:
        try:
            store.wait([f"ended {rank}" for rank in range(dist.get_world_size())], PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(f"{ALONE}{mine.refused or mine.loud}") from error
    return mine


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _whole(value: Any) -> Iterator[Any]:
    """Tensors and numbers of a structure, whole."""
    if isinstance(value, DTensor):
        yield value.full_tensor().detach().clone()
    elif isinstance(value, Elsewhere):
        # A script would read it, which is refused.
        yield value.tolist()
    elif isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, Mapping):
        for name in value:
            yield from _whole(value[name])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _whole(each)
    elif value is not None:
        yield value


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model at the end, whole."""
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    if not isinstance(module, ParallelModule):
        return {name: p.detach().clone() for name, p in module.named_parameters()} | buffers
    return module.full_values(dict(module.graph_parameters())) | buffers


@functools.cache
def _warm() -> None:
    """Import and prepare what planning needs, so that forked ranks find it done."""
    workshop = Workshop()
    options = {"devices": 2, "cluster": "local-cpu", "mode": "train", "scheme": "data"}
    autopar.plan(workshop.model(), workshop.batch(0), **options)


def verdict(habit: Habit, plan: Mapping[str, Any]) -> str:
    """`right`, `refused: why` on all ranks, or what is wrong."""
    wanted = ended(habit, Workshop())
    if wanted.refused or wanted.loud:
        return f"broken: on one device {wanted.refused or wanted.loud}"
    _warm()
    try:
        ranks = run_ranks(on_rank, plan.get("devices", 2), habit, Workshop(plan), timeout=SECONDS)
    except RunError as error:
        said = str(error).strip().splitlines()[-1]
        alone = said.partition(ALONE)[2]
        return f"loud on one rank: {alone}" if alone else f"hangs or dies: {said}"
    return judged(wanted, ranks)


def judged(wanted: Ended, ranks: Sequence[Ended]) -> str:
    """The verdict on how all ranks ended, beside one device."""
    if any(one.loud for one in ranks):
        return "loud: " + next(one.loud for one in ranks if one.loud)
    if all(one.refused for one in ranks):
        return f"refused: {ranks[0].refused}"
    if any(one.refused for one in ranks):
        return "refused by some ranks: " + next(one.refused for one in ranks if one.refused)
    wrong = next(filter(None, (_difference(wanted.values, one.values) for one in ranks)), "")
    return f"WRONG: {wrong}" if wrong else "right"


def _difference(wanted: Any, actual: Any, where: str = "") -> str:
    """The first difference of two structures; "" if they agree."""
    if isinstance(wanted, Mapping):
        missing = wanted.keys() - actual.keys()
        if missing:
            return f"{where} lacks {sorted(missing)[0]}"
        named = (_difference(wanted[name], actual[name], name) for name in wanted)
        return next(filter(None, named), "")
    if isinstance(wanted, list | tuple):
        if len(wanted) != len(actual):
            return f"{where} has {len(actual)} values for {len(wanted)}"
        numbered = (
            _difference(w, a, f"{where}[{i}]")
            for i, (w, a) in enumerate(zip(wanted, actual, strict=True))
        )
        return next(filter(None, numbered), "")
    if isinstance(wanted, bool | str | type(None)):
        return "" if wanted == actual else f"{where} is {actual} for {wanted}"
    mine = torch.as_tensor(wanted, dtype=torch.float64)
    other = torch.as_tensor(actual, dtype=torch.float64)
    if mine.shape != other.shape:
        return f"{where} has shape {tuple(other.shape)} for {tuple(mine.shape)}"
    if not torch.allclose(mine, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return f"{where} differs by {(mine - other).abs().max().item():.3g}"
    return ""
