"""Modules composed at random, as source text: trees of layers that people use, with a loss.

A piece is what it adds to a module's `__init__` and to its `forward`, where `x` is of the shape
batch, sequence, width; `@` stands for the piece's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Piece = tuple[str, str]
"""Lines of `__init__` and lines of `forward`."""
LAYERS: dict[str, Piece] = {
    "linear": ("self.a@ = nn.Linear(W, W)", "x = torch.tanh(self.a@(x))"),
    "linear, relu_": ("self.a@ = nn.Linear(W, W)", "x = self.a@(x).relu_()"),
    "layer norm": ("self.a@ = nn.LayerNorm(W)", "x = self.a@(x)"),
    "rms norm": (
        "self.a@ = nn.Parameter(torch.ones(W))",
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.a@",
    ),
    "batch norm": ("self.a@ = nn.BatchNorm1d(W)", "x = self.a@(x.transpose(1, 2)).transpose(1, 2)"),
    "batch norm of rows": (
        "self.a@ = nn.BatchNorm1d(W)",
        "x = self.a@(x.flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[1]))",
    ),
    "attention, batch first": (
        "self.a@ = nn.MultiheadAttention(W, 2, bias=False, batch_first=True)",
        "x = x + self.a@(x, x, x, need_weights=False)[0]",
    ),
    "attention, time first": (
        "self.a@ = nn.MultiheadAttention(W, 2, bias=False)",
        "t@ = x.transpose(0, 1)\nx = x + self.a@(t@, t@, t@)[0].transpose(0, 1)",
    ),
    "attention, fused": (
        "self.a@ = nn.Linear(W, 3 * W, bias=False)\nself.b@ = nn.Linear(W, W)",
        "q@, k@, v@ = (\n    y.unflatten(2, (2, W // 2)).transpose(1, 2)"
        " for y in self.a@(x).chunk(3, -1)\n)\n"
        "y@ = functional.scaled_dot_product_attention(q@, k@, v@, is_causal=True)\n"
        "x = x + self.b@(y@.transpose(1, 2).flatten(2))",
    ),
    "attention, written out": (
        "self.a@ = nn.Linear(W, W)\nself.b@ = nn.Linear(W, W)",
        "s@ = torch.matmul(self.a@(x), self.b@(x).transpose(1, 2))\n"
        "m@ = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)\n"
        "s@ = s@.masked_fill_(m@, -1e9).softmax(-1)\nx = x + torch.matmul(s@, x)",
    ),
    "convolution": (
        "self.a@ = nn.Conv1d(W, W, 3, padding=1)",
        "x = x + torch.tanh(self.a@(x.transpose(1, 2))).transpose(1, 2)",
    ),
    "gru cell": (
        "self.a@ = nn.GRUCell(W, W)",
        "h@ = x.new_zeros(x.shape[0], W)\nr@ = []\nfor t in range(x.shape[1]):\n"
        "    h@ = self.a@(x[:, t], h@)\n    r@.append(h@)\nx = torch.stack(r@, 1)",
    ),
    "lstm cell, time first": (
        "self.a@ = nn.LSTMCell(W, W)",
        "h@ = c@ = torch.zeros_like(x[:, 0])\nr@ = []\nfor y@ in x.transpose(0, 1):\n"
        "    h@, c@ = self.a@(y@, (h@, c@))\n    r@.append(h@)\n"
        "x = torch.stack(r@).transpose(0, 1)",
    ),
    "gated mlp": (
        "self.a@ = nn.Linear(W, 2 * W)\nself.b@ = nn.Linear(W, 2 * W)\n"
        "self.c@ = nn.Linear(2 * W, W)",
        "x = x + self.c@(functional.silu(self.a@(x)) * self.b@(x))",
    ),
    "gated mlp in one": (
        "self.a@ = nn.Linear(W, 4 * W)\nself.c@ = nn.Linear(2 * W, W)",
        "g@, u@ = self.a@(x).chunk(2, -1)\nx = x + self.c@(functional.gelu(g@) * u@)",
    ),
    "two experts": (
        "self.a@ = nn.Linear(W, 2)\nself.b@ = nn.Linear(W, W)\nself.c@ = nn.Linear(W, W)",
        "p@ = self.a@(x).softmax(-1)\n"
        "x = p@[..., :1] * self.b@(x) + p@[..., 1:] * torch.tanh(self.c@(x))",
    ),
    "dropout off": ("self.a@ = nn.Dropout(0.0)", "x = self.a@(x)"),
    "dropout": ("self.a@ = nn.Dropout(0.2)", "x = self.a@(x)"),
    "tied": (
        "self.a@ = nn.Linear(W, W)\nself.b@ = nn.Linear(W, W)\nself.b@.weight = self.a@.weight",
        "x = x + self.b@(torch.tanh(self.a@(x)))",
    ),
    "twice": ("self.a@ = nn.Linear(W, W)", "x = self.a@(torch.tanh(self.a@(x)))"),
    "frozen": ("self.a@ = nn.Linear(W, W).requires_grad_(False)", "x = x + self.a@(x)"),
    "frozen bias": (
        "self.a@ = nn.Linear(W, W)\nself.a@.bias.requires_grad_(False)",
        "x = torch.tanh(self.a@(x))",
    ),
    "a buffer of means": (
        'self.register_buffer("m@", torch.zeros(W))',
        "if self.training:\n    with torch.no_grad():\n"
        "        self.m@.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)\nx = x - self.m@",
    ),
    "a buffer that counts": (
        'self.register_buffer("m@", torch.zeros(()))',
        "self.m@ += 1\nx = x * 1.5",
    ),
    "+=": ("self.a@ = nn.Linear(W, W)", "y@ = self.a@(x)\ny@ += x\nx = y@"),
    "pow_": ("self.a@ = nn.Linear(W, W)", "y@ = self.a@(x)\ny@.pow_(2)\nx = x + y@"),
    "**=": ("self.a@ = nn.Linear(W, W)", "y@ = self.a@(x)\ny@ **= 2\nx = x + y@"),
    "clamp_": ("self.a@ = nn.Linear(W, W)", "x = 1.5 * self.a@(x).clamp_(-2, 2)"),
    "a written place": ("self.a@ = nn.Linear(W, W)", "y@ = self.a@(x)\ny@[:, 0] = 0.5\nx = x + y@"),
    "a written row of time": (
        "self.a@ = nn.Linear(W, W)",
        "y@ = torch.zeros_like(x)\nfor t in range(x.shape[1]):\n"
        "    y@[:, t] = torch.tanh(self.a@(x[:, t]))\nx = x + y@",
    ),
    "a scale without gradients": (
        "self.a@ = nn.Linear(W, W)",
        "x = self.a@(x)\nwith torch.no_grad():\n"
        "    s@ = x.abs().amax(-1, keepdim=True).clamp(min=0.5)\nx = x / s@",
    ),
    "a cast without gradients": (
        "self.a@ = nn.Linear(W, W)",
        "x = torch.tanh(self.a@(x))\nwith torch.no_grad():\n    y@ = x.double()\n"
        "    s@ = y@.mean(-1, keepdim=True)\nx = x - s@",
    ),
    "detached": ("self.a@ = nn.Linear(W, W)", "x = self.a@(x) + 0.5 * x.detach()"),
    "halves": (
        "self.a@ = nn.Linear(W, W)",
        "p@, q@ = x.chunk(2, 1)\nx = torch.cat([q@, self.a@(p@)], 1)",
    ),
    "the first place": ("self.a@ = nn.Linear(W, W)", "x = x + self.a@(x[:, 0]).unsqueeze(1)"),
    "flat rows": (
        "self.a@ = nn.Linear(W, W)",
        "x = torch.tanh(self.a@(x.flatten(0, 1))).view(x.shape[0], x.shape[1], W)",
    ),
    "flat rows by -1": (
        "self.a@ = nn.Linear(W, W)",
        "x = torch.tanh(self.a@(x.reshape(-1, W))).reshape(-1, x.shape[1], W)",
    ),
    "time first": (
        "self.a@ = nn.Linear(W, W)",
        "x = torch.tanh(self.a@(x.transpose(0, 1).contiguous())).transpose(0, 1)",
    ),
    "flat rows, time first": (
        "self.a@ = nn.Linear(W, W)",
        "y@ = x.transpose(0, 1).reshape(-1, W)\n"
        "x = torch.tanh(self.a@(y@)).reshape(x.shape[1], -1, W).transpose(0, 1)",
    ),
    "a mean over time": ("self.a@ = nn.Linear(W, W)", "x = x + self.a@(x.mean(1, keepdim=True))"),
    "a running sum": ("self.a@ = nn.Linear(W, W)", "x = torch.tanh(self.a@(x.cumsum(1)))"),
    "rolled": ("self.a@ = nn.Linear(W, W)", "x = x + self.a@(x.roll(1, 1))"),
    "flipped": ("self.a@ = nn.Linear(W, W)", "x = x + self.a@(x.flip(1))"),
    "sorted": ("self.a@ = nn.Linear(W, W)", "x = x + self.a@(x.sort(-1).values)"),
    "einsum": (
        "self.a@ = nn.Parameter(torch.eye(W) + 0.1)",
        'x = torch.tanh(torch.einsum("bsw,wv->bsv", x, self.a@))',
    ),
    "positions": ("self.a@ = nn.Embedding(2 * S, W)", "x = x + self.a@(torch.arange(x.shape[1]))"),
    "a config": (
        "self.config@ = SimpleNamespace(scale=0.5)\nself.a@ = nn.Linear(W, W)",
        "x = x + self.config@.scale * self.a@(x)",
    ),
    "a dict": (
        'self.options@ = {"scale": 0.5, "names": ["a", "b"]}\nself.a@ = nn.Linear(W, W)',
        'x = x + self.options@["scale"] * self.a@(x)',
    ),
    "a counter": ("self.calls@ = 0\nself.a@ = nn.Linear(W, W)", "self.calls@ += 1\nx = self.a@(x)"),
    "a sequential": (
        "self.a@ = nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True), nn.Linear(W, W))",
        "x = x + self.a@(x)",
    ),
    "recomputed": (
        "self.a@ = nn.Sequential(nn.Linear(W, 2 * W), nn.Tanh(), nn.Linear(2 * W, W))",
        "x = x + checkpoint(self.a@, x, use_reentrant=False)",
    ),
}
LOSSES: dict[str, str] = {
    "cross entropy": "loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())",
    "of transposed scores": "loss = functional.cross_entropy(scores.transpose(1, 2), labels)",
    "ignored labels": "loss = functional.cross_entropy(\n"
    "    scores.flatten(0, 1), labels.flatten(), ignore_index=0\n)",
    "label smoothing": "loss = functional.cross_entropy(\n"
    "    scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1\n)",
    "weighted samples": "each = functional.cross_entropy(scores.transpose(1, 2), labels, "
    'reduction="none")\n'
    "loss = (each.mean(1) * (1 + 0.1 * labels[:, 0])).mean()",
    "masked": 'each = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")\n'
    "mask = (labels > 2).to(each.dtype)\nloss = (each * mask).sum() / mask.sum()",
    "a sum by size": "loss = functional.cross_entropy(\n"
    '    scores.flatten(0, 1), labels.flatten(), reduction="sum"\n) / labels.numel()',
    "squares": "loss = functional.mse_loss(scores, functional.one_hot(labels, V).to(scores.dtype))",
    "log softmax": "loss = -scores.log_softmax(-1).gather(2, labels.unsqueeze(2)).mean()",
    "the last place": "loss = functional.cross_entropy(scores[:, -1], labels[:, -1])",
    "shifted": "loss = functional.cross_entropy(\n"
    "    scores[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1)\n)",
}
TERMS: dict[str, str] = {
    "a constant": "loss = loss + 0.5",
    "a begun sum": "loss = sum([loss, 0.1 * scores.pow(2).mean()])",
    "a weighted mean": "loss = 0.7 * loss + 0.3 * x.abs().mean()",
    "z loss": "loss = loss + 1e-2 * scores.logsumexp(-1).pow(2).mean()",
    "a penalty on weights": "loss = loss + 1e-2 * self.head.weight.pow(2).sum()",
    "from zero": "loss = 0.0 + loss",
    "flooded": "loss = (loss - 0.1) + 0.1",
}


@dataclass(slots=True)
class Composer:
    """Draws pieces and numbers them."""

    random: Random
    numbered: int = 0

    def layer(self) -> Piece:
        """One layer of the table."""
        self.numbered += 1
        setting, text = LAYERS[self.random.choice(list(LAYERS))]
        return setting.replace("@", str(self.numbered)), text.replace("@", str(self.numbered))

    def tree(self, depth: int) -> Piece:
        """Layers one after the other, beside each other, or around a residual."""
        form = self.random.choice(["layer", "chain", "chain", "residual", "beside"])
        if depth == 0 or form == "layer":
            return self.layer()
        first = self.tree(depth - 1)
        self.numbered += 1
        kept = f"x{self.numbered}"
        if form == "residual":
            return first[0], f"{kept} = x\n{first[1]}\nx = {kept} + x"
        second = self.tree(depth - 1)
        setting = f"{first[0]}\n{second[0]}"
        if form == "chain":
            return setting, f"{first[1]}\n{second[1]}"
        return setting, (
            f"{kept} = x\n{first[1]}\n{kept}, x = x, {kept}\n{second[1]}\nx = 0.5 * ({kept} + x)"
        )


def indented(text: str, depth: int = 2) -> str:
    """The lines of a body."""
    return "\n".join("    " * depth + line for line in text.splitlines())


def module_text(random: Random) -> str:
    """The source of `Layer` and `Drawn`, which takes tokens and labels and returns its loss."""
    composer = Composer(random)
    inner = composer.tree(2)
    outer = composer.tree(1)
    head = "self.head = nn.Linear(W, V, bias=False)"
    if random.random() < 0.2:
        head += "\nself.head.weight = self.embed.weight"
    loss = LOSSES[random.choice(list(LOSSES))]
    for term in random.sample(list(TERMS), random.choice([0, 0, 0, 1, 1, 2])):
        loss += "\n" + TERMS[term]
    layers = random.choice([1, 2, 2, 3])
    return f"""
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
{indented(inner[0])}

    def forward(self, x):
{indented(inner[1])}
        return x


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, W)
        self.layers = nn.ModuleList(Layer() for _ in range({layers}))
{indented(outer[0])}
{indented(head)}

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
{indented(outer[1])}
        scores = self.head(x)
{indented(loss)}
        return loss
"""
