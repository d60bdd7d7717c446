"""Habits of optimizers, their schedules, and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import autopar
from tests.habits.workshop import Gpt, Workshop, habit

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD with Nesterov momentum and decay": partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD that maximizes": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "Adam with AMSGrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW, one parameter after another": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW with a tensor as learning rate": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(1e-2), foreach=False
    ),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
    "centered RMSprop with momentum": partial(
        torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9
    ),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Lamb of autopar": lambda p: autopar.Lamb(p, lr=1e-2),
}


def _optimizer(make: Callable[[Any], torch.optim.Optimizer], w: Workshop) -> Any:
    module = w.start()
    return w.steps(module, make(module.parameters()))


def _local(make: Any, w: Workshop) -> Any:
    module = w.start()
    if w.alone:
        return w.steps(module, make(module.parameters()))
    return w.steps(module, autopar.local_optimizer(make, module.parameters()))


for name, make in OPTIMIZERS.items():
    habit(f"torch's optimizers: {name}")(partial(_optimizer, make))
    habit(f"autopar.local_optimizer: {name}")(partial(_local, make))


@habit("LBFGS with a closure")
def _(w: Workshop) -> Any:
    module = w.start(tied=False)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    tokens, labels = w.batch(0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(tokens, labels)
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)]


@habit("SGD with a closure")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tokens, labels = w.batch(0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(tokens, labels)
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)]


@habit("groups: no decay for biases and norms, by dimension")
def _(w: Workshop) -> Any:
    module = w.start()
    wide = [p for p in module.parameters() if p.dim() > 1]
    flat = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    return w.steps(module, torch.optim.AdamW(groups, lr=1e-2))


@habit("groups: no decay by name, as Hugging Face's trainer does")
def _(w: Workshop) -> Any:
    module = w.start()
    none = ("bias", "norm", "second")
    decayed = [p for n, p in module.named_parameters() if not any(word in n for word in none)]
    others = [p for n, p in module.named_parameters() if any(word in n for word in none)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return w.steps(module, torch.optim.AdamW(groups, lr=1e-2))


@habit("groups: no decay for modules by type, as minGPT does")
def _(w: Workshop) -> Any:
    module = w.start()
    norms = [p for m in module.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    chosen = {id(p) for p in norms}
    others = [p for p in module.parameters() if id(p) not in chosen]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]
    groups = [group for group in groups if group["params"]]
    return w.steps(module, torch.optim.AdamW(groups, lr=1e-2))


@habit("groups: a learning rate for each layer")
def _(w: Workshop) -> Any:
    module = w.start()
    groups = [
        {"params": list(layer.parameters()), "lr": 0.1 * 0.8**number}
        for number, layer in enumerate(module.layers)
    ]
    groups.append({"params": [*module.embed.parameters(), *module.norm.parameters()], "lr": 0.05})
    groups.append({"params": [*module.head.parameters()], "lr": 0.2})
    groups = [group for group in groups if group["params"]]
    return w.steps(module, torch.optim.SGD(groups, lr=0.1))


@habit("groups: one optimizer for weights, one for the rest")
def _(w: Workshop) -> Any:
    module = w.start()
    first = torch.optim.SGD([p for p in module.parameters() if p.dim() > 1], lr=0.1)
    second = torch.optim.AdamW([p for p in module.parameters() if p.dim() <= 1], lr=1e-2)
    losses = []
    for tokens, labels in w.batches():
        loss = module(tokens, labels)
        loss.backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@habit("groups: add_param_group later")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.dim() > 1], lr=0.1)
    losses = w.steps(module, optimizer, count=1)
    optimizer.add_param_group({"params": [p for p in module.parameters() if p.dim() <= 1]})
    return [*losses, *w.steps(module, optimizer)]


@habit("groups: the learning rate set by hand")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def lower() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return w.steps(module, optimizer, before=lower)


@habit("an optimizer of one's own, on p.data and p.grad.data")
def _(w: Workshop) -> Any:
    module = w.start()

    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.add_(p.grad.data.sign(), alpha=-group["lr"])

    return w.steps(module, Sign(module.parameters()))


@habit("no optimizer: p -= lr * p.grad under no_grad")
def _(w: Workshop) -> Any:
    module = w.start()
    losses = []
    for tokens, labels in w.batches():
        loss = module(tokens, labels)
        loss.backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
        module.zero_grad()
        losses.append(loss.detach())
    return losses


@habit("the optimizer in the backward pass (register_post_accumulate_grad_hook)")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}

    def update(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(update)
    losses = []
    for tokens, labels in w.batches():
        loss = module(tokens, labels)
        loss.backward()
        losses.append(loss.detach())
    return losses


@habit("a look-ahead copy of the weights, as Lookahead does")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    slow = [p.detach().clone() for p in module.parameters()]
    losses = w.steps(module, optimizer)
    with torch.no_grad():
        for p, old in zip(module.parameters(), slow, strict=True):
            old.add_(p - old, alpha=0.5)
            p.copy_(old)
    return [*losses, *w.steps(module, optimizer, count=1)]


@habit("SAM: a step up, a second gradient, a step back")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches(2):
        optimizer.zero_grad()
        module(tokens, labels).backward()
        with torch.no_grad():
            ups = [0.01 * p.grad for p in module.parameters()]
            torch._foreach_add_(list(module.parameters()), ups)
        optimizer.zero_grad()
        loss = module(tokens, labels)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(module.parameters()), ups)
        optimizer.step()
        losses.append(loss.detach())
    return losses


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 1, gamma=0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 2]),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=5),
    "LinearLR then cosine (SequentialLR)": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=1), schedules.CosineAnnealingLR(o, 4)], [1]
    ),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 4, power=2.0),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=2),
}


def _schedule(make: Callable[[Any], Any], w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    losses = w.steps(module, optimizer, after=lambda loss: schedule.step())
    return [losses, schedule.get_last_lr()]


for name, make_schedule in SCHEDULES.items():
    habit(f"schedules: {name}")(partial(_schedule, make_schedule))


@habit("schedules: ReduceLROnPlateau of the loss")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
    losses = w.steps(module, optimizer, after=lambda loss: schedule.step(loss.item()))
    return [losses, optimizer.param_groups[0]["lr"]]


# --- clipping ---

CLIPS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_(module.parameters())": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "clip_grad_norm_ of a list": lambda m: nn.utils.clip_grad_norm_(list(m.parameters()), 0.5),
    "clip_grad_norm_ of those that train": lambda m: nn.utils.clip_grad_norm_(
        [p for p in m.parameters() if p.requires_grad], 0.5
    ),
    "clip_grad_norm_ of named parameters": lambda m: nn.utils.clip_grad_norm_(
        [p for n, p in m.named_parameters() if "norm" not in n], 0.3
    ),
    "clip_grad_norm_, largest element": lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 0.05, norm_type=float("inf")
    ),
    "clip_grad_norm_, 1-norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, 1.0),
    "clip_grad_norm_, foreach=False": lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 0.5, foreach=False
    ),
    "clip_grad_norm_, error_if_nonfinite": lambda m: nn.utils.clip_grad_norm_(
        m.parameters(), 0.5, error_if_nonfinite=True
    ),
    "clip_grad_norm_ of the layers": lambda m: nn.utils.clip_grad_norm_(m.layers.parameters(), 0.3),
    "clip_grad_norm_ layer by layer": lambda m: (
        [nn.utils.clip_grad_norm_(layer.parameters(), 0.1) for layer in m.layers] and None
    ),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "get_total_norm of gradients": lambda m: nn.utils.get_total_norm(
        [p.grad for p in m.parameters() if p.grad is not None]
    ),
    "the norm by hand, from squares": lambda m: (
        sum((p.grad**2).sum() for p in m.parameters() if p.grad is not None) ** 0.5
    ),
    "the norm by hand, item by item": lambda m: (
        sum(p.grad.norm().item() ** 2 for p in m.parameters() if p.grad is not None) ** 0.5
    ),
    "the norm of stacked norms": lambda m: torch.stack(
        [p.grad.norm() for p in m.parameters() if p.grad is not None]
    ).norm(),
}


def _clip(clip: Callable[[Any], Any], tied: bool, w: Workshop) -> Any:
    module = w.start(Gpt, tied=tied)
    norms: list[Any] = []
    return [w.steps(module, before=lambda: norms.append(clip(module))), norms]


for name, clip in CLIPS.items():
    for tied in (False, True):
        text = f"clipping{', tied weights' if tied else ''}: {name}"
        habit(text)(partial(_clip, clip, tied))


@habit("clipping: module.clip_grad_norm_, which FSDP has, too")
def _(w: Workshop) -> Any:
    module = w.start(tied=True)
    clip = (
        (lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        if w.alone
        else (lambda: module.clip_grad_norm_(0.5))
    )
    norms: list[Any] = []
    return [w.steps(module, before=lambda: norms.append(clip())), norms]


@habit("clipping: each group of an optimizer by itself")
def _(w: Workshop) -> Any:
    module = w.start()
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1]},
        {"params": [p for p in module.parameters() if p.dim() <= 1]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def clip() -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.2)

    return w.steps(module, optimizer, before=clip)


PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "the layers": lambda m: list(m.layers.parameters()),
    "named parameters": lambda m: [p for n, p in m.named_parameters() if "norm" not in n],
    "matrices": lambda m: [p for p in m.parameters() if p.dim() > 1],
}


def _clip_part(part: Callable[[Any], list[Any]], norm_type: float, w: Workshop) -> Any:
    module = w.start(tied=True)
    norms: list[Any] = []

    def clip() -> None:
        if w.alone:
            norms.append(nn.utils.clip_grad_norm_(part(module), 0.3, norm_type))
        else:
            norms.append(module.clip_grad_norm_(0.3, norm_type, parameters=part(module)))

    return [w.steps(module, before=clip), norms]


for name, part in PARTS.items():
    for norm_type in (2.0, 1.0, float("inf")):
        text = f"clipping: module.clip_grad_norm_ of {name}, {norm_type:g}-norm"
        habit(text)(partial(_clip_part, part, norm_type))
