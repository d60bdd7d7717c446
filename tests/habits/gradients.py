"""Habits of losses, backward passes, gradients and hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.habits.workshop import VOCABULARY, WIDTH, Gpt, Scores, Workshop, habit


class Pair(Gpt):
    """Returns the loss and the logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss, and the scores."""
        scores = self.logits(tokens)
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


class Reversed(Gpt):
    """Returns a penalty in front of the loss."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """A penalty of the scores, and the loss."""
        scores = self.logits(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return scores.square().mean(), loss


class Named(Gpt):
    """Returns a dictionary, as Hugging Face's models do."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The loss and the scores by name."""
        scores = self.logits(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


class Auxiliary(Gpt):
    """A loss with an auxiliary one, from the second layer, added inside."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The sum of both."""
        x = self.embed(tokens)
        early = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            early = x if number == 1 else early
        losses = [
            functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), labels.flatten())
            for h in (x, early)
        ]
        return losses[0] + 0.3 * losses[1]


class Smoothed(Gpt):
    """A loss with smoothed labels and ignored ones."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean over the labels that count."""
        masked = labels.masked_fill(labels == 0, -100)
        return functional.cross_entropy(
            self.logits(tokens).flatten(0, 1), masked.flatten(), label_smoothing=0.1
        )


class Summed(Gpt):
    """A loss that is a sum, not a mean."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The sum over all tokens."""
        return functional.cross_entropy(
            self.logits(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
        )


class Weighted(Gpt):
    """A loss whose classes have weights in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("classes", torch.linspace(0.5, 1.5, VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The weighted mean."""
        return functional.cross_entropy(
            self.logits(tokens).flatten(0, 1), labels.flatten(), weight=self.classes
        )


class Checkpointed(Gpt):
    """Recomputes its layers in the backward pass."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Adversarial(Gpt):
    """Reverses the gradient in front of its head by a function of its own."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(_Reverse.apply(self.norm(x)))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Detached(Gpt):
    """Stops the gradient between its layers."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == 2 else x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Straight(Gpt):
    """Rounds in the forward pass, and passes gradients straight through."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        x = x + (torch.round(4 * x) / 4 - x).detach()
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Tokens(Gpt):
    """Scores of the next token by the present one alone; every operator has a second derivative."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer.down(torch.tanh(layer.up(layer.norm(x))))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Targeted(Gpt):
    """Compares its last layer with targets that the model makes itself, under no_grad."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean square of the differences, and the mean cross entropy."""
        x = self.embed(tokens)
        with torch.no_grad():
            target = self.layers[0](x) + 0.1
        for layer in self.layers:
            x = layer(x)
        loss = functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss + (x - target).square().mean()


class Frozen(Gpt):
    """Runs its first layers under set_grad_enabled(False)."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        with torch.set_grad_enabled(False):
            x = self.layers[0](self.embed(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


KINDS: dict[str, type[Gpt]] = {
    "targets made under no_grad inside": Targeted,
    "first layers under set_grad_enabled(False) inside": Frozen,
    "loss and logits, the loss by index": Pair,
    "an auxiliary loss added inside": Auxiliary,
    "smoothed and ignored labels": Smoothed,
    "a sum instead of a mean": Summed,
    "weights of classes in a buffer": Weighted,
    "checkpoint() inside": Checkpointed,
    "an autograd.Function with a backward of its own": Adversarial,
    "detach() between layers": Detached,
    "a straight-through estimator": Straight,
}


def _kind(kind: type[Gpt]) -> Any:
    def run(w: Workshop) -> Any:
        module = w.start(kind)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for tokens, labels in w.batches():
            optimizer.zero_grad()
            out = module(tokens, labels)
            loss = out[0] if isinstance(out, tuple) else out
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return run


for name, kind in KINDS.items():
    habit(f"losses: {name}")(_kind(kind))


def _backward(kind: type[Gpt], loss_of: Any) -> Any:
    """Steps whose loss is made of the outputs."""

    def run(w: Workshop) -> Any:
        module = w.start(kind)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for tokens, labels in w.batches():
            optimizer.zero_grad()
            loss = loss_of(module(tokens, labels), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return run


habit("losses: the second output")(_backward(Reversed, lambda out, labels: out[1]))
habit("losses: the sum of two outputs")(_backward(Reversed, lambda out, labels: out[1] + out[0]))
habit("losses: a weighted sum of two outputs")(
    _backward(Reversed, lambda out, labels: out[1] + 0.1 * out[0])
)
habit("losses: a loss by name")(_backward(Named, lambda out, labels: out["loss"]))
habit("losses: a penalty on the logits beside the loss")(
    _backward(Pair, lambda out, labels: out[0] + 1e-2 * out[1].square().mean())
)
habit("losses: the loss of the script from the logits beside the loss")(
    _backward(
        Pair, lambda out, labels: functional.cross_entropy(out[1].flatten(0, 1), labels.flatten())
    )
)
habit("losses: divided by a number")(_backward(Gpt, lambda out, labels: out / 2))
habit("losses: times a tensor")(_backward(Gpt, lambda out, labels: out * torch.tensor(1.5)))
habit("losses: squared")(_backward(Gpt, lambda out, labels: out**2))
habit("losses: clamped")(_backward(Gpt, lambda out, labels: out.clamp(max=2.0)))
habit("losses: loss.mean()")(_backward(Gpt, lambda out, labels: out.mean()))


@habit("losses: a loss of the script from logits")
def _(w: Workshop) -> Any:
    module = w.start(Scores)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("losses: weight decay added by the script")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in module.parameters())
        loss = module(tokens, labels) + 1e-3 * decay
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("losses: distillation from a frozen teacher on each rank")
def _(w: Workshop) -> Any:
    teacher = w.model(Scores)
    module = w.start(Scores)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        with torch.no_grad():
            soft = (teacher(tokens) + 0.1).softmax(-1)
        scores = module(tokens)
        loss = functional.kl_div(scores.log_softmax(-1), soft, reduction="batchmean")
        loss = loss + functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("losses: of two calls, one backward pass")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        loss = module(*w.batch(number)) + module(*w.batch(number + 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("losses: a contrast of two calls")
def _(w: Workshop) -> Any:
    module = w.start(Scores)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        first, second = (module(w.batch(n)[0]) for n in (number, number + 5))
        loss = (first - second).square().mean() - first.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


# --- backward passes ---


def _loop(step: Any) -> Any:
    """Steps in which `step(w, module, optimizer, number)` makes the gradients."""

    def run(w: Workshop) -> Any:
        module = w.start()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        seen = []
        for number in range(2):
            optimizer.zero_grad()
            seen.append(step(w, module, optimizer, number))
            optimizer.step()
        return seen

    return run


@habit("accumulation: two batches, one update")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    for part in range(2):
        (module(*w.batch(2 * number + part)) / 2).backward()


@habit("accumulation: three losses kept, summed, one backward pass")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    losses = [module(*w.batch(3 * number + part)) for part in range(3)]
    torch.stack(losses).mean().backward()


@habit("accumulation: under no_sync() but the last, as DDP does")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    if w.alone:
        for part in range(2):
            module(*w.batch(2 * number + part)).backward()
    else:
        with module.no_sync():
            module(*w.batch(2 * number)).backward()
        module(*w.batch(2 * number + 1)).backward()


@habit("accumulation: gradients never zeroed")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for tokens, labels in w.batches():
        loss = module(tokens, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("accumulation: zero_grad(set_to_none=False)")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad(set_to_none=False)
        loss = module(tokens, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("backward: retain_graph, twice")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    loss = module(*w.batch(number))
    loss.backward(retain_graph=True)
    loss.backward()


@habit("backward: with a gradient")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    module(*w.batch(number)).backward(torch.tensor(0.5, dtype=torch.double))


@habit("backward: torch.autograd.grad, gradients set by hand")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(module(*w.batch(number)), parameters, allow_unused=True)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


@habit("backward: torch.autograd.backward([loss])")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    torch.autograd.backward([module(*w.batch(number))])


@habit("backward: create_graph, a penalty on gradients")
def _(w: Workshop) -> Any:
    module = w.start(Tokens)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        loss = module(tokens, labels)
        weights = list(module.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        (loss + 0.1 * sum(g.square().sum() for g in slopes if g is not None)).backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("backward: skipped where a loss is large")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for number, (tokens, labels) in enumerate(w.batches()):
        optimizer.zero_grad()
        loss = module(tokens, labels)
        losses.append(loss.detach())
        if number == 1:
            continue
        loss.backward()
        optimizer.step()
    return losses


@habit("backward: a call whose loss is thrown away")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    module(*w.batch(number + 7))
    loss = module(*w.batch(number))
    loss.backward()
    return loss.detach()


@habit("backward: anomaly detection")
@_loop
def _(w: Workshop, module: Any, optimizer: Any, number: int) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        module(*w.batch(number)).backward()


# --- gradients as the script sees them ---


def _seen(change: Any) -> Any:
    """Steps in which the script changes gradients before the update."""

    def run(w: Workshop) -> Any:
        module = w.start()
        seen: list[Any] = []

        def before() -> None:
            told = change(module)
            if told is not None:
                seen.append(told)

        return [w.steps(module, before=before), seen]

    return run


@habit("gradients: scaled in place")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        p.grad *= 0.5


@habit("gradients: replaced")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        p.grad = p.grad * 0.5


@habit("gradients: centred")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        if p.dim() > 1:
            p.grad = p.grad - p.grad.mean(dim=1, keepdim=True)


@habit("gradients: their signs")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        p.grad.sign_()


@habit("gradients: some set to None")
@_seen
def _(module: Any) -> Any:
    for name, p in module.named_parameters():
        if "norm" in name:
            p.grad = None


@habit("gradients: rows zeroed")
@_seen
def _(module: Any) -> Any:
    for name, p in module.named_parameters():
        if "embed" in name:
            p.grad[3:5] = 0


@habit("gradients: multiplied by a mask of the weight's sign")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        p.grad.mul_((p.detach() > 0).to(p.dtype))


@habit("gradients: torch._foreach_mul_ of all")
@_seen
def _(module: Any) -> Any:
    torch._foreach_mul_([p.grad for p in module.parameters()], 0.5)


@habit("gradients: nan_to_num_")
@_seen
def _(module: Any) -> Any:
    for p in module.parameters():
        p.grad.nan_to_num_()


@habit("gradients: the largest element of all told")
@_seen
def _(module: Any) -> Any:
    return torch.stack([p.grad.abs().max() for p in module.parameters()]).max()


@habit("gradients: the count of those present")
@_seen
def _(module: Any) -> Any:
    return all(p.grad is not None for p in module.parameters())


# --- hooks ---


@habit("hooks: on parameters (register_hook), after planning")
def _(w: Workshop) -> Any:
    module = w.start()
    for p in module.parameters():
        p.register_hook(lambda gradient: 0.5 * gradient)
    return w.steps(module)


@habit("hooks: on parameters, before planning")
def _(w: Workshop) -> Any:
    model = w.model()
    for p in model.parameters():
        p.register_hook(lambda gradient: 0.5 * gradient)
    return w.steps(w.planned(model))


@habit("hooks: a forward hook that tells a submodule's output")
def _(w: Workshop) -> Any:
    module = w.start()
    seen: list[Any] = []
    module.layers[1].register_forward_hook(lambda m, a, out: seen.append(out.detach().mean()))
    return [w.steps(module), seen]


@habit("hooks: a forward hook that changes a submodule's output, before planning")
def _(w: Workshop) -> Any:
    model = w.model()
    model.layers[1].register_forward_hook(lambda m, a, out: 0.5 * out)
    return w.steps(w.planned(model))


@habit("hooks: a forward hook on the whole module")
def _(w: Workshop) -> Any:
    module = w.start()
    module.register_forward_hook(lambda m, a, out: 2 * out)
    return w.steps(module)


@habit("hooks: a forward pre-hook on the whole module")
def _(w: Workshop) -> Any:
    module = w.start()
    module.register_forward_pre_hook(lambda m, a: (a[0], a[0]))
    return w.steps(module)


@habit("hooks: a full backward hook on a submodule")
def _(w: Workshop) -> Any:
    module = w.start()
    module.layers[1].register_full_backward_hook(lambda m, i, o: (0.5 * i[0],))
    return w.steps(module)


@habit("hooks: a full backward hook on a submodule, before planning")
def _(w: Workshop) -> Any:
    model = w.model()
    model.layers[1].register_full_backward_hook(lambda m, i, o: (0.5 * i[0],))
    return w.steps(w.planned(model))


@habit("hooks: on the loss")
def _(w: Workshop) -> Any:
    module = w.start()
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        loss = module(tokens, labels)
        loss.register_hook(lambda gradient: 0.5 * gradient)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@habit("hooks: on the optimizer's step")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    count: list[int] = []
    optimizer.register_step_post_hook(lambda *told: count.append(1))
    return [w.steps(module, optimizer), len(count)]


@habit("spectral norm of a layer (parametrizations)")
def _(w: Workshop) -> Any:
    model = w.model()
    nn.utils.parametrizations.spectral_norm(model.layers[0].up)
    return w.steps(w.planned(model))


@habit("weight norm of a layer (parametrizations)")
def _(w: Workshop) -> Any:
    model = w.model()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    return w.steps(w.planned(model))


@habit("an adapter of low rank beside frozen weights")
def _(w: Workshop) -> Any:
    class Adapted(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.a = nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, 2 * WIDTH, bias=False)
            self.scaling = 0.5

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) + self.scaling * self.b(self.a(x))

    model = w.model()
    torch.manual_seed(3)
    for layer in model.layers:
        layer.up = Adapted(layer.up).double()
    module = w.planned(model)
    trained = [p for p in module.parameters() if p.requires_grad]
    return w.steps(module, torch.optim.AdamW(trained, lr=1e-2))
