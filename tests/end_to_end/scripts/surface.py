"""Scripts that look at a module from outside: its outputs, its parts, its hooks, other arguments,
other sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.end_to_end.scripts.models import batch, mask
from tests.end_to_end.scripts.steps import adamw, gradients, sgd, step, steps, trained, weights
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("surface")


@SCRIPTS.script(micro_batches="refused")
def a_loss_of_the_outputs(make: Make) -> Values:
    """Made outside of the module; in micro-batches no gradient leads from whole outputs back."""
    module = make("scores")
    optimizer = adamw(module.parameters())
    results: dict[str, Tensor | float] = {}
    for number in range(2):
        tokens, targets = batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        results[f"loss {number}"] = float(loss.detach())
    return results | weights(module)


@SCRIPTS.script(micro_batches="refused")
def two_losses_of_the_outputs(make: Make) -> Values:
    """Two losses of one forward pass, with a backward pass each."""
    module = make("scores")
    tokens, targets = batch()
    scores = module(tokens)
    F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward(retain_graph=True)
    scores.square().mean().backward()
    return gradients(module)


@SCRIPTS.script()
def outputs_without_gradients(make: Make) -> Values:
    """Whole scores on every rank."""
    module = make("scores")
    with torch.no_grad():
        return {"scores": module(batch()[0]).clone()}


@SCRIPTS.script()
def the_config(make: Make) -> Values:
    """The attributes that libraries read off a model."""
    module: Any = make()
    return {"layers": float(module.config.layers), "dropout": float(module.config.dropout)}


@SCRIPTS.script(micro_batches="left out")
def parts_by_name(make: Make) -> Values:
    """Submodules, their number and their parameters."""
    module: Any = make()
    result = {
        "layers": float(len(module.blocks)),
        "block": float(module.blocks[0] is next(iter(module.blocks))),
    }
    for name in ("blocks.1.up", "head"):
        part = module.get_submodule(name)
        result[f"{name} parameters"] = float(sum(1 for _ in part.parameters()))
    return result | {
        "last": float(module.blocks[-1] is module.blocks[1]),
        "rows": float(module.head.weight.shape[0]),
    }


@SCRIPTS.script(micro_batches="left out")
def number_of_parameters(make: Make) -> Values:
    """As scripts print it."""
    return {"elements": float(sum(p.numel() for p in make().parameters()))}


@SCRIPTS.script()
def hooks_of_the_module(make: Make) -> Values:
    """Before and after a forward pass, with the arguments and the output of the original."""
    module = make()
    results: dict[str, Tensor | float] = {}

    def before(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        results["given"] = float(len(given))

    def after(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        results["output"] = float(output.detach())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return dict(trained(module)) | results


@SCRIPTS.script()
def a_hook_that_changes_the_loss(make: Make) -> Values:
    """The value that the hook returns is the one that the caller gets."""
    module = make()
    module.register_forward_hook(lambda _, __, output: 2.0 * output)
    return trained(module, optimizer=sgd)


@SCRIPTS.script(expected="either")
def a_hook_in_the_middle(make: Make) -> Values:
    """On a layer: it fires, or is refused; that it stays silent is no answer."""
    module: Any = make()
    seen: list[float] = []
    module.blocks[0].register_forward_hook(lambda *_: seen.append(1.0))
    step(module, sgd(module.parameters()), batch())
    return {"fired": float(len(seen) > 0)}


@SCRIPTS.script()
def a_module_inside_another(make: Make) -> Values:
    """As libraries wrap what they train."""

    class Wrapped(nn.Module):
        """Scales the loss by a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, *given: Tensor) -> Tensor:
            """The scaled loss."""
            loss: Tensor = self.scale * self.inner(*given)
            return loss

    return trained(Wrapped(), optimizer=sgd)


@SCRIPTS.script(expected="either")
def an_optional_argument(make: Make) -> Values:
    """A mask, where the plan was made without one."""
    module = make()
    loss = module(*batch(), mask())
    loss.backward()
    return {"loss": float(loss.detach())} | gradients(module)


@SCRIPTS.script()
def an_optional_argument_left_out_in_words(make: Make) -> Values:
    """`mask=None`, as it was planned."""
    loss = make()(*batch(), mask=None)
    return {"loss": float(loss.detach())}


@SCRIPTS.script(expected="either")
def another_batch_size(make: Make) -> Values:
    """Half the batch and then the whole one again."""
    module = make()
    optimizer = adamw(module.parameters())
    losses: dict[str, Tensor | float] = {"half": step(module, optimizer, batch(0, size=4))}
    return losses | steps(module, optimizer, start=1) | weights(module)


@SCRIPTS.script(expected="either")
def a_last_batch_of_odd_size(make: Make) -> Values:
    """The rest of the data, which no two ranks can share."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    return losses | {"rest": step(module, optimizer, batch(2, size=3))} | weights(module)


@SCRIPTS.script(expected="either")
def another_batch_size_in_evaluation(make: Make) -> Values:
    """A larger one, without gradients."""
    module = make()
    module.eval()
    with torch.no_grad():
        return {"loss": float(module(*batch(0, size=16)))}


@SCRIPTS.script(expected="either")
def generate(make: Make) -> Values:
    """The model's own method, which calls it with longer and longer sequences."""
    module: Any = make("scores")
    with torch.no_grad():
        return {"tokens": module.generate(batch()[0], 2).double()}


@SCRIPTS.script(expected="either", slow=True)
def compiled(make: Make) -> Values:
    """By `torch.compile`, as far as it goes."""
    return trained(torch.compile(make(), backend="eager"))  # type: ignore[arg-type]


@SCRIPTS.script(slow=True)
def compiled_optimizer(make: Make) -> Values:
    """The optimizer's step alone is compiled."""
    module = make()
    optimizer = sgd(module.parameters())
    update = torch.compile(optimizer.step, backend="eager")
    module(*batch()).backward()
    update()
    return weights(module)


@SCRIPTS.script()
def the_text_of_a_module(make: Make) -> Values:
    """It can be printed."""
    return {"written": float("blocks" in repr(make()))}
