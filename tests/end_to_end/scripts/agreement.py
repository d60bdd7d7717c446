"""Scripts in which the ranks do not agree: all of them raise one and the same error, before or
instead of the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.end_to_end.scripts.models import batch
from tests.end_to_end.scripts.steps import adamw, rank, step, steps, trained
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("agreement")


@SCRIPTS.script(expected="refused")
def weights_that_differ(make: Make) -> Values:
    """Every rank has drawn its own."""
    return trained(make(seed=rank()))


@SCRIPTS.script(expected="refused")
def one_weight_that_differs(make: Make) -> Values:
    """One element of one parameter."""

    def change(module: nn.Module) -> None:
        with torch.no_grad():
            next(module.parameters()).view(-1)[0] += 1e-3 * rank()

    return trained(make(change=change))


@SCRIPTS.script(expected="refused", micro_batches="left out")
def buffers_that_differ(make: Make) -> Values:
    """The running mean of one batch norm."""
    from tests.end_to_end.scripts.models import pictures

    def change(module: nn.Module) -> None:
        module.get_submodule("layers.1").get_buffer("running_mean").add_(float(rank()))

    return trained(make("norms", change=change), inputs=pictures)


@SCRIPTS.script(expected="refused")
def batches_that_differ(make: Make) -> Values:
    """A sampler of every rank for itself, as data parallelism elsewhere wants it."""
    module = make()
    return {"loss": step(module, adamw(module.parameters()), batch(rank()))}


@SCRIPTS.script(expected="refused")
def a_later_batch_that_differs(make: Make) -> Values:
    """From the second step on."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    return losses | {"later": step(module, optimizer, batch(2 + rank()))}


@SCRIPTS.script(expected="refused")
def batches_of_sizes_that_differ(make: Make) -> Values:
    """One rank has the rest of the data."""
    module = make()
    return {"loss": step(module, adamw(module.parameters()), batch(0, size=8 - 2 * rank()))}


@SCRIPTS.script(expected="refused")
def models_that_differ(make: Make) -> Values:
    """One rank has a wider head."""

    def change(module: nn.Module) -> None:
        if rank():
            module.norm = nn.LayerNorm(16, eps=0.5).double()
            module.head = nn.Linear(16, 25, bias=False).double()

    return trained(make(change=change))


@SCRIPTS.script(expected="refused")
def plans_that_differ(make: Make) -> Values:
    """Rank 1 has read another file."""
    return trained(make("language, another plan on rank 1"))


@SCRIPTS.script()
def ranks_that_agree_after_all(make: Make) -> Values:
    """The same module made twice: agreeing leaves nothing behind."""
    first: dict[str, Tensor | float] = {
        f"first {name}": value for name, value in trained(make()).items() if name.startswith("loss")
    }
    return first | dict(trained(make()))
