"""Export of a module without its weights: `torch.export` on fake tensors, cast where another dtype is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..errors import ModelError
from ..forking import keep_forkable
from .torch_caches import without_caches

keep_forkable()  # before the first fake tensor


def export_fake(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> torch.export.ExportedProgram:
    """`torch.export` on fake tensors: real weights stay untouched, meta weights become fake CPU ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "meta":
            with mode:
                empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                return torch.nn.Parameter(empty, value.requires_grad) if isinstance(value, torch.nn.Parameter) else empty
        return mode.from_tensor(value, static_shapes=True)

    def wanted(value: torch.Tensor) -> Any:
        found = fake(value)
        if dtype in (None, value.dtype) or not value.is_floating_point():
            return found
        with mode:
            cast = found.detach().to(dtype)
            return torch.nn.Parameter(cast, value.requires_grad) if isinstance(value, torch.nn.Parameter) else cast

    state = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    originals = {id(value): value for value in state.values()}
    replaced = {key: wanted(value) for key, value in originals.items()}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    # A tensor given for two inputs stands for two tensors.
    apart = [leaf.clone() if isinstance(leaf, torch.Tensor) and first[id(leaf)] != i else leaf for i, leaf in enumerate(leaves)]
    inputs, keyword_inputs = pytree.tree_unflatten([fake(leaf) for leaf in apart], spec)
    try:
        fakes = {path: replaced[id(value)] for path, value in state.items()}
        with torch.nn.utils.stateless._reparametrize_module(module, fakes), without_caches(module):
            return torch.export.export(module, inputs, keyword_inputs, strict=False)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise ModelError(f"torch.export cannot capture {type(module).__name__}: {type(error).__name__}: {text}") from error
