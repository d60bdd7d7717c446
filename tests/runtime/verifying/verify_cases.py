"""Shardings that other people write: five that are wrong, and many that are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

Case = dict[str, Any]


def _seeded() -> torch.Generator:
    torch.manual_seed(3)
    return torch.Generator().manual_seed(5)


def _weights(
    split: Callable[[str, Tensor], list[Any]], inputs: list[Any] | None = None
) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Distributes every parameter as `split` says, and `inputs` so, or as they come."""

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def shard(_: str, inner: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in inner.named_parameters(recurse=False):
                inner.register_parameter(
                    name,
                    nn.Parameter(distribute_tensor(parameter.data, mesh, split(name, parameter))),
                )

        def place(_: nn.Module, given: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            if inputs is None:
                return given
            return tuple(distribute_tensor(value, mesh, inputs) for value in given)

        return distribute_module(module, mesh, shard, place)

    return parallelize


def wrong_convolution() -> Case:
    """Convolution with a weight that is split by its output channels, which DTensor computes as if
    it were not.
    """
    generator = _seeded()
    module = nn.Conv2d(4, 8, 3, padding=1)
    x = torch.randn(2, 4, 8, 8, generator=generator)

    return {
        "module": module,
        "inputs": (x,),
        "parallelize": _weights(lambda name, p: [Shard(0)], [Replicate()]),
    }


def ignored() -> Case:
    """Cross entropy with ignored labels on a split batch: the mean of means is not the mean.

    Torch 2.15 weighs the means by their labels, older ones do not.
    """
    generator = _seeded()
    module = nn.Linear(16, 10)
    x = torch.randn(8, 16, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)
    labels[:3] = -100

    def loss(outputs: Tensor, x: Tensor) -> Tensor:
        split = isinstance(outputs, DTensor)
        own = distribute_tensor(labels, outputs.device_mesh, [Shard(0)]) if split else labels
        return nn.functional.cross_entropy(outputs, own, ignore_index=-100)

    return {
        "module": module,
        "inputs": (x,),
        "parallelize": _weights(lambda name, p: [Replicate()], [Shard(0)]),
        "loss": loss,
    }


class Dropping(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.drop(self.linear(x))
        return output


def wrong_dropout() -> Case:
    """Dropout on split features, every shard with the same mask."""
    generator = _seeded()
    x = torch.randn(8, 16, generator=generator)

    return {
        "module": Dropping(),
        "inputs": (x,),
        "parallelize": _weights(lambda name, p: [Shard(0)], [Replicate()]),
    }


class Experts(nn.Module):
    """Two experts, each for half of the tokens, and a shared layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(x)
        return torch.stack(
            [expert(part) for expert, part in zip(self.experts, y.chunk(2), strict=True)]
        )


def wrong_experts() -> Case:
    """Every rank computes all experts, and sums their gradients as if each computed its own."""
    x = torch.randn(8, 8, generator=_seeded())

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def summed(gradient: Tensor) -> Tensor:
            total = gradient.clone()
            dist.all_reduce(total)
            return total

        for name, parameter in module.named_parameters():
            if name.startswith("experts"):
                parameter.register_hook(summed)
        return module

    return {"module": Experts(), "inputs": (x,), "parallelize": parallelize}


def _head(tail: Callable[[Tensor], Tensor]) -> Case:
    generator = _seeded()
    module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 12, bias=False))
    x = torch.randn(8, 16, generator=generator)
    labels = torch.randint(0, 12, (8,), generator=generator)

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, mesh, {"1": ColwiseParallel(use_local_output=False)})

    def loss(logits: Tensor, x: Tensor) -> Tensor:
        if not isinstance(logits, DTensor):
            return nn.functional.cross_entropy(logits, labels)
        return _region(tail(logits), labels)

    return {"module": module, "inputs": (x,), "parallelize": parallelize, "loss": loss}


class _Region(torch.autograd.Function):
    """A cross entropy in a loss_parallel region whose backward pass runs inside it as well."""

    @staticmethod
    def forward(context: Any, logits: DTensor, labels: Tensor) -> Tensor:
        with torch.enable_grad(), loss_parallel():
            held = logits.detach().requires_grad_()
            loss = nn.functional.cross_entropy(held, labels)
            (context.gradient,) = torch.autograd.grad(loss, held)
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.gradient * gradients[0], None


def _region(logits: Tensor, labels: Tensor) -> Tensor:
    output: Tensor = _Region.apply(logits, labels)
    return output


class _Off(torch.autograd.Function):
    """Hands values on, and gradients times the number of ranks: what a sum over ranks too many
    does.
    """

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * dist.get_world_size()


def right_loss_parallel() -> Case:
    """A vocabulary-split cross entropy by loss_parallel."""
    return _head(lambda logits: logits)


def wrong_loss_parallel() -> Case:
    """The same, with a gradient that is added up once too often."""

    def off(logits: Tensor) -> Tensor:
        output: Tensor = _Off.apply(logits)
        return output

    return _head(off)


def _centred(x: Tensor) -> Tensor:
    return torch.ops.verify_cases.centred(x)  # type: ignore[no-any-return]


@torch.library.custom_op("verify_cases::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Rows less their mean."""
    return x - x.mean(-1, keepdim=True)


@centred.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, gradient: Tensor) -> Tensor:
    return centred(gradient)


centred.register_autograd(_backward)


def _centring(dim: int) -> Case:
    """An operator whose sharding somebody registered: along the rows it is right, along the
    features it is not.
    """
    x = torch.randn(8, 16, generator=_seeded())

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        register_sharding(torch.ops.verify_cases.centred.default)(
            lambda x: [([Replicate()], [Replicate()]), ([Shard(dim)], [Shard(dim)])]
        )
        return parallelize_module(module, mesh, {})

    def loss(y: Tensor, x: Tensor) -> Tensor:
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            y = DTensor.from_local(y, mesh, [Replicate()]).redistribute(mesh, [Shard(dim)])
        output: Tensor = _centred(y).square().mean()
        return output

    return {"module": nn.Linear(16, 16), "inputs": (x,), "parallelize": parallelize, "loss": loss}


def right_registered() -> Case:
    """Rows are split."""
    return _centring(0)


def wrong_registered() -> Case:
    """Features are split, over which the operator takes a mean."""
    return _centring(1)


WRONG: dict[str, tuple[Callable[[], Case], str]] = {
    "convolution": (wrong_convolution, "aten.convolution"),
    "dropout": (wrong_dropout, "aten.bernoulli_"),
    "experts": (wrong_experts, "the gradient of experts.0.weight"),
    "registered": (wrong_registered, "verify_cases.centred"),
    "loss_parallel": (wrong_loss_parallel, "the gradient of"),
}


class Mlp(nn.Module):
    """Two products with something between."""

    def __init__(
        self, width: int, hidden: int, bias: bool, between: Callable[[Tensor], Tensor], norm: bool
    ) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(self.between(self.up(self.norm(x))))
        return output


BETWEEN = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "silu": nn.functional.silu,
    "square": torch.square,
}
STYLES: dict[str, dict[str, Callable[[], Any]]] = {
    "megatron": {"up": ColwiseParallel, "down": RowwiseParallel},
    "column": {"up": lambda: ColwiseParallel(output_layouts=Replicate())},
    "row": {"down": lambda: RowwiseParallel(input_layouts=Replicate())},
    "apart": {
        "up": lambda: ColwiseParallel(output_layouts=Replicate()),
        "down": lambda: RowwiseParallel(input_layouts=Replicate()),
    },
    "columns": {
        "up": lambda: ColwiseParallel(output_layouts=Replicate()),
        "down": lambda: ColwiseParallel(output_layouts=Replicate()),
    },
}


def right_mlp(style: str, between: str, bias: bool, norm: bool) -> Case:
    """One of a hundred right plans."""
    x = torch.randn(4, 8, generator=_seeded())

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(
            module, mesh, {name: make() for name, make in STYLES[style].items()}
        )

    return {
        "module": Mlp(8, 16, bias, BETWEEN[between], norm),
        "inputs": (x,),
        "parallelize": parallelize,
    }


RIGHT = [
    (s, b, bias, norm)
    for s in STYLES
    for b in BETWEEN
    for bias in (True, False)
    for norm in (True, False)
]


def right_data_parallel() -> Case:
    """Replicas, each with its part of the batch, whose gradients are averaged."""
    x = torch.randn(8, 16, generator=_seeded())

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        wrong = copy.copy(module)
        for parameter in wrong.parameters():
            parameter.register_hook(averaged)
        wrong.register_forward_pre_hook(
            lambda _, given: given[0].chunk(dist.get_world_size())[dist.get_rank()]
        )
        return wrong

    def averaged(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return {"module": nn.Linear(16, 4), "inputs": (x,), "parallelize": parallelize}


def built() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and its inputs, for a plan of styles."""
    _seeded()
    return Mlp(8, 16, True, torch.relu, True), (
        torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),
    )
