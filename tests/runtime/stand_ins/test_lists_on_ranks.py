"""Lists of parameters under pipeline stages mean what they mean on one device."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

from autopar.errors import PlanError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.stand_ins import Elsewhere
from tests.runtime.stand_ins.stage_runs import (
    PLANS,
    alone,
    batch,
    gradients,
    loss_of,
    network,
    on_ranks,
    require_alike,
    weights,
    whole,
)

pytestmark = pytest.mark.usefixtures("strict_collectives")


def _described(module: nn.Module) -> Any:
    """A model, as lists of its parameters tell it."""
    return [
        [
            (name, tuple(p.shape), p.dtype, p.device, p.requires_grad, p.numel(), p.is_leaf)
            for name, p in module.named_parameters()
        ],
        [tuple(p.shape) for p in module.twice.parameters()],  # type: ignore[operator,union-attr]
        sum(p.numel() for p in module.parameters() if p.requires_grad),
        [isinstance(p, nn.Parameter) for p in module.parameters()],
        module.get_parameter("last.bias").shape,
    ]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_rank_lists_the_whole_model(name: str, dtype: torch.dtype) -> None:
    wanted = alone(_described, dtype)
    for described in on_ranks(name, _described, dtype):
        assert sorted(described[0]) == sorted(wanted[0])
        assert described[1:3] == wanted[1:3] and described[3:] == wanted[3:]


def _some(module: Any, *words: str) -> list[nn.Parameter]:
    return [p for n, p in module.named_parameters() if any(word in n for word in words)]


CLIPS: dict[str, Callable[[Any], Any]] = {
    "all": lambda m: clip_grad_norm_(m.parameters(), 0.1),
    "one by one": lambda m: clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "named": lambda m: clip_grad_norm_(_some(m, "weight"), 0.1),
    "of two layers": lambda m: clip_grad_norm_(_some(m, "first", "twice"), 0.05),
    "a layer": lambda m: clip_grad_norm_(m.last.parameters(), 0.05),
    "by dimension": lambda m: clip_grad_norm_([p for p in m.parameters() if p.dim() < 2], 0.01),
    "largest element": lambda m: clip_grad_norm_(m.parameters(), 0.01, math.inf),
    "largest element of some": lambda m: clip_grad_norm_(_some(m, "bias"), 1e-3, math.inf),
    "1-norm": lambda m: clip_grad_norm_(m.parameters(), 0.1, 1.0),
    "1-norm, one by one": lambda m: clip_grad_norm_(m.parameters(), 0.1, 1.0, foreach=False),
    "3-norm of some": lambda m: clip_grad_norm_(_some(m, "weight"), 0.1, 3.0),
    "twice": lambda m: [clip_grad_norm_(m.parameters(), most) for most in (0.2, 0.1)],
    "by the module, then by torch": lambda m: (
        m.clip_grad_norm_(0.2)
        if isinstance(m, ParallelModule)
        else clip_grad_norm_(m.parameters(), 0.2),
        clip_grad_norm_(m.parameters(), 0.1),
    ),
    "values": lambda m: clip_grad_value_(m.parameters(), 1e-3) or 0,
    "norm by hand": lambda m: (
        sum(p.grad.detach().data.norm(2).item() ** 2 for p in m.parameters() if p.grad is not None)
        ** 0.5
    ),
}


# Torch reads no numbers of parts, also without stages. And where the other stage has all parameters
# of a list it takes part in no exchange.
LEFT_OUT = {
    "split parameters": ["norm by hand"],
    "interleaved": ["1-norm", "1-norm, one by one", "3-norm of some"],
}


def _clipped(left_out: Collection[str], module: Any) -> dict[str, Any]:
    """The norms that each way of clipping tells, and the gradients behind it."""
    results = {}
    for name in CLIPS.keys() - left_out:
        module.zero_grad()
        loss_of(module, batch()).backward()  # type: ignore[no-untyped-call]
        told = CLIPS[name](module)
        values = list(told) if isinstance(told, (list, tuple)) else [told]
        results[name] = ([whole(value) for value in values], gradients(module))
    return results


@pytest.mark.parametrize("name", PLANS)
def test_clipping_is_that_of_one_device(name: str) -> None:
    work = functools.partial(_clipped, LEFT_OUT.get(name, ()))
    wanted = alone(work)
    for clipped in on_ranks(name, work):
        assert clipped.keys() == wanted.keys()
        for clip, values in clipped.items():
            require_alike(values, wanted[clip])


def _present(module: Any) -> list[str]:
    loss_of(module, batch()).backward()  # type: ignore[no-untyped-call]
    return sorted(name for name, p in module.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_there_on_every_rank_or_on_none(name: str) -> None:
    wanted = alone(_present)
    assert "aside.weight" not in wanted and len(wanted) > 4
    assert on_ranks(name, _present) == [wanted] * PLANS[name][2]


def _one_norm(module: Any) -> str:
    loss_of(module, batch()).backward()  # type: ignore[no-untyped-call]
    try:
        clip_grad_norm_(module.parameters(), 0.1, 1.0)
    except PlanError as error:
        return str(error)
    return ""


def test_a_norm_that_another_stage_alone_can_make_is_refused_elsewhere() -> None:
    """The stage that has all parameters of the list does not notice that others lack some."""
    first, second = on_ranks("interleaved", _one_norm)
    assert not first and "stack with tensors of this rank" in second


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "one by one": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "one that reads numbers": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() < 2], "lr": 0.3},
        ],
        lr=0.1,
    ),
    "a part": lambda m: torch.optim.SGD(_some(m, "last"), lr=0.1),
    "all at once": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
}


def _trained(module: Any) -> dict[str, Any]:
    """The weights behind two steps of each optimizer."""
    results = {}
    for name, make in OPTIMIZERS.items():
        copied = copy.deepcopy(module)
        optimizer = make(copied)

        def closure(copied: Any = copied, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(copied, batch())
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(2):
            optimizer.step(closure)
        held = [p for p in optimizer.state if isinstance(p, Elsewhere)]
        assert name == "all at once" or not held, name
        results[name] = weights(copied)
    return results


@pytest.mark.parametrize("name", [name for name in PLANS if name != "split parameters"])
def test_optimizers_over_all_parameters_are_those_of_one_device(name: str) -> None:
    wanted = alone(_trained)
    for trained in on_ranks(name, _trained):
        for optimizer, values in trained.items():
            require_alike(values, wanted[optimizer])


def _values(module: Any) -> list[Any]:
    """Values of all weights that a script puts together, an average, and weights drawn anew."""
    with torch.no_grad():
        norms = torch.stack([p.norm(1) for p in module.parameters()])
        vector = parameters_to_vector([p for p in module.parameters() if p.requires_grad])
    averaged = copy.deepcopy(module)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            nn.init.normal_(p)
        for old, new in zip(averaged.parameters(), module.parameters(), strict=True):
            old.lerp_(new, 0.25)
        torch._foreach_mul_(list(averaged.parameters()), 2.0)
    return [norms.sum(), vector.norm(), weights(averaged), weights(module), torch.rand(2)]


@pytest.mark.parametrize("name", [name for name in PLANS if name != "split parameters"])
def test_values_of_all_weights_are_those_of_one_device(name: str) -> None:
    wanted = alone(_values)
    for values in on_ranks(name, _values):
        require_alike(values, wanted)


def _refused(module: Any) -> list[str]:
    """Why a script cannot have what needs values of other stages."""
    loss_of(module, batch()).backward()  # type: ignore[no-untyped-call]
    weight = module.get_parameter("last.weight")
    first = module.get_parameter("first.weight")
    for p in (weight, first):
        p.grad.sign_()

    def tied() -> None:
        other = copy.deepcopy(module)
        other.last.weight = other.first.weight
        loss_of(other, batch())

    attempts = [
        lambda: sum(p.square().sum() for p in module.parameters()).item(),  # type: ignore[attr-defined]
        lambda: float(clip_grad_norm_([weight, first], 1.0)),
        lambda: float((weight * first.sum()).sum()),
        tied,
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(PlanError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("name", ["two stages", "three stages"])
def test_what_needs_values_of_other_stages_is_refused_on_every_rank(name: str) -> None:
    for said in on_ranks(name, _refused):
        assert all("is a parameter of another pipeline stage" in text for text in said[:3])
        assert "was replaced, or tied" in said[3]


def _scaled(module: Any) -> list[Any]:
    """Steps that a gradient scaler skips: of the optimizer whose gradients are not finite."""
    optimizers = [torch.optim.SGD(_some(module, word), lr=0.1) for word in ("first", "last")]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    own = module.graph_parameters() if isinstance(module, ParallelModule) else None
    spoiled = dict(module.named_parameters()) if own is None else own
    if "last.bias" in spoiled:
        spoiled["last.bias"].register_hook(lambda gradient: gradient * math.nan)
    scaler.scale(loss_of(module, batch())).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), weights(module)]


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_skip_the_same_steps(name: str) -> None:
    wanted = alone(_scaled)
    assert wanted[0] == 4.0
    for scaled in on_ranks(name, _scaled):
        require_alike(scaled, wanted)


def _read(module: Any) -> list[Any]:
    """Gradients that are read, and not added to those of the parameters."""
    listed = [p for n, p in module.named_parameters() if "aside" not in n and p.requires_grad]
    given = torch.autograd.grad(loss_of(module, batch()), listed)
    assert all(g.shape == p.shape for g, p in zip(given, listed, strict=True))
    assert all(p.grad is None for p in module.parameters())
    unused = [p for n, p in module.named_parameters() if "aside" in n]
    some = torch.autograd.grad(loss_of(module, batch()), [*unused, *listed], allow_unused=True)
    assert [g is None for g in some] == [True] * 2 + [False] * len(listed)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss_of(module, batch()), [*listed, *unused])
    for p, gradient in zip(listed, given, strict=True):
        p.grad = gradient
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    return [weights(module)]


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_read_for_all_parameters(name: str) -> None:
    wanted = alone(_read)
    for read in on_ranks(name, _read):
        require_alike(read, wanted)


def _states(module: Any) -> tuple[list[str], list[str]]:
    """The names in state dicts, which load into the modules that they are of."""
    state = module.state_dict()
    own = {name for name, value in state.items() if not isinstance(value, Elsewhere)}
    assert own == set(module.graph_parameters())
    if own != set(state):
        with pytest.raises(PlanError, match=r"autopar\.save"):
            torch.save(state, io.BytesIO())
    part = module.twice.state_dict()
    assert set(part) <= {"weight", "bias"} and module.twice.load_state_dict(part, strict=True)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    before = {name: value.clone() for name, value in state.items()}
    module.load_state_dict(before, strict=True)
    for name in own:
        torch.testing.assert_close(whole(module.state_dict()[name]), whole(before[name]))
    copied = copy.deepcopy(module)
    copied.load_state_dict(before, assign=True)
    assert list(dict(copied.named_parameters())) == list(dict(module.named_parameters()))
    return sorted(state), sorted(name for name, _ in module.named_parameters())


@pytest.mark.parametrize("name", PLANS)
def test_state_dicts_name_every_parameter(name: str) -> None:
    for saved, every in on_ranks(name, _states):
        assert saved == every


def _in_torchs_checkpoint(folder: str, module: Any) -> None:
    """Write and read a distributed checkpoint of torch."""
    saved = {name: whole(value).clone() for name, value in module.graph_parameters().items()}
    checkpoint.save({"model": module.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    state = {"model": module.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    for name, value in module.graph_parameters().items():
        torch.testing.assert_close(whole(value), saved[name])


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["two stages", "three stages", "interleaved"])
def test_torchs_checkpoints_have_each_parameter_from_its_holders(name: str, tmp_path: Path) -> None:
    on_ranks(name, functools.partial(_in_torchs_checkpoint, str(tmp_path)))
    metadata = checkpoint.FileSystemReader(tmp_path).read_metadata()
    assert len(metadata.state_dict_metadata) == len(list(network(torch.float64).parameters()))


def _frozen(module: Any) -> dict[str, Any]:
    module.first.requires_grad_(False)
    loss_of(module, batch()).backward()  # type: ignore[no-untyped-call]
    present = sorted(n for n, p in module.named_parameters() if p.grad is not None)
    norm = whole(clip_grad_norm_(module.parameters(), 1.0))
    module.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    return {"present": present, "norm": norm}


@pytest.mark.parametrize("name", PLANS)
def test_frozen_parameters_have_no_gradient_anywhere(name: str) -> None:
    wanted = alone(_frozen)
    assert "first.weight" not in wanted["present"] and "last.weight" in wanted["present"]
    for frozen in on_ranks(name, _frozen):
        assert frozen["present"] == wanted["present"]
        require_alike(frozen["norm"], wanted["norm"])


def _rough(module: Any) -> list[Any]:
    dtype = module.get_parameter("first.weight").dtype
    loss_of(module, batch(dtype)).backward()  # type: ignore[no-untyped-call]
    norms = [clip_grad_norm_(module.parameters(), 1.0, kind) for kind in (2.0, math.inf, 1.0)]
    return [whole(norm).float() for norm in norms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_smaller_types(dtype: torch.dtype) -> None:
    wanted = alone(_rough, dtype)
    for rough in on_ranks("three stages", _rough, dtype):
        require_alike(rough, wanted, rtol=0.05 if dtype is torch.bfloat16 else 1e-5)
