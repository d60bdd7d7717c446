"""`Configured`, a module made of a configuration, and what the projects that make one share."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import ModelError, UsageError

from .file import File


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A module on the meta device, in training mode.

    `kind`: the type that the file names. `task`: the class of `project` that made it. `fresh` makes
    it with random weights, drawn by torch's generator, `build` with those of safetensors files in
    the configuration's folder, or else random ones of a seed. `constants`: arguments of its calls
    that are no tensors. `notes`: sentences for the user.
    """

    kind: str
    project: str
    module: Any
    task: str
    config: Any
    fresh: Callable[[], Any]
    build: Callable[[int], Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def stored_or_drawn(
    file: File, read: Callable[[], Any], fresh: Callable[[], Any]
) -> Callable[[int], Any]:
    """The function of a seed that reads the weights beside a configuration, or draws them."""

    def build(seed: int) -> Any:
        import torch

        if not any(file.folder.glob("*.safetensors")):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return fresh()
        if file.stored:
            raise ModelError(
                f"{file.folder}: its weights are stored as {file.stored}, which is not read"
            )
        try:
            return read()
        except Exception as error:
            raise ModelError(f"{file.folder}: {first_line(error)}") from error

    return build


@contextmanager
def quiet_and_offline(model: str, project: str) -> Iterator[None]:
    """A project without downloads and without its warnings; `UsageError` if it is missing."""
    try:
        import huggingface_hub.constants as hub

        importlib.import_module(project)
    except ImportError as error:
        raise UsageError(
            f"{model} needs {project}, whose code it is built by: pip install 'autopar[{project}]'"
        ) from error
    logger = logging.getLogger(project)
    before = (hub.HF_HUB_OFFLINE, logger.level)
    hub.HF_HUB_OFFLINE = True
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before[0]
        logger.setLevel(before[1])


def first_line(error: Exception) -> str:
    """The name of an error and the first lines of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
