"""Scripts that switch between training and evaluation, and what they do with random numbers.

Random numbers are counters: of a seed, the step, the operator and the place in the whole tensor.
Where there are some, the reference is the model planned for one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.end_to_end.scripts.models import batch, pictures
from tests.end_to_end.scripts.steps import adamw, buffers, rank, steps, trained, weights
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("modes")


@SCRIPTS.script()
def evaluate_with_dropout(make: Make) -> Values:
    """No mask is drawn in evaluation."""
    module = make("dropout")
    module.eval()
    with torch.no_grad():
        return {f"loss {number}": float(module(*batch(number))) for number in range(2)}


@SCRIPTS.script()
def gradients_in_evaluation(make: Make) -> Values:
    """A model may be trained with its dropout switched off."""
    module = make("dropout")
    module.eval()
    return trained(module)


@SCRIPTS.script(reference="one rank")
def train_with_dropout(make: Make) -> Values:
    """The masks are those of one rank."""
    torch.manual_seed(3)
    return trained(make("dropout"))


@SCRIPTS.script(reference="one rank")
def train_evaluate_train_with_dropout(make: Make) -> Values:
    """The masks after an evaluation are those of one rank, too."""
    torch.manual_seed(3)
    module = make("dropout")
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    module.eval()
    with torch.no_grad():
        evaluated = float(module(*batch(9)))
    module.train()
    return losses | {"evaluated": evaluated} | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script(reference="one rank")
def seeds_repeat_masks(make: Make) -> Values:
    """The same seed gives the same masks, another seed others; masks differ between calls."""
    module = make("dropout")

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        with torch.no_grad():
            return [float(module(*batch())) for _ in range(2)]

    first = losses(1)
    again = losses(1)
    other = losses(2)
    return {
        "again": float(first == again),
        "other": float(first[0] == other[0]),
        "call": float(first[0] == first[1]),
    }


@SCRIPTS.script()
def seeds_that_differ(make: Make) -> Values:
    """Without anything random in the model."""
    torch.manual_seed(rank())
    return trained(make())


@SCRIPTS.script(reference="one rank", expected="either")
def seeds_that_differ_with_dropout(make: Make) -> Values:
    """Rank 0's seed is used, or the others are refused."""
    torch.manual_seed(3 + rank())
    return trained(make("dropout"))


@SCRIPTS.script(reference="one rank", expected="either")
def seeds_that_differ_after_it_is_made(make: Make) -> Values:
    """As many scripts seed their data."""
    torch.manual_seed(3)
    module = make("dropout")
    torch.manual_seed(11 + rank())
    return trained(module)


@SCRIPTS.script(reference="one rank")
def a_number_drawn_on_one_rank(make: Make) -> Values:
    """Rank 0 draws for itself between the steps, as a logger does."""
    torch.manual_seed(3)
    module = make("dropout")
    optimizer = adamw(module.parameters())
    losses: dict[str, Tensor | float] = {}
    for number in range(3):
        losses |= steps(module, optimizer, start=number, count=1)
        if rank() == 0:
            torch.rand(1)
    return losses | weights(module)


@SCRIPTS.script(reference="one rank")
def a_generator_that_goes_on(make: Make) -> Values:
    """After steps with dropout, numbers that the script draws itself are the same on every rank."""
    torch.manual_seed(3)
    trained(make("dropout"))
    return {"drawn": torch.rand(3)}


@SCRIPTS.script(micro_batches="left out")
def train_batch_norms(make: Make) -> Values:
    """Statistics of the whole batch, and running ones in the buffers."""
    module = make("norms")
    return {**trained(module, inputs=pictures), **buffers(module)}


@SCRIPTS.script(micro_batches="left out")
def evaluate_batch_norms(make: Make) -> Values:
    """By the running statistics, which stay as they are."""
    module = make("norms")
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer, inputs=pictures)
    module.eval()
    with torch.no_grad():
        losses["evaluated"] = float(module(*pictures(9)))
    return losses | buffers(module)


@SCRIPTS.script(micro_batches="left out")
def train_evaluate_train_batch_norms(make: Make) -> Values:
    """Training goes on where it was."""
    module = make("norms")
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer, inputs=pictures)
    module.train(False)
    with torch.inference_mode():
        losses["evaluated"] = float(module(*pictures(9)))
    module.train()
    return (
        losses
        | steps(module, optimizer, start=2, inputs=pictures)
        | buffers(module)
        | weights(module)
    )


@SCRIPTS.script(micro_batches="left out")
def gradients_in_evaluation_of_batch_norms(make: Make) -> Values:
    """A model is tuned with its statistics fixed."""
    module = make("norms")
    module.eval()
    return {**trained(module, inputs=pictures), **buffers(module)}


@SCRIPTS.script(micro_batches="left out")
def statistics_without_gradients(make: Make) -> Values:
    """In training mode under `no_grad` the running statistics move, as for one device."""
    module = make("norms")
    with torch.no_grad():
        losses = {f"loss {number}": float(module(*pictures(number))) for number in range(2)}
    return {**losses, **buffers(module)}


@SCRIPTS.script()
def evaluate_without_gradients(make: Make) -> Values:
    """Between steps, by `no_grad` and by `inference_mode`."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    with torch.no_grad():
        losses["no_grad"] = float(module(*batch(8)))
    with torch.inference_mode():
        losses["inference_mode"] = float(module(*batch(8)))
    return losses | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script()
def the_flag_of_the_mode(make: Make) -> Values:
    """`training`, of the module and of its parts."""
    module = make()
    result: dict[str, Tensor | float] = {"made": float(module.training)}
    module.eval()
    result["evaluating"] = float(any(part.training for part in module.modules()))
    module.train()
    return result | {"training": float(all(part.training for part in module.modules()))}
