"""Habits of modules: modes, freezing, weights, copies, averages, states, numbers, precision."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import swa_utils

from tests.habits.workshop import VOCABULARY, WIDTH, Gpt, Scores, Workshop, habit


def _steps(prepare: Any) -> Any:
    """Usual steps of a module that `prepare` changes once it is planned."""

    def run(w: Workshop) -> Any:
        module = w.start()
        told = prepare(module)
        return [w.steps(module), told]

    return run


# --- modes ---


class Dropped(Gpt):
    """With dropout everywhere."""

    def __init__(self, **options: Any) -> None:
        super().__init__(drop=0.3, **options)


class BatchLayer(nn.Module):
    """A matrix product with a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, of the shape of its input: batch, sequence, width."""
        normed: Tensor = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return torch.tanh(normed)


class Normed(nn.Module):
    """A network with norms over batches, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(BatchLayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@habit("modes: eval() for a validation loss under no_grad, then train()")
def _(w: Workshop) -> Any:
    module = w.start(Dropped)
    module.eval()
    with torch.no_grad():
        told = [module(*w.batch(9)) for _ in range(2)]
    module.train()
    module.eval()
    return [told, w.steps(module)]


@habit("modes: inference_mode for validation")
def _(w: Workshop) -> Any:
    module = w.start()
    losses = w.steps(module)
    module.eval()
    with torch.inference_mode():
        return [losses, module(*w.batch(9)).item()]


@habit("modes: norms over batches train and validate")
def _(w: Workshop) -> Any:
    module = w.start(Normed)
    losses = w.steps(module)
    module.eval()
    with torch.no_grad():
        return [losses, module(*w.batch(9))]


@habit("modes: norms over batches frozen by eval() after planning")
def _(w: Workshop) -> Any:
    module = w.start(Normed)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
    return w.steps(module)


@habit("modes: norms over batches frozen by eval() before planning")
def _(w: Workshop) -> Any:
    model = w.model(Normed)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
    return w.steps(w.planned(model))


@habit("modes: dropout of one layer off")
def _(w: Workshop) -> Any:
    module = w.start(Dropped)
    for layer in module.layers:
        layer.drop.eval()
    return w.steps(module)


@habit("modes: dropout set to 0 (module.drop.p = 0)")
def _(w: Workshop) -> Any:
    module = w.start(Dropped)
    for layer in module.layers:
        layer.drop.p = 0.0
    return w.steps(module)


@habit("modes: dropout kept on while validating (Monte Carlo)")
def _(w: Workshop) -> Any:
    module = w.start()
    module.eval()
    for layer in module.layers:
        layer.drop.train()
    with torch.no_grad():
        return module(*w.batch(9))


@habit("modes: momentum of a norm changed")
def _(w: Workshop) -> Any:
    module = w.start(Normed)
    for layer in module.layers:
        layer.norm.momentum = 0.5
    return w.steps(module)


# --- freezing ---


@habit("freezing: before planning")
def _(w: Workshop) -> Any:
    model = w.model()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    module = w.planned(model)
    return w.steps(
        module, torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
    )


@habit("freezing: the embedding, after planning")
def _(w: Workshop) -> Any:
    module = w.start()
    module.embed.weight.requires_grad_(False)
    return w.steps(module)


@habit("freezing: a layer, after planning, by requires_grad_(False) of it")
def _(w: Workshop) -> Any:
    module = w.start()
    module.layers[1].requires_grad_(False)
    return w.steps(module)


@habit("freezing: by names, after planning")
def _(w: Workshop) -> Any:
    module = w.start()
    for name, p in module.named_parameters():
        p.requires_grad = "layers.0" not in name
    return w.steps(module)


@habit("freezing: undone after a step (gradual unfreezing)")
def _(w: Workshop) -> Any:
    model = w.model()
    model.layers[0].requires_grad_(False)
    module = w.planned(model)
    losses = w.steps(module, count=1)
    module.layers[0].requires_grad_(True)
    return [losses, w.steps(module)]


@habit("freezing: set and undone after planning")
def _(w: Workshop) -> Any:
    module = w.start()
    module.layers[0].requires_grad_(False)
    losses = w.steps(module, count=1)
    module.layers[0].requires_grad_(True)
    return [losses, w.steps(module)]


# --- weights ---


@habit("weights: initialised again under no_grad (nn.init)")
@_steps
def _(module: Any) -> Any:
    for p in module.parameters():
        nn.init.constant_(p, 0.01)


@habit("weights: module.apply(function by type)")
@_steps
def _(module: Any) -> Any:
    def init(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.02)

    module.apply(init)


@habit("weights: p.data.mul_")
@_steps
def _(module: Any) -> Any:
    for p in module.parameters():
        p.data.mul_(0.5)


@habit("weights: p.data = p.data * 0.5")
@_steps
def _(module: Any) -> Any:
    for p in module.parameters():
        p.data = p.data * 0.5


@habit("weights: p.copy_ under no_grad")
@_steps
def _(module: Any) -> Any:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * p)


@habit("weights: clamped after each update")
def _(w: Workshop) -> Any:
    module = w.start()

    def clamp(loss: Any) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.clamp_(-0.3, 0.3)

    return w.steps(module, after=clamp)


@habit("weights: parameters_to_vector and back")
@_steps
def _(module: Any) -> Any:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(0.5 * vector, module.parameters())


@habit("weights: their number (sum of numel)")
@_steps
def _(module: Any) -> Any:
    return sum(p.numel() for p in module.parameters())


@habit("weights: their number, of those that train, tied")
def _(w: Workshop) -> Any:
    module = w.start(tied=True)
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


@habit("weights: their norm told")
@_steps
def _(module: Any) -> Any:
    return sum(p.detach().square().sum() for p in module.parameters()) ** 0.5


@habit("weights: names of parameters")
@_steps
def _(module: Any) -> Any:
    return sorted(name for name, _ in module.named_parameters())


@habit("weights: their number, by name")
@_steps
def _(module: Any) -> Any:
    return len([name for name, p in module.named_parameters() if p.dim() > 1]) > 0


@habit("weights: get_parameter and get_submodule")
@_steps
def _(module: Any) -> Any:
    module.get_submodule("layers.1")
    with torch.no_grad():
        module.get_parameter("layers.1.up.weight").mul_(0.5)


@habit("weights: a weight tied after planning")
@_steps
def _(module: Any) -> Any:
    module.head.weight = module.embed.weight


@habit("weights: tied before planning")
def _(w: Workshop) -> Any:
    return w.steps(w.start(tied=True))


@habit("weights: half of them pruned by a mask after each update")
def _(w: Workshop) -> Any:
    module = w.start()
    masks = {name: (p.detach() > 0).to(p.dtype) for name, p in module.named_parameters()}

    def prune(loss: Any) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.mul_(masks[name])

    return w.steps(module, after=prune)


# --- attributes ---


class Scaled(Gpt):
    """Divides its scores by a temperature."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tau = 2.0
        self.note = "a note"

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy at a temperature."""
        scores = self.logits(tokens) / self.tau
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@habit("attributes: one that the forward pass reads, changed after planning")
def _(w: Workshop) -> Any:
    module = w.start(Scaled)
    module.tau = 1.0
    return w.steps(module)


@habit("attributes: one that the forward pass reads, annealed")
def _(w: Workshop) -> Any:
    module = w.start(Scaled)

    def colder(loss: Any) -> None:
        module.tau = 0.9 * module.tau

    return w.steps(module, after=colder)


@habit("attributes: one that nothing reads")
def _(w: Workshop) -> Any:
    module = w.start(Scaled)
    module.note = "another"
    module.step = 3
    return [w.steps(module), module.note, module.step]


@habit("attributes: a submodule replaced")
def _(w: Workshop) -> Any:
    module = w.start()
    module.head = nn.Linear(WIDTH, VOCABULARY, bias=False).double()
    return w.steps(module)


@habit("attributes: layers appended")
def _(w: Workshop) -> Any:
    module = w.start()
    module.layers.append(module.layers[0])
    return w.steps(module)


# --- copies and averages ---


@habit("averages: AveragedModel, as SWA does")
def _(w: Workshop) -> Any:
    module = w.start()
    average = swa_utils.AveragedModel(module)
    losses = w.steps(module, after=lambda loss: average.update_parameters(module))
    average.eval()
    with torch.no_grad():
        return [losses, average(*w.batch(9))]


@habit("averages: AveragedModel with get_ema_multi_avg_fn")
def _(w: Workshop) -> Any:
    module = w.start()
    average = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    losses = w.steps(module, after=lambda loss: average.update_parameters(module))
    with torch.no_grad():
        return [losses, average(*w.batch(9))]


@habit("averages: deepcopy, lerp_ of parameters")
def _(w: Workshop) -> Any:
    module = w.start()
    average = copy.deepcopy(module)

    def update(loss: Any) -> None:
        with torch.no_grad():
            for old, new in zip(average.parameters(), module.parameters(), strict=True):
                old.lerp_(new, 0.5)

    losses = w.steps(module, after=update)
    with torch.no_grad():
        return [losses, average(*w.batch(9))]


@habit("averages: shadow weights by name, swapped in to validate")
def _(w: Workshop) -> Any:
    module = w.start()
    shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(loss: Any) -> None:
        for name, p in module.named_parameters():
            shadow[name].mul_(0.5).add_(p.detach(), alpha=0.5)

    losses = w.steps(module, after=update)
    own = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(shadow[name])
        told = module(*w.batch(9))
        for name, p in module.named_parameters():
            p.copy_(own[name])
    return [losses, told]


@habit("averages: a target network (BYOL, DQN), updated from the first")
def _(w: Workshop) -> Any:
    module = w.start(Scores)
    target = copy.deepcopy(module).requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for tokens, _ in w.batches():
        with torch.no_grad():
            wanted = target(tokens) + 0.1
        loss = (module(tokens) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), module.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        losses.append(loss.detach())
    return losses


@habit("averages: two modules train in turn (GAN)")
def _(w: Workshop) -> Any:
    first = w.start()
    second = w.start()
    return [w.steps(first), w.steps(second)]


# --- states ---


@habit("states: state_dict kept, training, load_state_dict back")
def _(w: Workshop) -> Any:
    module = w.start()
    saved = copy.deepcopy(module.state_dict())
    losses = w.steps(module)
    module.load_state_dict(saved)
    return [losses, w.steps(module)]


@habit("states: a model's state_dict loaded into the planned one")
def _(w: Workshop) -> Any:
    module = w.start()
    other = w.model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    module.load_state_dict(other.state_dict())
    return w.steps(module)


@habit("states: strict=False with names that are missing")
def _(w: Workshop) -> Any:
    module = w.start()
    state = {name: 0.5 * value for name, value in w.model().state_dict().items() if "up" in name}
    module.load_state_dict(state, strict=False)
    return w.steps(module)


@habit("states: torch.save of state_dict, loaded again")
def _(w: Workshop) -> Any:
    module = w.start()
    losses = w.steps(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file, weights_only=False))
    return [losses, w.steps(module)]


@habit("states: names in state_dict")
def _(w: Workshop) -> Any:
    return sorted(w.start().state_dict())


@habit("states: an optimizer's state_dict kept and loaded")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = w.steps(module, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.AdamW(module.parameters(), lr=1e-2)
    other.load_state_dict(saved)
    return [losses, w.steps(module, other)]


@habit("states: get_model_state_dict(full_state_dict=True)")
def _(w: Workshop) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    module = w.start()
    w.steps(module)
    if w.alone:
        return {name: value.clone() for name, value in module.state_dict().items()}
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(module, options=options)


@habit("states: whole tensors of state_dict on rank 0 (full_tensor), as scripts save them")
def _(w: Workshop) -> Any:
    module = w.start()
    w.steps(module)
    state = module.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


@habit("states: early stopping, the best weights loaded at the end")
def _(w: Workshop) -> Any:
    module = w.start()
    best = math.inf
    saved: dict[str, Any] = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        loss = module(tokens, labels)
        loss.backward()
        if loss.item() < best:
            best = loss.item()
            saved = copy.deepcopy(module.state_dict())
        optimizer.step()
    module.load_state_dict(saved)
    return best


# --- numbers ---


@habit("numbers: the mean of losses, item by item")
def _(w: Workshop) -> Any:
    losses = w.steps(w.start())
    return sum(loss.item() for loss in losses) / len(losses)


@habit("numbers: accuracy from logits")
def _(w: Workshop) -> Any:
    module = w.start(Scores)
    module.eval()
    with torch.no_grad():
        tokens, labels = w.batch(3)
        return (module(tokens).argmax(-1) == labels).double().mean()


@habit("numbers: tokens sampled one by one")
def _(w: Workshop) -> Any:
    module = w.start(Scores)
    module.eval()
    tokens = w.batch(3)[0]
    with torch.no_grad():
        for _ in range(3):
            last = module(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens[:, 1:], last], 1)
    return tokens


@habit("numbers: a step skipped where a gradient is not finite")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    skipped = 0
    losses = []
    for number, (tokens, labels) in enumerate(w.batches()):
        optimizer.zero_grad()
        loss = module(tokens, labels) * (math.inf if number == 1 else 1.0)
        loss.backward()
        if any(not torch.isfinite(p.grad).all() for p in module.parameters()):
            skipped += 1
            continue
        optimizer.step()
        losses.append(loss.detach())
    return [losses, skipped]


@habit("numbers: stopped where the norm of the weights grows")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    before = math.inf
    steps = 0
    for tokens, labels in w.batches(5):
        optimizer.zero_grad()
        module(tokens, labels).backward()
        optimizer.step()
        norm = sum(p.detach().square().sum().item() for p in module.parameters())
        steps += 1
        if norm > before:
            break
        before = norm
    return steps


# --- calls ---


@habit("calls: keyword arguments")
def _(w: Workshop) -> Any:
    module = w.start()
    tokens, labels = w.batch(0)
    loss = module(tokens=tokens, labels=labels)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return loss


@habit("calls: another batch size")
def _(w: Workshop) -> Any:
    module = w.start()
    tokens, labels = w.batch(0)
    return module(tokens[:4], labels[:4])


@habit("calls: another sequence length")
def _(w: Workshop) -> Any:
    module = w.start()
    tokens, labels = w.batch(0)
    return module(tokens[:, :2], labels[:, :2])


@habit("calls: a batch of another type")
def _(w: Workshop) -> Any:
    module = w.start()
    tokens, labels = w.batch(0)
    return module(tokens.int(), labels)


@habit("calls: a batch that needs gradients")
def _(w: Workshop) -> Any:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

        def forward(self, x: Tensor) -> Any:
            return self.layers(x).square().mean()

    x = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.double).view(8, WIDTH)
    module = w.planned(w.model(Inner), x)
    x.requires_grad_()
    module(x).backward()
    return x.grad


@habit("calls: a submodule by itself")
def _(w: Workshop) -> Any:
    module = w.start()
    return module.embed(w.batch(0)[0]).mean()


@habit("calls: a method of the model (model.logits)")
def _(w: Workshop) -> Any:
    module = w.start()
    return module.logits(w.batch(0)[0]).mean()


@habit("calls: under torch.compile")
def _(w: Workshop) -> Any:
    module = w.start()
    if not w.alone:
        module.compile(backend="eager")
    return w.steps(module)


@habit("calls: wrapped in another module")
def _(w: Workshop) -> Any:
    class Wrapper(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    return w.steps(Wrapper(w.start()))


@habit("calls: module.to('cpu'), module.double()")
@_steps
def _(module: Any) -> Any:
    module.to("cpu")
    module.double()


@habit("calls: module.half()")
def _(w: Workshop) -> Any:
    module = w.start()
    module.half()
    return w.steps(module)


@habit("calls: share_memory, extra_repr, str(module)")
@_steps
def _(module: Any) -> Any:
    return "Linear" in str(module)


# --- precision and random numbers ---


@habit("precision: GradScaler")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for tokens, labels in w.batches():
        optimizer.zero_grad()
        loss = module(tokens, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@habit("precision: GradScaler that meets an infinite loss")
def _(w: Workshop) -> Any:
    module = w.start()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, (tokens, labels) in enumerate(w.batches()):
        optimizer.zero_grad()
        loss = module(tokens, labels) * (math.inf if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@habit("precision: calls under autocast(bfloat16)")
def _(w: Workshop) -> Any:
    module = w.start()
    with torch.autocast("cpu", torch.bfloat16):
        return module(*w.batch(0))


@habit("random numbers: torch.manual_seed before each step, no dropout")
def _(w: Workshop) -> Any:
    module = w.start()
    return w.steps(module, before=lambda: torch.manual_seed(5))


@habit("random numbers: the script's own draws go on as before")
def _(w: Workshop) -> Any:
    module = w.start()
    w.steps(module)
    return torch.rand(3)


class Counting(Gpt):
    """Counts its calls in a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        self.calls += 1
        return super().forward(tokens, labels)


class Running(Gpt):
    """Keeps a running mean of its activations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Alibi(Gpt):
    """A buffer that is not saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("slopes", torch.linspace(0.1, 1, WIDTH), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """The mean cross entropy."""
        x = self.embed(tokens) * self.slopes
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


for name, kind in {
    "a counter of calls": Counting,
    "a running mean of activations": Running,
    "one that is not saved": Alibi,
}.items():
    habit(f"buffers: {name}")(lambda w, kind=kind: w.steps(w.start(kind)))


@habit("buffers: one changed by the script")
def _(w: Workshop) -> Any:
    module = w.start(Alibi)
    losses = w.steps(module)
    with torch.no_grad():
        module.slopes.mul_(0.5)
    return [losses, w.steps(module)]


# --- habits of public scripts ---


class Compared(nn.Module):
    """Pictures of one channel that are flattened, two of which go through the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.down = nn.Linear(2 * WIDTH, 1)

    def forward(self, first: Tensor, second: Tensor) -> Any:
        """A number for each pair."""
        both = [self.norm(self.up(x.view(-1, 4 * WIDTH))).relu() for x in (first, second)]
        return self.down(torch.cat(both, 1))


def _pictures(number: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(number)
    return list(torch.randn((2, 8, 1, 4, WIDTH), generator=draw, dtype=torch.float64))


@habit("modes: pairs through one norm over batches, trained and evaluated")
def _(w: Workshop) -> Any:
    module = w.planned(w.model(Compared), *_pictures(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    told = []
    for number in range(3):
        module.train()
        optimizer.zero_grad()
        loss = module(*_pictures(number)).square().mean()
        loss.backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            told += [loss.detach(), module(*_pictures(9))]
    return told


@habit("states: torch.save of the whole module")
def _(w: Workshop) -> Any:
    module = w.start()
    losses = w.steps(module)
    torch.save(module, io.BytesIO())
    return losses
