"""Transformers of diffusion, by the class of diffusers that a configuration names."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from autopar.errors import ModelError, UsageError, unknown

from .file import File
from .made import Configured, first_line, quiet_and_offline, stored_or_drawn

CLASS = "_class_name"
"""The key that names a class."""
PROJECT = "diffusers"
_LOSS = "its loss is the mean square of what it returns: diffusers has none in its modules"


def configured(file: File, dtype: str) -> Configured:
    """The module that a configuration of diffusers describes; raises as for transformers."""
    import torch

    name = str(file.keys[CLASS])
    with quiet_and_offline(str(file.path), PROJECT):
        kind = _class(file, name)
        with torch.device("meta"):
            module = _made(file, kind, dtype)
    fresh = partial(_made, file, kind, dtype)
    notes = [_LOSS]
    if file.stored:
        notes.append(f"its weights are stored as {file.stored}; the plan trains them in {dtype}")
    return Configured(
        kind=name,
        project=PROJECT,
        module=module,
        task=name,
        config=module.config,
        fresh=fresh,
        build=stored_or_drawn(file, partial(_read, file, kind, dtype), fresh),
        constants={"return_dict": False},
        notes=tuple(notes),
    )


def whole_keys(file: File) -> dict[str, Any]:
    """The keys of a configuration with the defaults of its class."""
    with quiet_and_offline(str(file.path), PROJECT):
        taken = inspect.signature(_class(file, str(file.keys[CLASS]))).parameters
    own = {name: each.default for name, each in taken.items() if each.default is not each.empty}
    return {**own, **file.keys}


def known_classes() -> list[str]:
    """The transformers among the classes of diffusers."""
    with quiet_and_offline("autopar models", PROJECT):
        import diffusers

        return [name for name in dir(diffusers) if _is_transformer(name)]


def _is_transformer(name: str) -> bool:
    return "Transformer" in name and name.endswith("Model")


def _class(file: File, name: str) -> Any:
    """The class of a name, of those that diffusers itself has."""
    known = known_classes()
    if name not in known:
        raise UsageError(f"{file.path}: " + unknown("class of diffusers", name, known))
    import diffusers

    return getattr(diffusers, name)


def _made(file: File, kind: Any, dtype: str) -> Any:
    import torch

    with quiet_and_offline(str(file.path), PROJECT):
        try:
            return kind.from_config(dict(file.keys)).to(getattr(torch, dtype)).train()
        except Exception as error:  # whatever the class says of wrong sizes
            raise ModelError(f"{file.path}: {first_line(error)}") from error


def _read(file: File, kind: Any, dtype: str) -> Any:
    import torch

    with quiet_and_offline(str(file.path), PROJECT):
        return kind.from_pretrained(
            file.folder,
            torch_dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
        ).train()
