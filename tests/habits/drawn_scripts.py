"""Scripts composed at random, as source text: how a drawn module is trained."""

from __future__ import annotations

from random import Random

from tests.habits.drawn_modules import indented

OPTIMIZERS = (
    "torch.optim.SGD({parameters}, lr=0.1)",
    "torch.optim.SGD({parameters}, lr=0.05, momentum=0.9)",
    "torch.optim.SGD({parameters}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "torch.optim.AdamW({parameters}, lr=1e-2)",
    "torch.optim.Adam({parameters}, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)",
)
PARAMETERS = (
    "module.parameters()",
    "module.parameters()",
    "[p for p in module.parameters() if p.requires_grad]",
    """[
    {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.0},
]""",
    """[
    {"params": list(module.head.parameters()), "lr": 0.05},
    {"params": [p for p in module.parameters() if p is not module.head.weight]},
]""",
)
PREPARED = (
    "for p in module.parameters():\n    if p.requires_grad:\n"
    "        p.register_hook(lambda g: g * 0.5)",
    "for p in module.layers.parameters():\n    p.requires_grad_(False)",
    "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)",
    "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)",
)
BEFORE_UPDATE = (
    "told.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5))",
    "nn.utils.clip_grad_value_(module.parameters(), 0.01)",
    "for p in module.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
)
AFTER_UPDATE = (
    "module.eval()\nwith torch.no_grad():\n    told.append(module(*batch(9)))\nmodule.train()",
    "module.load_state_dict(module.state_dict())",
    "optimizer.load_state_dict(optimizer.state_dict())",
    "told.append(loss.item())",
    "if step == 0:\n    for group in optimizer.param_groups:\n        group['lr'] *= 0.5",
)
CALLS = (
    "loss = module(*inputs)\nloss.backward()",
    "loss = module(*inputs)\nloss.backward()",
    "loss = module(tokens=inputs[0], labels=inputs[1])\nloss.backward()",
    "loss = 2 * module(*inputs)\nloss.backward()",
    "for part in range(2):\n    loss = module(*batch(2 * step + part)) / 2\n    loss.backward()",
    "with getattr(module, 'no_sync', nullcontext)():\n"
    "    (module(*batch(step + 5)) / 2).backward()\n"
    "loss = module(*inputs) / 2\nloss.backward()",
    "with torch.enable_grad():\n    loss = module(*inputs)\nloss.backward()",
)
BATCHES = (
    "inputs = batch(step)",
    "inputs = batch(step)",
    "inputs = batch(step)",
    "inputs = batch(step, B if step < 2 else B // 2)",
    "inputs = batch(step, B, S if step != 1 else 2 * S)",
)


def script_text(random: Random) -> str:
    """The source of `script`, which trains the module and returns what it has seen."""
    optimizer = random.choice(OPTIMIZERS).format(parameters=random.choice(PARAMETERS))
    prepared = random.choice([*PREPARED, *[""] * 6])
    body = [random.choice(BATCHES)]
    unset = random.choice(["", "", "set_to_none=False"])
    body += [f"optimizer.zero_grad({unset})", random.choice(CALLS)]
    if random.random() < 0.4:
        body.append(random.choice(BEFORE_UPDATE))
    body.append("optimizer.step()")
    if prepared.startswith("schedule"):
        body.append("schedule.step()")
    if random.random() < 0.4:
        body.append(random.choice(AFTER_UPDATE))
    body.append("told.append(loss.detach())")
    lines = "\n".join(body)
    return f"""
def script(w):
    told = []
    module = w.planned(w.model(Drawn), *batch(0))
    torch.manual_seed(1)
    optimizer = {indented(optimizer, 1).strip()}
{indented(prepared, 1)}
    for step in range(3):
{indented(lines)}
    return told
"""
