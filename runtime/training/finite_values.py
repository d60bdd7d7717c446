"""The look at values before they are saved: a checkpoint of NaN or infinity is of no use."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.storage import local_of

from .latest import latest_in
from .module_state import parameters_of


def require_finite(module: nn.Module, folder: Path, step: int) -> None:
    """Raise a `RunError` where this rank's share of what steps change is not finite."""
    values = {name: held for name, held in parameters_of(module).items() if held.requires_grad}
    # Buffers that no step changes may hold what they like, masks of -inf for example.
    if isinstance(module, ParallelModule):
        values |= {name: module._constant(name) for name in module.engine.graph.updates}
    floats = {
        name: local
        for name, value in values.items()
        # Numbers of eight bits have no comparison in torch.
        if (local := local_of(value.detach())).is_floating_point()
        and local.numel()
        and local.itemsize > 1
    }
    if not floats:
        return
    # The host reads a device once.
    finite = torch.stack([torch.stack(v.aminmax()).isfinite().all() for v in floats.values()])
    bad = [name for name, good in zip(floats, finite.tolist(), strict=True) if not good]
    if bad:
        latest = latest_in(folder)
        good = "no checkpoint has been saved"
        if latest is not None:
            good = f"the last good checkpoint is {folder / latest}"
        raise RunError(
            f"after {step} steps {bad[0]!r} has elements that are not finite: nothing of this step "
            f"is saved; {good}. Lower the learning rate or clip the gradients; "
            "allow_nonfinite=True saves such values all the same"
        )
