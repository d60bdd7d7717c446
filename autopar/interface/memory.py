"""`estimate_memory`: whether a module's training step fits a device, before one is rented.

The form is that of pytorch/rfcs#108: total and parts in MB, and `fits(device)`. The step is planned
for one device, with everything on it, and its bytes are those that a plan predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.api import planned_with
from autopar.costmodel import load_cluster
from autopar.costmodel.calibration.intervals import chance_to_fit, memory_interval
from autopar.errors import UsageError, unknown
from autopar.options.python_words import python_words
from autopar.options.values import OPTIMIZERS
from autopar.planning.model.request import WITHOUT_LIMIT, default_limit
from autopar.units import bytes_text, parse_bytes

if TYPE_CHECKING:
    import torch

MB = 1e6
PLANNED_ON = "dgx-h100"
"""The cluster of the plan; bytes are those of the tensors, on any device."""
BY_CLASS = {"Adam": "adamw", "AdamW": "adamw", "Lamb": "lamb", "Momentum": "momentum"}
"""The planned optimizer of a class of torch's or autopar's, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a step on one device.

    `parts`: by kind (parameters, gradients, master, optimizer, activations, transient, ...).
    `interval`: nine runs in ten lie within these.
    """

    total: float
    parts: Mapping[str, float]
    interval: tuple[float, float]

    @property
    def total_mb(self) -> float:
        """All bytes, in MB (10^6 bytes)."""
        return self.total / MB

    @property
    def params_mb(self) -> float:
        """Parameters, their float32 copies, buffers and the inputs, in MB."""
        return self._mb("parameters", "master")

    @property
    def gradients_mb(self) -> float:
        """Gradients, in MB."""
        return self._mb("gradients")

    @property
    def optimizer_mb(self) -> float:
        """State of the optimizer, in MB."""
        return self._mb("optimizer")

    @property
    def activations_mb(self) -> float:
        """Values kept for the backward pass, and those of a moment, in MB."""
        return self.total_mb - self.params_mb - self.gradients_mb - self.optimizer_mb

    def fits(self, device: int | str = 0) -> bool:
        """Whether it fits a device: a GPU of this machine by number, a cluster's, or an amount.

        `device`: 0, "dgx-h100" or "80GiB".
        """
        return self.total <= _room(device)

    def chance(self, device: int | str = 0) -> float:
        """The share of runs of which it fits a device (as of `fits`), from published runs."""
        return chance_to_fit(self.total, _room(device))

    def _mb(self, *kinds: str) -> float:
        return sum(self.parts.get(kind, 0.0) for kind in kinds) / MB

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.parts.items() if size)
        least, most = map(bytes_text, self.interval)
        return f"{bytes_text(self.total)}: {parts}; nine runs in ten need {least} to {most}"


@python_words
def estimate_memory(
    module: torch.nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | str | None = None,
    **options: Any,
) -> MemoryEstimate:
    """Bytes of a training step of `module` on one device; without an `optimizer`, of an inference.

    Nothing is executed, and parameters may be on the meta device. `inputs`: example inputs, a tuple
    or a dict of keyword arguments. `optimizer`: one of torch over the module's parameters, or a
    name as of `plan`. `options`: as of `plan`, such as `dtype`, `batch`, `loss` or `recompute`.
    """
    alone = {"stages": 1, "micro_batches": 1, "offload": "none", "recompute": "none", "zero": 0}
    if optimizer is None:
        alone = {"mode": "infer", "stages": 1, "micro_batches": 1}
    else:
        alone["optimizer"] = _planned_as(optimizer)
    fixed = {"devices": 1, "cluster": PLANNED_ON, "memory": WITHOUT_LIMIT}
    plan = planned_with(module, inputs, {**alone, **options, **fixed}).plan
    around = memory_interval()
    total = plan.predicted.memory
    return MemoryEstimate(
        total=total,
        parts=dict(plan.predicted.memory_parts),
        interval=(total * around.low, total * around.high),
    )


def _planned_as(optimizer: torch.optim.Optimizer | str) -> str:
    """The optimizer of the plan."""
    if isinstance(optimizer, str):
        return optimizer
    name = type(optimizer).__name__
    if name == "SGD":
        return "momentum" if optimizer.defaults.get("momentum") else "sgd"
    if name not in BY_CLASS:
        said = unknown("class of optimizers", name, ("SGD", *BY_CLASS))
        raise UsageError(f"{said} Or give a name: {', '.join(OPTIMIZERS)}")
    return BY_CLASS[name]


def _room(device: int | str) -> float:
    """The bytes of a device that a step may use."""
    if isinstance(device, str) and device[:1].isdecimal():
        return parse_bytes(device, "device")
    if isinstance(device, str):
        return min(default_limit(pool) for pool in load_cluster(device).pools)
    import torch

    if device >= torch.cuda.device_count():
        raise UsageError(
            f"this machine has no GPU {device}: name a cluster (autopar cluster list) or an amount "
            'as "80GiB"'
        )
    return float(torch.cuda.get_device_properties(device).total_memory)
