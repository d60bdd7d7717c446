"""Scripts that load, save or copy a module's state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.end_to_end.scripts.models import KINDS, batch, pictures
from tests.end_to_end.scripts.steps import (
    WEIGHT,
    adamw,
    buffers,
    sgd,
    step,
    steps,
    trained,
    weights,
)
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("weights")


def _given(kind: str = "language") -> dict[str, Tensor]:
    """A whole state dict, of another seed than a script's module has."""
    return KINDS[kind].made(seed=7).state_dict()


@SCRIPTS.script()
def load_whole_tensors(make: Make) -> Values:
    """As from a file that one device has written."""
    module = make()
    module.load_state_dict(_given())
    return trained(module)


@SCRIPTS.script()
def load_whole_tensors_between_steps(make: Make) -> Values:
    """The optimizer goes on with the parameters that it has."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    module.load_state_dict(_given())
    return losses | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script()
def load_its_own_state(make: Make) -> Values:
    """Back to where it was."""
    module = make()
    optimizer = adamw(module.parameters())
    saved = {name: value.detach().clone() for name, value in module.state_dict().items()}
    losses = steps(module, optimizer)
    module.load_state_dict(saved)
    return losses | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script()
def load_and_assign_whole_tensors(make: Make) -> Values:
    """The given tensors become the parameters."""
    module = make()
    module.load_state_dict(_given(), assign=True)
    return trained(module)


@SCRIPTS.script()
def load_and_assign_its_own_state(make: Make) -> Values:
    """Copies of its own parameters take their places."""
    module = make()
    module.load_state_dict(
        {name: value.detach().clone() for name, value in module.state_dict().items()}, assign=True
    )
    return trained(module)


@SCRIPTS.script(micro_batches="left out")
def load_and_assign_with_batch_norms(make: Make) -> Values:
    """The running statistics follow the steps all the same, those in the state dict too."""
    module = make("norms")
    module.load_state_dict(_given("norms"), assign=True)
    actual = trained(module, inputs=pictures)
    state = {
        f"{WEIGHT}state {name}": value.detach().clone()
        for name, value in module.state_dict().items()
        if "running" in name
    }
    return {**actual, **buffers(module), **state}


@SCRIPTS.script(micro_batches="left out")
def load_batch_norms(make: Make) -> Values:
    """The statistics of the state dict are those that evaluation uses."""
    module = make("norms")
    given = _given("norms")
    given.update(
        {name: torch.full_like(value, 1.5) for name, value in given.items() if "running" in name}
    )
    module.load_state_dict(given)
    module.eval()
    with torch.no_grad():
        loss = float(module(*pictures(1)))
    return {"evaluated": loss, **buffers(module)}


@SCRIPTS.script()
def load_with_missing_keys(make: Make) -> Values:
    """Refused as torch does where it is strict; taken where it is not, and told."""
    module = make()
    given = {name: value for name, value in _given().items() if not name.startswith("blocks.0")}
    try:
        module.load_state_dict(given)
        refused = 0.0
    except RuntimeError:
        refused = 1.0
    missing, unexpected = module.load_state_dict({**given, "other": torch.zeros(1)}, strict=False)
    return {
        "refused": refused,
        "missing": float("blocks.0.up.weight" in missing),
        "unexpected": float(unexpected == ["other"]),
    }


@SCRIPTS.script()
def load_a_wrong_shape(make: Make) -> Values:
    """Refused with torch's error, on every rank."""
    module = make()
    try:
        module.load_state_dict({**_given(), "head.weight": torch.zeros(3, 3, dtype=torch.float64)})
    except RuntimeError as error:
        return {"named": float("head.weight" in str(error))}
    return {"named": -1.0}


@SCRIPTS.script()
def names(make: Make) -> Values:
    """Parameters and state have the original's names, tied ones both."""
    results: dict[str, Tensor | float] = {}
    for kind in ("language", "tied", "frozen"):
        module = make(kind)
        results |= {
            f"{WEIGHT}{kind} parameter {name}": float(value.requires_grad)
            for name, value in module.named_parameters()
        }
        results |= {
            f"{WEIGHT}{kind} state {name}": float(value.dim())
            for name, value in module.state_dict().items()
        }
    return results


@SCRIPTS.script(micro_batches="left out")
def names_of_buffers(make: Make) -> Values:
    """With the buffers of batch norms."""
    return {
        f"{WEIGHT}{name}": float(value.dim()) for name, value in make("norms").state_dict().items()
    }


@SCRIPTS.script()
def a_whole_state_dict(make: Make) -> Values:
    """By torch's own call for it, after a step."""
    module = make()
    step(module, sgd(module.parameters()), batch())
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {f"{WEIGHT}{name}": value.detach().clone() for name, value in state.items()}


@SCRIPTS.script()
def an_optimizer_that_goes_on(make: Make) -> Values:
    """Its state is saved, and loaded into a new one."""
    module = make()
    first = adamw(module.parameters())
    losses = steps(module, first)
    second = adamw(module.parameters(), rate=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return losses | steps(module, second, start=2) | weights(module)


@SCRIPTS.script()
def deepcopy(make: Make) -> Values:
    """The copy and the original are trained apart."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    other = copy.deepcopy(module)
    losses |= steps(module, optimizer, start=2)
    mine = weights(module)
    others = {
        f"{name} of the copy": value
        for name, value in steps(other, sgd(other.parameters()), start=4).items()
    }
    return losses | others | mine | weights(other, "copy ")


@SCRIPTS.script()
def averaged_model(make: Make) -> Values:
    """torch's average of the weights, called for an evaluation."""
    module = make()
    optimizer = adamw(module.parameters())
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    results: dict[str, Tensor | float] = {}
    for number in range(3):
        results[f"loss {number}"] = step(module, optimizer, batch(number))
        average.update_parameters(module)
    average.eval()
    with torch.no_grad():
        results["evaluated"] = float(average(*batch(9)))
    return results | weights(module) | weights(average, "average ")


@SCRIPTS.script()
def average_by_hand(make: Make) -> Values:
    """Copies of the parameters that follow them, and take their places in the end."""
    module = make()
    optimizer = adamw(module.parameters())
    kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    losses: dict[str, Tensor | float] = {}
    for number in range(3):
        losses[f"loss {number}"] = step(module, optimizer, batch(number))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                kept[name].lerp_(parameter, 0.3)
    module.load_state_dict(kept, strict=False)
    return losses | weights(module)


@SCRIPTS.script(expected="either")
def a_module_on_the_meta_device(make: Make) -> Values:
    """Weights come when the module is made; the original takes memory first."""

    def emptied(module: nn.Module) -> Any:
        return module.to("meta")

    module = make(change=emptied)
    if next(module.parameters()).is_meta:
        module.to_empty(device="cpu")
    module.load_state_dict(_given())
    return trained(module)
