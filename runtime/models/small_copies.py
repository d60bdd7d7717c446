"""Small copies of modules and calls: equal layers left out, few samples, short sequences."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import ModelError

HALVES = (torch.float16, torch.bfloat16)


def wider(value: torch.Tensor) -> torch.Tensor:
    """A value without a history; floats of 16 bits in 32."""
    return value.detach().float() if value.dtype in HALVES else value.detach()


def twin_of(module: nn.Module, *, wide: bool) -> nn.Module:
    """A copy of a module that shares its parameters' memory, and has buffers of its own.

    `wide`: floats of 16 bits are cast to 32, in which rounding hides less. Raises `ModelError` for
    what cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = wider(parameter) if wide else parameter.detach()
        memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = (wider(buffer) if wide else buffer.detach()).clone()
    for part in module.modules():
        # What older forms of `weight_norm` compute anew before each pass has a history.
        made = (value for value in vars(part).values() if isinstance(value, torch.Tensor))
        memo.update({id(value): value.detach().clone() for value in made if not value.is_leaf})
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:  # whatever a module holds that cannot be copied
        words = str(error).strip().split("\n")[0]
        raise ModelError(f"it cannot be copied: {type(error).__name__}: {words}") from error
    return twin


def leave_out_equal(
    module: nn.Module,
    reads: Mapping[str, frozenset[str]],
    keep: Collection[str] = (),
    *,
    each: int = 1,
) -> int:
    """Leave out layers of lists that are equal to `each` earlier ones; how many there were.

    The others keep their names. `reads`: the attributes that the code has read, by the parts'
    paths. `keep`: operators whose layers stay.
    """
    # The importer of torch brings in the compiler, which takes a second.
    from autopar.frontends.torch import equal_layers

    left_out = 0
    for path, part in list(module.named_modules()):
        if not isinstance(part, nn.ModuleList):
            continue
        remaining = list[nn.Module]()
        for name, layer in list(part.named_children()):
            place = f"{path}.{name}" if path else name
            wanted = any(each.startswith((f"{place}.", f"{place}/")) for each in keep)
            equal = sum(equal_layers(layer, other, place, reads) for other in remaining)
            if not wanted and equal >= each:
                left_out += 1
                del part._modules[name]
            else:
                remaining.append(layer)
    return left_out


def lengths_of(call: Any, above: int) -> frozenset[int]:
    """The lengths of sequences, second dims of inputs of integers, that are larger than `above`."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    integers = [leaf for leaf in tensors if not leaf.is_floating_point() and leaf.dim() == 2]
    return frozenset(leaf.shape[1] for leaf in integers if leaf.shape[1] > above)


def cut_call(call: Any, samples: int, length: int, lengths: frozenset[int]) -> Any:
    """A call with few samples, and with sequences of these `lengths` cut to `length`."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    batch = next((leaf.shape[0] for leaf in tensors if leaf.dim()), 0)

    def cut(value: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(value.shape):
            if size in lengths:
                value = value.narrow(dim, 0, length)
            elif dim == 0 and size == batch > samples:
                value = value.narrow(dim, 0, samples)
        return value

    return pytree.tree_map_only(torch.Tensor, cut, call)
