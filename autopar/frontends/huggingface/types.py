"""Which types of models can be made here, and what one configuration describes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import UsageError

from . import diffusion
from .modules import TASKS, configured, known_types

_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A configuration's module: its class, parameters, those that a token meets, and notes.

    `project`: whose class it is. `parts`: parameters by the module's upper parts.
    """

    kind: str
    project: str
    module: str
    task: str
    parameters: int
    active: int
    parts: dict[str, int]
    notes: tuple[str, ...]


def types_by_task() -> dict[str, list[str]]:
    """The types that transformers knows, by the task that they are made for here.

    Also the transformers of diffusers, where it is installed.
    """
    tasks: dict[str, list[str]] = {task: [] for task in TASKS}
    for kind, task in known_types().items():
        tasks[task].append(kind)
    with contextlib.suppress(UsageError):
        tasks[diffusion.PROJECT] = diffusion.known_classes()
    return {task: kinds for task, kinds in tasks.items() if kinds}


def described(path: str | Path, dtype: str) -> Described:
    """Describe a configuration's module; raises the errors of `configured`."""
    made = configured(path, dtype)
    sizes = {name: value.numel() for name, value in made.module.named_parameters()}
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        part = _part(name)
        parts[part] = parts.get(part, 0) + size
    return Described(
        kind=made.kind,
        project=made.project,
        module=type(made.module).__name__,
        task=made.task,
        parameters=sum(sizes.values()),
        active=active_parameters(made.module, made.config),
        parts=parts,
        notes=made.notes,
    )


def active_parameters(module: Any, config: Any) -> int:
    """Parameters that a token meets: of E experts held as one tensor, the chosen k."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = next((n for name in _EXPERTS if (n := getattr(text, name, None))), None)
    total = 0
    for name, value in module.named_parameters():
        experts = value.shape[0] if ".experts." in name and value.dim() > 1 else 0
        total += value.numel() * chosen // experts if chosen and experts else value.numel()
    return total


def _part(name: str) -> str:
    """The part of the model that a parameter belongs to: the path up to its numbered layers."""
    steps: list[str] = []
    for step in name.split(".")[:-1]:
        if step.isdigit():
            break
        steps.append(step)
    return ".".join(steps[:4])
