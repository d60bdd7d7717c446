"""Random numbers that a script draws on DTensors: those of one device, each rank keeping its part.

Torch lets every rank of a mesh of CPUs fill its own part, so that all shards get the same numbers.
Here each rank draws the whole value from its generator, which all ranks must have at one place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar.errors import PlanError
from autopar.runtime.random_numbers.generator_states import random_state
from autopar.runtime.ranks.agreement import digest
from autopar.runtime.ranks.current_action import aside
from autopar.runtime.stand_ins import Elsewhere

ATEN = torch.ops.aten
_FILLING = (
    "cauchy_ exponential_ geometric_ log_normal_ normal_ rand_like randint_like randn_like random_ "
    "uniform_"
)
"""Operators that read nothing of the tensor but its shape and type."""
_READING = (
    "_fused_dropout _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial multinomial "
    "native_dropout normal normal_functional poisson rrelu_with_noise rrelu_with_noise_ "
    "rrelu_with_noise_functional"
)


def draw_whole_values() -> None:
    """Let DTensors be filled as on one device, in this process from now on."""
    handlers = cast(dict[Any, Any], DTensor._op_dispatcher._custom_op_handlers)
    for name in (_FILLING + " " + _READING).split():
        packet = getattr(ATEN, name)
        for overload in packet.overloads():
            handlers[getattr(packet, overload)] = _drawn
    # Some of these look at what they have drawn, and draw again.
    for name, fill in list(vars(nn.init).items()):
        if name.endswith("_") and callable(fill) and not name.startswith("_"):
            setattr(nn.init, name, _of_whole_values(fill))


@contextmanager
def torchs_own_draws() -> Iterator[None]:
    """Within it DTensors are filled as torch does, for code that is to run so without us."""
    handlers = cast(dict[Any, Any], DTensor._op_dispatcher._custom_op_handlers)
    ours = {target: draw for target, draw in handlers.items() if draw is _drawn}
    for target in ours:
        del handlers[target]
    try:
        yield
    finally:
        handlers.update(ours)


def _of_whole_values(fill: Callable[..., Any]) -> Callable[..., Any]:
    """One of torch's initializations, which fills a DTensor as on one device."""

    @functools.wraps(fill)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, (DTensor, Elsewhere)):
            return fill(tensor, *args, **kwargs)
        whole = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if isinstance(tensor, Elsewhere):
            # Drawn all the same, so that generators go on as those of the holders do.
            fill(whole, *args, **kwargs)
            tensor.figures.values = None
            return tensor
        _require_one_place(tensor, kwargs.get("generator"))
        _part(fill(whole, *args, **kwargs), {id(whole): tensor}, tensor)
        return tensor

    return filled


def _drawn(draw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random operator of which some arguments are DTensors."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    first = given[0]
    _require_one_place(first, kwargs.get("generator"))
    reads = draw.overloadpacket.__name__ not in _FILLING.split()
    wholes = {id(value): _whole(value, reads) for value in given}
    called = pytree.tree_map_only(DTensor, lambda value: wholes[id(value)], (args, kwargs))
    made = draw(*called[0], **called[1])
    owners = {id(wholes[id(value)]): value for value in given}
    return pytree.tree_map_only(Tensor, lambda whole: _part(whole, owners, first), made)


def _whole(value: DTensor, reads: bool) -> Tensor:
    """A tensor to draw into, with the values of a DTensor where the operator `reads` them."""
    local = value._local_tensor
    if reads:
        return value.full_tensor().detach()
    return torch.empty_strided(value.shape, value.stride(), dtype=local.dtype, device=local.device)


def _part(whole: Tensor, owners: dict[int, DTensor], first: DTensor) -> DTensor:
    """This rank's part of a whole result: in its own DTensor, or a new one like `first`."""
    owner = owners.get(id(whole))
    like = owner if owner is not None else first
    alike = whole.shape == like.shape
    mesh = like.device_mesh
    same = [Replicate()] * mesh.ndim
    if any(placement.is_partial() for placement in like.placements):
        raise PlanError(
            "random numbers cannot be drawn on a tensor whose parts are sums: call "
            ".redistribute(placements=...) with Shard or Replicate before"
        )
    made = DTensor.from_local(whole, mesh, same, run_check=False)
    part = made.redistribute(placements=like.placements) if alike else made
    if owner is None:
        return part
    owner._local_tensor.copy_(part._local_tensor)
    return owner


def _require_one_place(value: DTensor, generator: torch.Generator | None) -> None:
    """Refuse a draw for which the generators of the mesh's ranks are not alike, on all of them."""
    mesh = value.device_mesh
    device = value._local_tensor.device
    if mesh.size() == 1 or device.type == "meta":
        return
    state = generator.get_state() if generator is not None else random_state(device)
    number = int.from_bytes(digest(state.numpy().tobytes())[:7], "big")
    extremes = torch.tensor([number, -number], device=device)
    with aside():
        for axis in range(mesh.ndim):
            # An axis of one rank has nobody to ask, and may have no group.
            if mesh.size(axis) > 1:
                dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if int(extremes.sum()):
        raise PlanError(
            "the ranks' random generators are not at one place, so that parts drawn here would not "
            "fit together: call torch.manual_seed with one number on every rank before it"
        )
