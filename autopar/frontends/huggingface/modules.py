"""The module of a configuration, by its type's own code in transformers."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ModelError, UsageError

from .file import File, read_configuration

TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageClassification",
    "AutoModelForMultimodalLM",
    "AutoModel",
)
"""Classes of transformers that make a model for a task, in the order in which they are tried."""
_MISSING = (
    "{model} needs transformers, whose code it is built by: pip install 'autopar[transformers]'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A module on the meta device.

    `task`: the class of transformers that made it. `build` makes it with weights: those of
    safetensors files in the configuration's folder, or else random ones. `notes`: sentences for
    the user.
    """

    module: Any
    task: str
    config: Any
    build: Callable[[], Any]
    notes: tuple[str, ...]


def configured(path: str | Path, dtype: str) -> Configured:
    """The module that a configuration describes, in training mode.

    Raises `ModelError` if the file describes no model that transformers can make, and `UsageError`
    if transformers is not installed or does not know the type.
    """
    file = read_configuration(path)
    with _quiet_and_offline(str(path)):
        config = _config(file)
        task = _task(config)
        with _on_meta():
            module = _made(file, task, config, dtype)
    return Configured(
        module=module,
        task=task.__name__,
        config=config,
        build=lambda: _with_weights(file, task, config, dtype),
        notes=tuple(_notes(file, module, dtype)),
    )


def known_types() -> dict[str, str]:
    """The types that transformers can make a module of, each with its first task."""
    with _quiet_and_offline("autopar models"):
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        known: dict[str, str] = {}
        for name in TASKS:
            task = getattr(transformers, name, None)
            for kind in getattr(getattr(task, "_model_mapping", None), "_model_mapping", ()):
                if kind in CONFIG_MAPPING:
                    known.setdefault(kind, name)
        return dict(sorted(known.items()))


def _config(file: File) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = dict(file.keys)
    kind = keys.pop("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(f"{file.path}: model_type is missing")
    if kind not in CONFIG_MAPPING:
        named = _type_of_class(keys.get("architectures"))
        if named is None:
            raise UsageError(_unknown(file, kind, sorted(CONFIG_MAPPING)))
        kind = named
    try:
        return AutoConfig.for_model(kind, **keys)
    except Exception as error:  # every class checks its keys in a way of its own
        raise ModelError(f"{file.path}: {_first_line(error)}") from error


def _type_of_class(classes: Any) -> str | None:
    """The type of the first class of transformers among a file's `architectures`."""
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    kinds = {name: kind for table in tables for kind, name in table.items()}
    named = classes if isinstance(classes, list) else []
    return next((kinds[name] for name in named if isinstance(name, str) and name in kinds), None)


def _unknown(file: File, kind: str, known: list[str]) -> str:
    near = difflib.get_close_matches(kind, known, n=5)
    text = f"{file.path}: transformers has no model_type {kind!r}"
    if near:
        text += f"; of its {len(known)} types the nearest are {', '.join(near)}"
    if file.code:
        text += f". Its own code ({file.code}) is not executed"
    return text


def _task(config: Any) -> Any:
    """The class of transformers for the configuration's first architecture, or for its type."""
    import transformers

    tasks = [getattr(transformers, name) for name in TASKS if hasattr(transformers, name)]
    fitting = [task for task in tasks if type(config) in task._model_mapping]
    wanted = (getattr(config, "architectures", None) or [""])[0]
    for task in fitting:
        made = task._model_mapping[type(config)]
        if wanted in [cls.__name__ for cls in (made if isinstance(made, tuple) else (made,))]:
            return task
    if not fitting:
        raise ModelError(f"transformers has no module for {type(config).__name__}")
    return fitting[0]


def _made(file: File, task: Any, config: Any, dtype: str) -> Any:
    import torch

    try:
        return task.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        ).train()
    except Exception as error:  # whatever the type's own code says of wrong sizes
        raise ModelError(f"{file.path}: {_first_line(error)}") from error


def _on_meta() -> Any:
    import torch

    return torch.device("meta")


def _with_weights(file: File, task: Any, config: Any, dtype: str) -> Any:
    import torch

    with _quiet_and_offline(str(file.path)):
        if not any(file.folder.glob("*.safetensors")):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _made(file, task, config, dtype)
        if file.stored:
            raise ModelError(
                f"{file.folder}: its weights are stored as {file.stored}, which is not read"
            )
        try:
            return task.from_pretrained(
                file.folder,
                config=config,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            ).train()
        except Exception as error:
            raise ModelError(f"{file.folder}: {_first_line(error)}") from error


def _notes(file: File, module: Any, dtype: str) -> Iterator[str]:
    kind = file.keys["model_type"]
    if kind != module.config.model_type:
        name = type(module).__name__
        yield f"transformers has no type {kind}: it is built as {name}, which its file names"
    if file.stored:
        yield f"its weights are stored as {file.stored}; the plan trains them in {dtype}"
    if file.code:
        name = type(module).__name__
        yield f"its own code ({file.code}) is not executed: {name} is that of transformers"
    further = file.keys.get("num_nextn_predict_layers") or 0
    if further and not any("mtp" in name for name, _ in module.named_modules()):
        yield (
            f"its layers of multi-token prediction ({further}) are not in "
            f"{type(module).__name__}, and not planned"
        )


@contextmanager
def _quiet_and_offline(model: str) -> Iterator[None]:
    """Transformers without downloads and without its warnings; `UsageError` if it is missing."""
    try:
        import huggingface_hub.constants as hub
        import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(_MISSING.format(model=model)) from error
    logger = logging.getLogger("transformers")
    before = (hub.HF_HUB_OFFLINE, logger.level)
    hub.HF_HUB_OFFLINE = True
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before[0]
        logger.setLevel(before[1])


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
